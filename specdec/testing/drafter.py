"""Checks of drafters: clauses D1 to D12 and D15 to D18. D13 and D14 stand in ``end_to_end``."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Draft, DrafterSnapshot, DraftNoise, Sampling
from specdec.testing.models import Memory
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.playing import Played, drafts_equal, target_for, usable
from specdec.testing.registry import Broken, DrafterSubject, Run, check, expect, not_applicable
from specdec.testing.strategies import Call, calls, tokens

VOCAB = 5
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # repeats, so that a look-up finds something
DEPTHS = st.integers(1, 4)
_SETTINGS: dict[str, tuple[Sampling, DraftNoise]] = {
    "greedy": (Sampling(), DraftNoise.COUPLED),
    "coupled": (Sampling(temperature=1.0, seed=11), DraftNoise.COUPLED),
    "independent": (Sampling(temperature=1.0, seed=12), DraftNoise.INDEPENDENT),
    "filtered": (Sampling(temperature=0.8, top_k=3, presence_penalty=0.5, seed=13), DraftNoise.INDEPENDENT),
}
_settings = st.sampled_from(sorted(_SETTINGS))
_memories = st.sampled_from(list(Memory))
_prompts = st.one_of(tokens(VOCAB, min_size=1), st.just(list(PROMPT)))
_cycle = (st.integers(0, 4), st.integers(0, 4), st.integers(0, VOCAB - 1), st.integers(0, 4))


def _start(subject: DrafterSubject, setting: str, memory: Memory, **options: Any) -> Played:
    sampling, noise = _SETTINGS[setting]
    return Played.start(subject, memory=memory, sampling=sampling, noise=noise, **options)


@check("D1")
def short_and_inside(subject: DrafterSubject, run: Run) -> None:
    """A draft has at most ``depth`` tokens, each a plain int inside the vocabulary."""

    def body(prompt: list[int], depth: int, setting: str) -> None:
        played = _start(subject, setting, Memory.ATTENTION)
        played.feed(prompt)
        for _ in range(2):
            draft = played.propose(depth)
            expect(isinstance(draft, Draft), "propose returns a Draft", got=draft)
            expect(isinstance(draft.tokens, tuple), "draft tokens are a tuple", got=draft.tokens)
            expect(len(draft.tokens) <= depth, "the draft is too long", got=draft.tokens, expected=f"{depth} at most")
            for token in draft.tokens:
                expect(type(token) is int, "a token is a plain int", got=f"{token!r} of type {type(token).__name__}")
                expect(0 <= token < VOCAB, "a token is outside the vocabulary", got=token, expected=f"0 to {VOCAB - 1}")
            played.finish(usable(draft, depth, VOCAB), 1, 1)

    run.explore(body, prompt=_prompts, depth=DEPTHS, setting=_settings)


@check("D2")
def context_unchanged(subject: DrafterSubject, run: Run) -> None:
    """The context is read and never changed: neither its tokens nor its settings."""
    played = _start(subject, "greedy", Memory.ATTENTION)
    played.contexts = []
    played.feed(PROMPT, chunk=3)
    for accepted in (0, 1, 4):
        played.cycle(3, accepted, 2)
    played.drafter.snapshot(played.context())
    for context, before in played.contexts:
        expect(list(context) == before.tokens, "the tokens were changed", got=list(context), expected=before.tokens)
        for name, value in before.settings.items():
            expect(getattr(context, name) == value, f"{name} was changed", got=getattr(context, name), expected=value)


@check("D3")
def one_token(subject: DrafterSubject, run: Run) -> None:
    """One token of context is enough, and no prefill comes before it."""
    for memory in Memory:
        for depth in (1, 3):
            played = _start(subject, "greedy", memory)
            played.feed([3])
            expect(played.state.length == 0, "nothing is prefilled for one token")
            for accepted in (0, 4):
                played.cycle(depth, accepted, 1)


@check("D4")
def depth_zero(subject: DrafterSubject, run: Run) -> None:
    """Depth 0 gives the empty draft."""

    def body(prompt: list[int], setting: str) -> None:
        played = _start(subject, setting, Memory.ATTENTION)
        played.feed(prompt)
        draft = played.propose(0)
        expect(len(draft.tokens) == 0, "depth 0 was answered with tokens", got=draft.tokens, expected="()")

    run.explore(body, examples=10, prompt=_prompts, setting=_settings)


def global_random_state() -> list[Any]:
    """The state of every global generator that a plugin could draw from."""
    states: list[Any] = [random.getstate(), repr(np.random.get_state())]
    torch = sys.modules.get("torch")
    if torch is not None:
        states.append(torch.get_rng_state().tolist())
    return states


@contextlib.contextmanager
def global_seeds(seed: int) -> Iterator[None]:
    """Seed every global generator, and put them back."""
    before, numpy_before = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    torch_before = torch.get_rng_state() if torch is not None else None
    try:
        random.seed(seed)
        np.random.seed(seed)
        if torch is not None:
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
        if torch is not None:
            torch.set_rng_state(torch_before)


@check("D5")
def same_calls_same_drafts(subject: DrafterSubject, run: Run) -> None:
    """The same calls give the same drafts, and no global generator is read or moved."""

    def body(prompt: list[int], setting: str, depths: list[int]) -> None:
        drafts: list[list[Draft]] = []
        for seed in (1, 2, 3):
            with global_seeds(seed):
                played = _start(subject, setting, Memory.ATTENTION)
                before = global_random_state()
                played.feed(prompt)
                drafts.append([played.cycle(depth, 1, depth) for depth in depths])
                expect(global_random_state() == before, "a global generator was moved")
        for other in drafts[1:]:
            for one, two in zip(drafts[0], other, strict=True):
                expect(drafts_equal(one, two), "the same calls gave another draft", got=two, expected=one)

    run.explore(body, examples=15, prompt=_prompts, setting=_settings, depths=st.lists(DEPTHS, min_size=1, max_size=3))


# --- state -----------------------------------------------------------------------------------------------------------


def _play(played: Played, steps: list[Call], prompt: list[int]) -> None:
    played.feed(prompt, chunk=3)
    for step in steps:
        if step.name == "cycle":
            played.feed([] if played.tokens else [0])
            played.cycle(*step.numbers)
        elif step.name == "feed":
            played.feed(list(step.numbers), chunk=2)
            played.generated_from = len(played.tokens)
        elif step.name == "idle":
            played.feed([] if played.tokens else [0])
            for _ in range(step.numbers[0]):
                played.cycle(0, 0, 1)
        elif step.name == "rewind":
            played.rewind(max(0, len(played.tokens) - step.numbers[0]))
        elif step.name == "rewind_and_feed":
            played.rewind(max(0, len(played.tokens) - step.numbers[0]))
            played.feed([step.numbers[1]])
    played.feed([] if played.tokens else [0])


def _same_as_fresh(played: Played, depth: int, what: str) -> None:
    fresh = played.fresh()
    got, expected = played.propose(depth), fresh.propose(depth)
    expect(
        drafts_equal(got, expected),
        f"{what}, the draft differs from that of a fresh drafter which saw the same tokens",
        got=got,
        expected=expected,
        tokens=played.tokens,
    )


@check("D6")
def state_follows_the_tokens(subject: DrafterSubject, run: Run) -> None:
    """After any cycles and prompts, the next draft is that of a fresh drafter which saw the same tokens."""

    def body(prompt: list[int], steps: list[Call], depth: int, setting: str, memory: Memory) -> None:
        played = _start(subject, setting, memory)
        _play(played, steps, prompt)
        _same_as_fresh(played, depth, "after these calls")

    steps = calls(cycle=_cycle, idle=(st.integers(1, 10),), feed=(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1)))
    run.explore(body, examples=40, prompt=_prompts, steps=steps, depth=DEPTHS, setting=_settings, memory=_memories)


@check("D7")
def rewind_forgets(subject: DrafterSubject, run: Run) -> None:
    """After a rewind, to wherever the target got, the next draft is that of a fresh drafter."""

    def body(prompt: list[int], steps: list[Call], back: int, depth: int, setting: str, memory: Memory) -> None:
        played = _start(subject, setting, memory)
        _play(played, [*steps, Call("rewind", (back,))], prompt)
        _same_as_fresh(played, depth, "after a rewind")

    steps = calls(
        cycle=_cycle,
        idle=(st.integers(1, 10),),
        rewind=(st.integers(0, 12),),
        rewind_and_feed=(st.integers(0, 12), st.integers(0, VOCAB - 1)),
    )
    run.explore(
        body,
        examples=80,
        prompt=_prompts,
        steps=steps,
        back=st.integers(0, 6),
        depth=DEPTHS,
        setting=_settings,
        memory=_memories,
    )


@check("D8")
def settle_survives(subject: DrafterSubject, run: Run) -> None:
    """After ``settle``, a drafter built over the restored state proposes what the settled one proposes."""

    def body(prompt: list[int], steps: list[Call], depth: int, setting: str, memory: Memory) -> None:
        played = _start(subject, setting, memory)
        _play(played, steps, prompt)
        rebuilt = played.rebuilt()
        for round_ in range(2):
            got, expected = rebuilt.propose(depth), played.propose(depth)
            expect(
                drafts_equal(got, expected),
                f"after settle and restore, draft {round_} differs from that of the drafter that went on",
                got=got,
                expected=expected,
                tokens=played.tokens,
            )
            kept = usable(got, depth, VOCAB)
            rebuilt.finish(kept, 1, 2)
            played.finish(kept, 1, 2)

    run.explore(
        body,
        examples=30,
        prompt=_prompts,
        steps=calls(cycle=_cycle, idle=(st.integers(1, 10),)),
        depth=DEPTHS,
        setting=_settings,
        memory=_memories,
    )


@check("D17")
def snapshots_are_copies(subject: DrafterSubject, run: Run) -> None:
    """``snapshot`` is a copy: a drafter built with it, or without, proposes what the settled one does."""
    given: list[DrafterSnapshot] = []

    def body(prompt: list[int], steps: list[Call], later: list[Call], depth: int, setting: str, memory: Memory) -> None:
        played = _start(subject, setting, memory)
        _play(played, steps, prompt)
        kept = played.keep()
        if kept.drafter is None:
            return
        given.append(kept.drafter)
        _well_formed(kept.drafter)
        wanted = []
        for _ in range(2):
            wanted.append(usable(played.propose(depth), depth, VOCAB))
            played.finish(wanted[-1], 1, 2)
        _play(played, later, [])  # the original goes on, and back
        for saved, how in ((kept.drafter, "with"), (None, "without")):
            other = played.restored(kept, saved)
            for round_, expected in enumerate(wanted):
                got = usable(other.propose(depth), depth, VOCAB)
                expect(
                    drafts_equal(got, expected),
                    f"draft {round_} of a drafter built {how} the snapshot differs from that of the settled one",
                    got=got,
                    expected=expected,
                    tokens=kept.tokens,
                )
                other.finish(got, 1, 2)

    later = calls(max_size=3, cycle=_cycle, rewind_and_feed=(st.integers(0, 8), st.integers(0, VOCAB - 1)))
    run.explore(
        body,
        examples=30,
        prompt=_prompts,
        steps=calls(cycle=_cycle, idle=(st.integers(1, 10),)),
        later=later,
        depth=DEPTHS,
        setting=_settings,
        memory=_memories,
    )
    if not given:
        not_applicable("snapshot() gives None: nothing of its own is kept")


def _well_formed(snapshot: Any) -> None:
    """Arrays by name, and metadata that a file's header can hold."""
    expect(isinstance(snapshot, DrafterSnapshot), "snapshot returns a DrafterSnapshot or None", got=snapshot)
    for name in snapshot.arrays:
        expect(type(name) is str, "an array's name is a str", got=name)
    for name, value in snapshot.meta.items():
        expect(type(name) is str, "the name of metadata is a str", got=name)
        expect(type(value) in (int, str), "metadata are plain ints and strings", got=f"{name} = {value!r}")


