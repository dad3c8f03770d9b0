"""The wrong variants that implementations of speculative decoding really had, each killed by a named test.

Every mutant replaces a piece of production code; its killer must pass without it and fail with it. A mutant that
survives is reported here, not waived.

Faults that a plugin of ``tests/testing/broken`` has are not here again.

Left out: block verification with draft noise that repeats in every cycle (its bias, .018 on average, is below what
sampling shows; ``test_noise_differs_by_seed_position_purpose_and_cycle`` pins the key instead), and the variants of
candidate trees, which this project does not have.
"""

import functools
import itertools
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

import specdec.drafters.gate as gate
import specdec.drafters.mtp as mtp
from specdec import sampling
from specdec.backends.cpu import arrays, caches
from specdec.backends.cpu.reference import ReferenceOps
from specdec.contract import EMPTY_DRAFT, NO_NEEDS, MtpPairs
from specdec.sampling import Purpose, Rows
from specdec.testing import Subject, TableModel, as_subject, iter_checks, run_check
from specdec.verifiers import rejection
from specdec.verifiers.strict import StrictVerifier
from tests.selection import cases
from tests.verifiers import test_exact_law as exact
from tests.verifiers import test_strict_sampling as path

pytestmark = pytest.mark.mutants

Apply = Callable[[pytest.MonkeyPatch], None]


@attrs.frozen
class Mutant:
    """A wrong variant and a test that finds it."""

    name: str
    killer: Callable[[], None]
    apply: Apply


MUTANTS = []


def killed_by(*killers):
    """Put a mutant into the table, once for each of its killers."""

    def register(apply):
        for number, killer in enumerate(killers):
            MUTANTS.append(Mutant(f"{apply.__name__}{number or ''}", killer, apply))
        return apply

    return register


# --- the killers: shorter runs of tests ------------------------------------------------------------------------------


def token_rule_is_exact():
    exact.test_the_rules_emit_the_target_exactly(exact.chain, {"sizes": [(3, 2)], "seeds": range(3)})


def block_rule_is_exact():
    exact.test_the_rules_emit_the_target_exactly(exact.block, {"sizes": [(3, 2)], "seeds": range(3)})


def block_rule_gains():
    exact.test_block_verification_accepts_at_least_as_much(seeds=range(8))


def acceptance_is_the_overlap():
    exact.test_acceptance_is_the_overlap_of_the_laws(seeds=range(3))


def device_ties_go_by_id():
    logits = arrays.CpuLogits(torch.tensor([[1.0, 2.0, 2.0, 0.0]]))
    assert logits.argmax() == [1]
    assert logits.topk(2)[0] == [[1, 2]]


@functools.cache  # one killer, which passes once without a mutant
def clause(id_, given):
    """The check of a clause on a built-in plugin."""

    def killer():
        check = next(one for one in iter_checks() if one.id == id_)
        outcome = run_check(check, as_subject(check.subject, given()), seconds=600)  # the cases end it, not the clock
        if outcome.failure is not None:
            raise outcome.failure

    return killer


def _mtp():
    return mtp.specdec_drafters()[0]


def _ops():
    return as_subject(Subject.OPS, lambda: ReferenceOps(torch.float32))


# --- the ratio rule --------------------------------------------------------------------------------------------------


@killed_by(token_rule_is_exact)
def residual_is_the_target(patch):
    patch.setattr(rejection, "residual", lambda target, draft: target)


@killed_by(block_rule_is_exact)
def block_residual_is_the_target(patch):
    right = rejection.accept_block

    def wrong(target_law, draft_laws, tokens, accepts):
        accepted, _ = right(target_law, draft_laws, tokens, accepts)
        return accepted, target_law(accepted)

    patch.setattr(rejection, "accept_block", wrong)


@killed_by(token_rule_is_exact, acceptance_is_the_overlap)
def ratio_upside_down(patch):
    """Accepting by q/p looks like a better drafter: the acceptance rate must be bounded from above too."""

    def wrong(target_law, draft_laws, tokens, accepts):
        for row, token in enumerate(tokens):
            target = target_law(row)
            if not accepts[row] * target[token] < draft_laws[row][token]:
                return row, rejection.residual(target, draft_laws[row])
        return len(tokens), target_law(len(tokens))

    patch.setattr(rejection, "accept_chain", wrong)


def _noise(change):
    right = sampling.uniforms

    def wrong(seed, position, purpose, ids, cycle=0):
        return right(seed, *change(position, purpose), ids, cycle)

    return wrong


@killed_by(clause("D14", _mtp))
def one_uniform_for_all_positions_in_the_sampler(patch):
    """The same mistake in the keys of the noise: every single position still looks right."""
    wrong = _noise(lambda position, purpose: (1 if purpose is Purpose.ACCEPT else position, purpose))
    patch.setattr(rejection, "uniforms", wrong)


@killed_by(clause("D14", _mtp))
def draft_noise_is_acceptance_noise(patch):
    acceptance = {Purpose.DRAFT: Purpose.ACCEPT}
    patch.setattr(sampling, "uniforms", _noise(lambda position, purpose: (position, acceptance.get(purpose, purpose))))


# --- the block rule --------------------------------------------------------------------------------------------------


