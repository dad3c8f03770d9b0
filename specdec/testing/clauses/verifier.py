"""Checks of verifiers: clauses V1 to V14.

One driver decides single calls and compares each committed token with the reference; others count what is emitted.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import Context, Draft, DraftNoise, Guarantee, Sampling, Verdict
from specdec.drafters.gate import DraftGate, Drawing
from specdec.errors import ShapeError, UnsupportedError
from specdec.testing import strategies
from specdec.testing.checks import (
    Broken,
    Faults,
    Run,
    check,
    checks_of,
    expect,
    expect_equal,
    expect_error,
    not_applicable,
    own_generators,
)
from specdec.testing.engine_run import expect_plain_output
from specdec.testing.subjects import PluginSubject
from specdec.testing.table_model import Memory, TableModel
from specdec.testing.verifier_cases import VOCAB, Case, cases, decide, emitted, every_position


def _calls(subject: PluginSubject, case: Case) -> Faults:
    """Decide one call, alone and after others, and compare the tokens that it commits with their rows."""
    faults, verifier = Faults(), subject.make()
    verdict: Any = decide(verifier, case)
    note = faults.note
    _pure(subject, case, verdict, faults)
    if verdict is None:
        return faults
    note("V1", isinstance(verdict, Verdict), "verify does not return a Verdict", got=verdict)
    for name, most in (("accepted", len(case.draft.tokens)), ("next_token", case.vocab - 1)):
        value = getattr(verdict, name, None)
        note("V1", type(value) is int, f"{name} is not a plain int", got=type(value).__name__)
        inside = isinstance(value, int | np.integer) and 0 <= value <= most
        note("V1", inside, f"{name} is out of range", got=value, expected=f"0 to {most}")
        if not inside:
            return faults
    bound, law = verifier.bound, case.law
    promises_distribution = verifier.guarantee in (Guarantee.EXACT, Guarantee.DISTRIBUTION)
    greedy, expected = case.sampling.temperature == 0, []
    for row, token in enumerate(emitted(case, verdict)):
        history, values = case.history_of(row), law.processed(row)
        gap, facts = float(values.max() - values[token]), {"verdict": verdict}
        what = f"token {token} of row {row} has probability 0"
        note("V4", case.rows[row, token] > -np.inf, what, **facts)
        note("V12", gap < math.inf, f"row {row} commits a forbidden token", got=token, history=history)
        if promises_distribution:
            what, probs = f"row {row} commits a token of probability 0", law.distribution(row)
            note("V12", probs[token] > 0, what, got=token, expected=probs, history=history)
            if greedy:
                what = f"at temperature 0, row {row} does not commit its best token"
                note("V5", probs[token] == 1, what, got=token, expected=int(probs.argmax()), **facts)
        if verifier.guarantee is Guarantee.EXACT:
            what = f"row {row} commits a different token than plain decoding"
            faults.note_equal("V6", token, law.choose(row), what, **facts)
        if verifier.guarantee is Guarantee.BOUNDED and isinstance(bound, int | float):
            what = f"token {token} of row {row} is too far from the best"
            within = gap <= bound + 1e-5 * (1 + bound)
            note("V7", within, what, got=f"{gap:g} nats", expected=f"at most {bound:g}", **facts)
        if values.argmax() != token:
            expected.append((row, gap))
    for position, size in verdict.deviations:
        proper = (type(position), type(size)) == (int, float)
        note("V10", proper, "a deviation is not a plain int and a plain float", got=(position, size))
        note("V9", math.isfinite(size) and size >= 0, "a gap is negative or not finite", got=size)
    if greedy:
        positions, what = [position for position, _ in verdict.deviations], "the wrong positions are reported"
        faults.note_equal("V10", positions, [row for row, _ in expected], what, verdict=verdict)
        for (position, size), (_, gap) in zip(verdict.deviations, expected, strict=False):
            close = size == gap or abs(size - gap) <= 1e-4 * (1 + abs(gap))
            note("V10", close, f"the gap at position {position} is wrong", got=size, expected=gap)
    return faults


def _pure(subject: PluginSubject, case: Case, expected: Verdict | None, faults: Faults) -> None:
    """Ask a verifier that has decided what another sequence may have at the same place, and in another cycle."""
    verifier, note = subject.make(), faults.note_equal
    reversed_ids = attrs.evolve(case, rows=case.rows[:, ::-1].copy())
    longer = attrs.evolve(case, cycle=case.cycle + 1, history=[*case.history, 0])
    for other in [longer, reversed_ids] if np.isfinite(reversed_ids.rows[:, -1]).all() else [longer]:
        decide(verifier, other)
    note("V8", decide(verifier, case), expected, "the verdict depends on calls before it")
    logits, context = HostLogits(case.rows.copy()), case.context(verifier.draft_noise)
    with faults.of("V8"), own_generators(1), contextlib.suppress(UnsupportedError):
        again = verifier.verify(case.draft, logits, context)
        expect_equal(again, expected, "the verdict depends on a global generator, or on how often it is asked")
    note("V8", logits.rows(), case.rows, "the logits were changed")


def _drive(subject: PluginSubject, run: Run, clause: str) -> None:
    verifier = subject.make()
    bound, promised = verifier.bound, {"V6": Guarantee.EXACT, "V7": Guarantee.BOUNDED}.get(clause, verifier.guarantee)
    if verifier.guarantee is not promised:
        not_applicable(f"only a verifier that is {promised.value} promises that")
    if clause == "V7":
        what = "it declares no 'bound': nats between the best logit and the worst one committed"
        expect(isinstance(bound, int | float) and 0 <= bound < math.inf, what, got=bound)
    near = bound if isinstance(bound, int | float) and 0 <= bound < math.inf else 0.5
    run.drive(subject, clause, _calls, examples=220, case=cases(bound=near))


checks_of(
    _drive,
    {
        "V1": "A verdict accepts 0 to K draft tokens and chooses a token inside the vocabulary, both plain ints.",
        "V4": "A token with target probability 0 is neither accepted nor chosen.",
        "V6": "EXACT: every committed token is the one that plain decoding chooses there, for any draft, cycle and "
        "settings.",
        "V7": "BOUNDED: the verifier declares a ``bound`` in nats; no committed token is further below the best than "
        "that.",
        "V8": "The verdict depends only on the arguments: no memory and no global generator. The logits stay as they "
        "are.",
        "V9": "Zeros, one-hots, ties and widely spaced logits are decided without an error, and nothing is NaN.",
        "V10": "At temperature 0 the deviations list each committed token that is not its row's best: position (from "
        "0) and gap in nats, a plain int and a plain float.",
        "V11": "Settings that a verifier cannot handle raise UnsupportedError; a valid call raises nothing else.",
        "V12": "Penalties, bans, minimum length and filters apply to every row with its own history, drafted tokens "
        "included.",
    },
)


@check("V2")
def one_row_too_few(subject: PluginSubject, run: Run) -> None:
    """K draft tokens come with K + 1 rows; any other number raises ShapeError."""
    verifier = subject.make()
    sampled = decide(verifier, Case(np.zeros((1, VOCAB), np.float32), [1], Draft(), Sampling(temperature=1.0)))
    for depth, rows in ((1, 1), (3, 3), (2, 4), (0, 2), (7, 7), (7, 9), (13, 13), (0, 14), (13, 1)):
        for temperature in (0.0,) if sampled is None else (0.0, 1.0):
            settings = Sampling(temperature=temperature)
            case = Case(np.zeros((rows, VOCAB), np.float32), [1], Draft((0,) * depth), settings)
            what = f"verify of {depth} tokens, {rows} rows"
            expect_error(ShapeError, partial(decide, verifier, case), what, temperature=temperature)


NEXT_TO_ONE = (47854, 50369, 2224, 37449)
"""Seeds whose uniform number for the ratio test of position 1 in cycle 1 is nearly 1."""


@check("V3")
def identical_models(subject: PluginSubject, run: Run) -> None:
    """The target's own drafts, drawn with the noise that the verifier asks for, are accepted in full; only a verifier
    that never accepts a token accepts less."""
    model, most = TableModel.random(VOCAB, seed=3), 0

    def body(history: list[int], depth: int, temperature: float, seed: int, cycle: int) -> None:
        nonlocal most
        verifier, sampling = subject.make(), Sampling(temperature=temperature, seed=seed)
        context = Context(list(history), sampling, cycle=cycle, draft_noise=verifier.draft_noise)
        drawing, rows = Drawing(DraftGate(), context, reduced=False), [model.logits(history)]
        for _ in range(depth):
            drawing.next(HostLogits(rows[-1][None]))
            rows.append(model.logits([*history, *drawing.tokens]))
        verdict = decide(verifier, Case(np.stack(rows), history, drawing.draft(), sampling, cycle=cycle))
        if verdict is None:
            return
        most = max(most, verdict.accepted)
        what = "a draft of the target itself was not accepted whole"
        if most:
            expect(verdict.accepted >= depth, what, got=verdict.accepted, expected=depth, draft=drawing.tokens)

    for seed in range(8):
        with contextlib.suppress(Broken):
            body([1], 3, seed % 2, seed, 1)
    if not most:
        not_applicable("it never accepts a token")
    for seed in NEXT_TO_ONE:  # 16 bits round it to 1
        body([1], 1, 1.0, seed, 1)
    run.explore(
        body,
        examples=40,
        history=strategies.tokens(VOCAB, min_size=1, max_size=6),
        depth=st.integers(1, 15),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 2**63 - 1),
        cycle=st.integers(1, 99),
    )


# --- what the guarantees promise -------------------------------------------------------------------------------------


@check("V5")
def target_distribution(subject: PluginSubject, run: Run) -> None:
    """EXACT and DISTRIBUTION: the emitted tokens follow the target's joint distribution, whatever was drafted."""
    verifier = subject.make()
    if verifier.guarantee not in (Guarantee.EXACT, Guarantee.DISTRIBUTION):
        not_applicable(f"a {verifier.guarantee.value} verifier promises no distribution")
    places = every_position(verifier, run.repeat(1500, least=200), run.seed)
    if places is not None:
        places.judge("the emitted tokens do not follow the target's distribution", run_seed=run.seed)
    _drive(subject, run, "V5")
    if places is None:
        not_applicable("it refuses temperatures above 0; at temperature 0 it chooses the best token of every row")