@check("D15")
def sequences_apart(subject: DrafterSubject, run: Run) -> None:
    """Sequences do not influence each other: drafts are the same whatever other sequences did before or between."""

    def body(prompt: list[int], other_prompt: list[int], steps: list[Call], setting: str) -> None:
        alone = _start(subject, setting, Memory.ATTENTION)
        alone.feed(prompt)
        expected = [alone.cycle(*step.numbers) for step in steps]
        played = _start(subject, setting, Memory.ATTENTION)
        other = _start(subject, setting, Memory.ATTENTION, model=played.model, shared=played.shared)
        other.feed(other_prompt)
        played.feed(prompt)
        for step, wanted in zip(steps, expected, strict=True):
            other.cycle(3, 1, step.numbers[2])
            got = played.cycle(*step.numbers)
            expect(drafts_equal(got, wanted), "another sequence changed a draft", got=got, expected=wanted)

    run.explore(
        body,
        examples=20,
        prompt=_prompts,
        other_prompt=_prompts,
        steps=calls(max_size=4, cycle=_cycle),
        setting=_settings,
    )


# --- laws ------------------------------------------------------------------------------------------------------------


@check("D9")
def laws_are_laws(subject: DrafterSubject, run: Run) -> None:
    """A law is ``[K, V]`` float32, finite, not negative, sums to 1, and gives the drafted token more than 0."""

    def body(prompt: list[int], depth: int, setting: str, seed: int) -> None:
        sampling, noise = _SETTINGS[setting]
        played = Played.start(
            subject, sampling=Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed), noise=noise
        )
        played.feed(prompt)
        draft = played.propose(depth)
        if draft.probs is None:
            return
        laws = np.asarray(draft.probs)
        shape = (len(draft.tokens), VOCAB)
        expect(laws.shape == shape, "laws have another shape", got=laws.shape, expected=shape)
        expect(laws.dtype == np.float32, "laws are float32", got=laws.dtype)
        expect(np.isfinite(laws).all() and (laws >= 0).all(), "a probability is negative or not finite", got=laws)
        sums = laws.sum(axis=1, dtype=np.float64)
        expect(np.allclose(sums, 1.0, atol=1e-4), "a law does not sum to 1", got=sums)
        for row, token in enumerate(usable(draft, depth, VOCAB).tokens):
            expect(laws[row, token] > 0, f"token {token} has probability 0 in its own law", got=laws[row])

    run.explore(body, examples=40, prompt=_prompts, depth=DEPTHS, setting=_settings, seed=st.integers(0, 2**32))


