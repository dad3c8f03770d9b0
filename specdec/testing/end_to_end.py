"""Checks in the real engine over ``TableModel``: clauses D13, D14, V13 and F15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import (
    NO_NEEDS,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    ForwardPass,
    Guarantee,
    Needs,
    Sampling,
    Verifier,
)
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.loop import run_cycle
from specdec.decoding.statistics import RunStats
from specdec.errors import UnsupportedError
from specdec.testing import strategies
from specdec.testing.by_hand import law_by_hand
from specdec.testing.models import Memory, StrictForwardPass, TableModel
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.playing import CAPACITY
from specdec.testing.registry import (
    DrafterSubject,
    ForwardPassSubject,
    Run,
    VerifierSubject,
    check,
    expect,
    not_applicable,
)
from specdec.testing.verifier import JOINT, LAW_P_VALUE, LAW_VOCAB, joint_law
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

VOCAB = 6

MakeDrafter = Callable[[DrafterEnv], Drafter]


class ScriptedDrafter(Drafter):
    """Drafts what a function of history and number says: right, wrong, or both."""

    def __init__(self, script: Callable[[list[int], int], int]) -> None:
        self._script = script

    def propose(self, context: Context, depth: int) -> Draft:
        history = list(context)
        for number in range(depth):
            history.append(self._script(history, number))
        return Draft(tuple(history[len(context) :]))


def run_engine(
    target: ForwardPass,
    verifier: Verifier,
    make: MakeDrafter | None,
    prompt: Sequence[int],
    count: int,
    depths: Sequence[int],
    sampling: Sampling,
    *,
    needs: Needs = NO_NEEDS,
    shared: Any = None,
    capacity: int = CAPACITY,
) -> tuple[list[int], RunStats]:
    """``count`` tokens after ``prompt``; depths are taken in turn. No drafter: plain decoding."""
    state = target.new_state(capacity, needs)
    env = DrafterEnv(target=target, state=state, shared=shared)
    drafter = ScriptedDrafter(lambda history, number: 0) if make is None else make(env)
    tokens = list(prompt)
    context = Context(tokens, sampling, generated_from=len(prompt), draft_noise=verifier.draft_noise)
    sequence = LiveSequence(
        target=target, state=state, drafter=drafter, verifier=verifier, tokens=tokens, context=context
    )
    stats = RunStats()
    if len(prompt) > 1:
        output = target.prefill(state, tokens[:-1])
        if make is not None:
            drafter.prefill(Context(tokens[:-1], sampling), output)
    cycle = 0
    while len(tokens) < len(prompt) + count:
        room = len(prompt) + count - len(tokens)
        depth = 0 if make is None else min(depths[cycle % len(depths)], room - 1, target.info.max_rows - 1)
        run_cycle(sequence, depth, len, stats)
        cycle += 1
    return tokens[len(prompt) :], stats


_settings = strategies.samplings(VOCAB)
_prompts = st.one_of(strategies.tokens(VOCAB, min_size=1), st.just([1, 2, 3, 1, 2, 3, 1, 2]))
_depths = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@check("D13")
def tokens_of_plain_decoding(subject: DrafterSubject, run: Run) -> None:
    """In the engine with the strict verifier, the output is that of plain decoding, for every depth and sampling."""
    models = {
        memory: TableModel.random(VOCAB, memory=memory, seed=5, tilt=0.5, mtp=subject.needs.mtp, peak=0.4)
        for memory in Memory
    }

    def body(prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory) -> None:
        target = StrictForwardPass(models[memory])
        expected, _ = run_engine(models[memory], StrictVerifier(), None, prompt, 12, [0], sampling)
        got, stats = run_engine(
            target,
            StrictVerifier(),
            subject.make,
            prompt,
            12,
            depths,
            sampling,
            needs=subject.needs,
            shared=subject.prepare(target),
        )
        expect(not stats.inactive_reason, "the engine switched the drafter off", got=stats.inactive_reason)
        expect(not stats.faults, "the engine had to cut drafts", got=stats.faults)
        expect(got == expected, "the output is not that of plain decoding", got=got, expected=expected)

    run.explore(body, examples=40, prompt=_prompts, depths=_depths, sampling=_settings, memory=st.sampled_from(Memory))


@check("D14")
def law_of_the_target(subject: DrafterSubject, run: Run) -> None:
    """In the engine with a ratio test, the output follows the target's joint law: draft noise decides nothing else."""
    table = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.45, 0.05]])
    head = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None)
    prompt = [0, 1, 0, 1, 2, 0, 1]
    draws = run.count(1000)
    for block in (False, True):
        verifier = RejectionVerifier(RejectionConfig(block=block))
        shared = subject.prepare(model)
        tally = np.zeros(LAW_VOCAB**JOINT, np.int64)
        for number in range(draws):
            sampling = Sampling(temperature=1.0, seed=(run.seed << 32) + number)
            made, _ = run_engine(
                model,
                verifier,
                subject.make,
                prompt,
                JOINT,
                [2],
                sampling,
                needs=subject.needs,
                shared=shared,
                capacity=16,
            )
            tally[(made[0] * LAW_VOCAB + made[1]) * LAW_VOCAB + made[2]] += 1
        wanted = joint_law(
            lambda later: law_by_hand(model.logits([*prompt, *later]).tolist(), later, Sampling(temperature=1.0)),
            JOINT,
            LAW_VOCAB,
        )
        fit = goodness_of_fit(tally, wanted)
        expect(
            fit.passes(LAW_P_VALUE),
            f"with the verifier 'rejection' the output is not of the target's law: {fit}",
            got=tally,
            expected=np.round(wanted * draws, 1),
            block=block,
            draws=draws,
        )