# --- noise, and the engine -------------------------------------------------------------------------------------------


@check("V14")
def all_of_the_noise(subject: PluginSubject, run: Run) -> None:
    """At temperature above 0, every bit of the seed and every position gives other noise, and, where drafts are
    independent, every cycle."""
    verifier, rng = subject.make(), np.random.default_rng(run.seed)
    rows = rng.standard_normal((8, 4, 40)).astype(np.float32)  # each at a position, and so with noise, of its own
    draft = Draft(tuple(range(3)), np.full((3, 40), 1 / 40, np.float32))

    seed, length = int(rng.integers(0, 2**63 - 1)), 9

    def verdicts(seed: int = seed, length: int = length, cycle: int = 1) -> list[Verdict | None]:
        settings: dict[str, Any] = {"sampling": Sampling(temperature=1.0, seed=seed), "cycle": cycle}
        return [
            decide(verifier, Case(logits, [1] * (length + at), draft, **settings)) for at, logits in enumerate(rows)
        ]

    usual = verdicts()
    if all(verdicts(seed=other) == usual for other in range(8)):
        not_applicable("it draws nothing")
    changes: dict[str, dict[str, int]] = {
        **{f"seeds that differ in bit {bit}": {"seed": seed ^ (1 << bit)} for bit in range(63)},
        **{f"positions that are {1 << bit} apart": {"length": length + (1 << bit)} for bit in range(12)},
    }
    if verifier.draft_noise is DraftNoise.INDEPENDENT:
        changes |= {f"cycles 1 and {cycle}": {"cycle": cycle} for cycle in (2, 3, 2**20 + 1)}
    for what, change in changes.items():
        expect(verdicts(**change) != usual, f"{what} give the same verdicts", seed=seed, position=length, other=change)


@check("V13")
def in_the_engine(subject: PluginSubject, run: Run) -> None:
    """EXACT, in the engine: drafts, depths and cycle boundaries cannot change the output, over states of every kind."""
    if subject.make().guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")
    vocab = 6
    models = {memory: TableModel.random(vocab, memory=memory, seed=6, tilt=0.5, peak=0.4) for memory in Memory}

    def body(memory: Memory, prompt: list[int], length: int, **how: Any) -> None:
        with contextlib.suppress(UnsupportedError):
            room = len(prompt) + length
            expect_plain_output(models[memory], subject.make(), prompt=prompt, count=length, capacity=room, **how)

    drawn: dict[str, Any] = {"wrong": st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=9)}
    generations: dict[str, Any] = strategies.generations(vocab)
    run.explore(
        body, examples=30, length=strategies.lengths(100), memory=st.sampled_from(Memory), **drawn, **generations
    )