@check("D10")
def laws_are_honest(subject: DrafterSubject, run: Run) -> None:
    """The law handed over is the law that the token was drawn from, given all that was known before the draw."""
    draws = run.count(400)
    model = target_for(subject)
    laws: dict[tuple[int, ...], Any] = {}
    counts: dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.int64]]] = {}
    shared = None
    for seed in range(draws):
        sampling = Sampling(temperature=1.0, seed=seed * 7919 + run.seed)
        played = Played.start(subject, model=model, sampling=sampling, noise=DraftNoise.INDEPENDENT, shared=shared)
        shared = played.shared
        played.feed(PROMPT)
        draft = usable(played.propose(2), 2, VOCAB)
        for row, token in enumerate(draft.tokens):
            before = draft.tokens[:row]
            law = _point(token) if draft.probs is None else draft.probs[row]
            if before in laws and not np.allclose(law, laws[before], atol=1e-6):
                raise Broken(
                    "the law depends on the draw: one context, two laws",
                    got=law,
                    expected=laws[before],
                    context=[*PROMPT, *before],
                    seed=sampling.seed,
                )
            laws[before] = law
            counts.setdefault(before, np.zeros(VOCAB, np.int64))[token] += 1
    if not laws:
        not_applicable("it drafts nothing here")
    for before, counted in counts.items():
        if counted.sum() < 50:
            continue
        fit = goodness_of_fit(counted, laws[before])
        expect(
            fit.passes(1e-6),
            f"drafted tokens do not follow the law handed over: {fit}",
            got=counted,
            expected=laws[before] * counted.sum(),
            context=[*PROMPT, *before],
            draws=int(counted.sum()),
        )