@check("V13")
def in_the_engine(subject: VerifierSubject, run: Run) -> None:
    """EXACT, in the engine: drafts, depths and cycle boundaries cannot change the output, over states of every kind."""
    guarantee = subject.make().guarantee
    if guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")
    models = {memory: TableModel.random(VOCAB, memory=memory, seed=6, tilt=0.5, peak=0.4) for memory in Memory}

    def body(prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory, wrong: list[bool]) -> None:
        model = models[memory]

        def script(history: list[int], number: int) -> int:
            best = int(model.logits(history).argmax())
            return (best + wrong[(len(history) + number) % len(wrong)]) % VOCAB

        try:
            expected, _ = run_engine(model, subject.make(), None, prompt, 12, [0], sampling)
            got, _ = run_engine(
                StrictForwardPass(model),
                subject.make(),
                lambda env: ScriptedDrafter(script),
                prompt,
                12,
                depths,
                sampling,
            )
        except UnsupportedError:
            return
        expect(got == expected, "the output is not that of plain decoding", got=got, expected=expected)

    run.explore(
        body,
        examples=40,
        prompt=_prompts,
        depths=_depths,
        sampling=_settings,
        memory=st.sampled_from(Memory),
        wrong=st.lists(st.booleans(), min_size=1, max_size=4),
    )


@check("F15")
def target_in_the_engine(subject: ForwardPassSubject, run: Run) -> None:
    """In the engine with the strict verifier, right, wrong and mixed drafts give the tokens of plain decoding."""
    model = subject.make()
    info = model.info
    prompt = [(7 * i + 3) % info.vocab_size for i in range(5)]
    capacity = min(64, info.max_positions)
    count = min(16, capacity - len(prompt))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=17)
        plain, _ = run_engine(model, StrictVerifier(), None, prompt, count, [0], sampling, capacity=capacity)
        told = [*prompt, *plain]

        def script(history: list[int], number: int, wrong: int, told: list[int] = told) -> int:
            right = told[len(history)] if len(history) < len(told) else 0
            return (right + 1) % info.vocab_size if wrong and (len(history) + number) % wrong == 0 else right

        for wrong in (0, 1, 2, 3):

            def make(env: DrafterEnv, wrong: int = wrong) -> Drafter:
                return ScriptedDrafter(lambda history, number: script(history, number, wrong))

            got, _ = run_engine(model, StrictVerifier(), make, prompt, count, [1, 4, 2, 0], sampling, capacity=capacity)
            expect(
                got == plain,
                "the output is not that of plain decoding",
                got=got,
                expected=plain,
                every_nth_draft_token_wrong=wrong,
                temperature=temperature,
            )