@killed_by(block_rule_gains)
def block_is_only_the_token_rule(patch):
    patch.setattr(rejection, "accept_block", rejection.accept_chain)


# --- drafters --------------------------------------------------------------------------------------------------------


@killed_by(clause("D10", _mtp))
def drawn_token_dropped_when_improbable(patch):
    right = mtp.MtpDrafter.propose

    def wrong(self, context, depth):
        draft = right(self, context, depth)
        if draft.probs is not None and draft.probs[0][draft.tokens[0]] < 0.2:
            return EMPTY_DRAFT
        return draft

    patch.setattr(mtp.MtpDrafter, "propose", wrong)


@killed_by(clause("D10", _mtp))
def better_of_two_draws(patch):
    right = sampling.draft_token

    def wrong(logits, drafted, context):
        token, law = right(logits, drafted, context)
        if law is None:
            return token, law
        u = sampling.uniforms(
            context.sampling.seed, len(context) + len(drafted), Purpose.DRAFT, np.ones(1, np.int64), 99
        )
        other = sampling.draw(law.astype(np.float64), float(u[0]))
        return (token if law[token] >= law[other] else other), law

    patch.setattr(gate, "draft_token", wrong)


@killed_by(clause("D7", _mtp))
def rewind_adopts_the_state_blindly(patch):
    """As a ledger once did: pairs that waited were dropped, and the next had the wrong position."""

    def wrong(self, length):
        self._hidden, self._tokens = [], []

    patch.setattr(MtpPairs, "cut", wrong)


def _without_waiting(restore):
    def wrong(self, snapshot, needs=NO_NEEDS):
        state = restore(self, snapshot, needs)
        if state.pairs is not None and state.pairs.waiting:
            state.pairs.fed, state.pairs._hidden = state.pairs.fed + state.pairs.waiting, []
        return state

    return wrong


@killed_by(clause("D8", _mtp))
def snapshot_without_the_pair_that_waits(patch):
    patch.setattr(TableModel, "restore", _without_waiting(TableModel.restore))


@killed_by(clause("D6", _mtp))
def token_of_a_pair_is_the_one_before(patch):
    right = MtpPairs.add

    def wrong(self, tokens, hidden, length):
        right(self, [tokens[0], *tokens[:-1]], hidden, length)

    patch.setattr(MtpPairs, "add", wrong)


# --- rows and their settings -----------------------------------------------------------------------------------------


@killed_by(path.test_every_row_follows_the_law_written_out_by_hand)
def stale_history(patch):
    patch.setattr(Rows, "history", lambda self, row: list(self._context))


@killed_by(path.test_every_row_follows_the_law_written_out_by_hand)
def grammar_only_on_the_draft(patch):
    right = sampling.processed

    def wrong(row, history, context):
        bare = sampling.Context(list(context), attrs.evolve(context.sampling, processors=()))
        return right(row, history, bare)

    patch.setattr(sampling, "processed", wrong)


@killed_by(clause("V13", StrictVerifier))
def noise_from_a_stateful_generator(patch):
    """Noise that counts how often it was asked for: the path then depends on how many rows were verified."""
    right, asked = sampling.gumbel, itertools.count()

    def wrong(seed, position, ids, purpose, cycle=0):
        return right(seed, next(asked), ids, purpose, cycle)

    patch.setattr(sampling, "gumbel", wrong)


@killed_by(clause("V13", StrictVerifier))
def noise_keyed_by_the_cycle(patch):
    right = Rows.choose

    def wrong(self, row):
        context = self._context
        with pytest.MonkeyPatch.context() as inner:
            keyed = sampling.gumbel
            inner.setattr(
                sampling, "gumbel", lambda s, p, ids, purpose, cycle=0: keyed(s, p, ids, purpose, context.cycle)
            )
            return right(self, row)

    patch.setattr(Rows, "choose", wrong)


@killed_by(path.test_ties_go_by_ascending_id)
def ties_to_the_highest_id(patch):
    right = np.lexsort

    class Wrong:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def lexsort(keys):
            return right((-keys[0], *keys[1:]))

    patch.setattr(sampling, "np", Wrong())


@killed_by(device_ties_go_by_id)
def device_ties_to_the_highest_id(patch):
    def wrong(self):
        return [len(row) - 1 - int(row[::-1].argmax()) for row in self.rows()]

    patch.setattr(arrays.CpuLogits, "argmax", wrong)


# --- state -----------------------------------------------------------------------------------------------------------


@killed_by(clause("O13", _ops))
def state_slot_before_the_last_accepted(patch):
    right = caches.CpuDeltaCache.commit

    def wrong(self, rows):
        if rows > 1 and self.replay is not None and self.raw is not None:
            replay = self.replay
            self.replay = lambda a: replay(a - 1)
        right(self, rows)

    patch.setattr(caches.CpuDeltaCache, "commit", wrong)


# --- the gate --------------------------------------------------------------------------------------------------------

_passed = set()


SAMPLE = ("residual_is_the_target",)


@pytest.mark.parametrize("mutant", cases(MUTANTS, name=lambda mutant: mutant.name, sample=SAMPLE))
def test_the_mutant_is_killed_by_its_named_test(mutant, monkeypatch):
    if mutant.killer not in _passed:
        mutant.killer()  # without the mutant it passes
        _passed.add(mutant.killer)
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.killer()