def _point(token: int) -> Any:
    law = np.zeros(VOCAB, np.float32)
    law[token] = 1.0
    return law


# --- manners ---------------------------------------------------------------------------------------------------------


@check("D11")
def needs_declared(subject: DrafterSubject, run: Run) -> None:
    """What a drafter uses of its target is named in ``needs``: hidden states, and the MTP head."""
    _sealed(subject, "needs does not declare")


@check("D12")
def state_left_alone(subject: DrafterSubject, run: Run) -> None:
    """The committed state of its sequence is the engine's: a drafter runs MTP passes on it and nothing else."""
    _sealed(subject, "which is the engine's")


def _sealed(subject: DrafterSubject, complaint: str) -> None:
    """Play with the seal on; only errors with ``complaint`` count, others are other clauses'."""
    try:
        for setting in sorted(_SETTINGS):
            played = _start(subject, setting, Memory.ATTENTION, sealed=True)
            played.feed(PROMPT, chunk=3)
            for accepted in (0, 1, 4, 2):
                played.cycle(3, accepted, 2)
            for _ in range(12):  # depth 0: pairs pile up
                played.cycle(0, 0, 1)
            played.rewind(9)
            played.feed([2, 3])
            played.cycle(3, 2, 1)
            played.rebuilt().cycle(2, 1, 1)
    except Exception as error:
        if complaint in str(error):
            raise Broken(str(error).split("\n")[0]) from error


@check("D18")
def reports_change_nothing(subject: DrafterSubject, run: Run) -> None:
    """``report`` is plain JSON data without NaN, a copy, and asking for it changes nothing."""

    def body(prompt: list[int], steps: list[Call], setting: str) -> None:
        asked, silent = (_start(subject, setting, Memory.ATTENTION) for _ in range(2))
        reports = [_reported(asked)]
        for played in (asked, silent):
            played.feed(prompt)
        for step in steps:
            reports.append(_reported(asked))
            got, expected = asked.cycle(*step.numbers), silent.cycle(*step.numbers)
            expect(drafts_equal(got, expected), "report() changed a draft", got=got, expected=expected)
        for told, text in reports:
            now = _as_json(told)
            expect(now == text, "what report() gave is still written to", got=now, expected=text)

    run.explore(body, examples=15, prompt=_prompts, steps=calls(max_size=4, cycle=_cycle), setting=_settings)


def _reported(played: Played) -> tuple[dict[str, Any], str]:
    """What ``report`` gives, as a result takes it over, and as JSON."""
    before = global_random_state()
    told: object = played.drafter.report()
    if not isinstance(told, Mapping):
        raise Broken("report returns a mapping", got=told)
    for name in told:
        expect(type(name) is str, "a name in a report is a str", got=name)
    report = dict(told)
    text = _as_json(report)
    again = _as_json(dict(played.drafter.report()))
    expect(_but_floats(again) == _but_floats(text), "asking twice gives two answers", got=again, expected=text)
    expect(global_random_state() == before, "a global generator was moved")
    return report, text


def _as_json(report: dict[str, Any]) -> str:
    try:
        return json.dumps(report, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Broken(f"a report is no plain JSON data: {error}", got=report) from error


def _but_floats(text: str) -> Any:
    """JSON data without its floats: a report may tell a time that goes on."""
    return json.loads(text, parse_float=lambda number: None)


@check("D16", kind="advice")
def says_nothing(subject: DrafterSubject, run: Run) -> None:
    """Nothing is printed: a library's output belongs to the program that uses it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        played = _start(subject, "greedy", Memory.ATTENTION)
        played.feed(PROMPT)
        for accepted in (0, 1, 4):
            played.cycle(3, accepted, 2)
    expect(not out.getvalue() and not err.getvalue(), "something was printed", got=out.getvalue() + err.getvalue())
