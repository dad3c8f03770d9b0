"""Cycles that run as one graph: tokens, drafts and states of single passes, and graphs that serve every sequence."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specdec.backends.cuda.cycles import CudaCycles
from specdec.decoding.stepwise import StepwiseCycles

from specdec.backends.cuda import cycles as cycles_module
from specdec.backends.cuda import memory
from specdec.backends.cuda.kernels import accept, cycle
from specdec.contract import GreedyStart
from specdec.errors import PromptError
from specdec.testing import iter_checks
from specdec.testing.registry import as_subject, run_check
from tests import tiny
from tests.backends.cuda.test_models import PROMPT, TINY, VOCAB, _short_caches, build  # noqa: F401  (two are fixtures)
from tests.decoding.test_lossless import Case, ScriptedDepth, mtp

pytestmark = pytest.mark.interpreter

FAMILY = "qwen3_5"
WIDE = {"printable": True}  # few tokens of its own choice: a draft is right now and then


# --- the kernels between the passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 3, 16])
@pytest.mark.parametrize("halted", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settling_is_that_of_the_host(device: torch.device, kept: int, halted: int, dtype: torch.dtype) -> None:
    """Rows behind those that were kept are NaN, and must not come along."""
    fresh = torch.full((16, 37), float("nan"), dtype=dtype)
    fresh[:kept] = torch.randn(kept, 37).to(dtype)
    values = [halted, 9, 41, 7, kept, 0, 3, 0, *range(100, 100 + kept), *[-1] * (16 - kept)]
    found = []
    for settle, last_row in ((cycle.settle, cycle.last_row), (cycle.settle_reference, cycle.last_row_reference)):
        place = device if settle is cycle.settle else torch.device("cpu")
        waiting = torch.arange(16 * 37, dtype=torch.float32).view(16, 37).to(dtype).to(place)
        ids, counters = (torch.tensor(v, dtype=torch.int32, device=place) for v in ([5] * 16, [2, 99]))
        verified = torch.zeros(17, dtype=torch.int32, device=place)
        control = torch.tensor(values, dtype=torch.int32, device=place)
        settle(control, fresh.to(place), waiting, ids, counters, verified)
        found.append([x.cpu() for x in (waiting, ids, counters, verified, last_row(waiting, counters))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ((5, 1.0), (3, 2.0), 3),
        ((5, 2.0), (3, 1.0), 5),
        ((5, 1.0), (3, 1.0), 3),
        ((3, 1.0), (5, 1.0), 3),
        ((-1, float("nan")), (3, 1.0), -1),
        ((5, 1.0), (-1, float("nan")), -1),
        ((5, float("inf")), (3, 1.0), -1),
    ],
)
def test_the_better_of_two_parts(device: torch.device, first: Any, second: Any, wanted: int) -> None:
    for choose in (cycle.winner, cycle.winner_reference):
        place = device if choose is cycle.winner else torch.device("cpu")
        arguments = []
        for token, value in (first, second):
            arguments.append(torch.tensor([token], dtype=torch.int32, device=place))
            arguments.append(torch.tensor([value], dtype=torch.float32, device=place))
        out = torch.tensor([77], dtype=torch.int32, device=place)
        choose(*arguments, out)
        assert out.tolist() == [wanted]


# --- cycles -----------------------------------------------------------------------------------------------------------


def generate(folder: pathlib.Path, target: Any, prompt: Any, count: int, depths: list[int], **options: Any) -> Any:
    lm = tiny.make_lm(folder, target, lambda env: mtp(Case([], env, [])), lambda: ScriptedDepth(depths))
    session = lm.session()
    return session.generate(list(prompt), max_new_tokens=count, ignore_eos=True, **options), session


def opened(monkeypatch: pytest.MonkeyPatch) -> list[CudaCycles]:
    """Cycles that were begun from here on."""
    made: list[CudaCycles] = []
    original = CudaCycles.__init__

    def note(self: CudaCycles, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(CudaCycles, "__init__", note)
    return made


def clause(target: Any) -> Any:
    """The kit's check of greedy cycles."""
    check = next(check for check in iter_checks() if check.id == "F20")
    return run_check(check, as_subject(check.subject, target), effort=0.1)


@pytest.mark.slow
def test_the_kits_clause(build: Callable[..., Any]) -> None:
    outcome = clause(build(FAMILY, **WIDE))
    assert outcome.status.name == "PASSED", outcome.detail


@pytest.mark.parametrize("depths", [[3], [2, 0, 4, 1]])
def test_generations_are_those_of_plain_decoding(
    build: Callable[..., Any],
    checkpoint: Callable[..., pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    depths: list[int],
) -> None:
    """Also the state: it goes on with single passes afterwards."""
    made = opened(monkeypatch)
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    wanted, plainly = generate(folder, target, PROMPT, 10, [0])
    assert not made
    result, session = generate(folder, target, PROMPT, 10, depths)
    assert made
    assert result.tokens == wanted.tokens
    assert sum(result.stats.offered) > 0
    tiny.assert_same_bits(
        {n: a for n, a in target.snapshot(session.sequence.state).arrays.items() if not n.startswith("mtp.")},
        {n: a for n, a in target.snapshot(plainly.sequence.state).arrays.items() if not n.startswith("mtp.")},
    )


def test_two_sequences_take_turns_over_the_same_graphs(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path]
) -> None:
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    prompts = [(3, 1), (40, 41, 42)]
    wanted = [generate(folder, target, prompt, 10, [0])[0].tokens for prompt in prompts]
    lm = tiny.make_lm(folder, target, lambda env: mtp(Case([], env, [])), lambda: ScriptedDepth([2]))
    streams = [lm.session().stream(list(prompt), max_new_tokens=10, ignore_eos=True) for prompt in prompts]
    graphs = len(target.ops.device.graphs) if hasattr(target.ops.device, "graphs") else None
    pending = list(streams)
    while pending:
        for stream in list(pending):
            if next(stream, None) is None:
                pending.remove(stream)
    assert [stream.result.tokens for stream in streams] == wanted
    if graphs is not None:
        assert len(target.ops.device.graphs) - graphs <= 2  # both begin with two waiting rows at most


def test_a_text_that_ends_generation_takes_tokens_back(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path]
) -> None:
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    wanted, _ = generate(folder, target, PROMPT, 12, [0])
    stop = (wanted.text[2:4],)
    plainly, _ = generate(folder, target, PROMPT, 12, [0], stop=stop)
    ours, session = generate(folder, target, PROMPT, 12, [3], stop=stop)
    assert plainly.finish_reason == "stop_string"
    assert (ours.tokens, ours.text, ours.finish_reason) == (plainly.tokens, plainly.text, plainly.finish_reason)
    rest = session.generate(max_new_tokens=4, ignore_eos=True).tokens
    assert [*ours.tokens, *rest] == wanted.tokens[: len(ours.tokens) + 4]


def test_memory_that_moves_takes_along_what_the_host_has_not_counted(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that outgrow their memory, and more state slots for a longer draft, in the middle of it."""
    monkeypatch.setattr(memory, "FIRST_ROWS", 4)
    monkeypatch.setattr(memory, "GROWTH", 2)
    target, folder = build(FAMILY, **WIDE, seed=1), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE}, seed=1)
    wanted, _ = generate(folder, target, PROMPT, 16, [0])
    made = opened(monkeypatch)
    result, session = generate(folder, target, PROMPT, 16, [1, 1, 6])
    assert result.tokens == wanted.tokens
    assert len(made) == 1
    assert {cache.slots for cache in session.sequence.state.caches if hasattr(cache, "slots")} == {17}


def both_ways(target: Any, tokens: list[int], depths: list[int], head: Any = None) -> list[Any]:
    """What cycles do and leave behind, those of the target and single passes: two equal things."""
    found = []
    for stepwise in (False, True):
        state = target.new_state(64)
        hidden = target.prefill(state, tokens[:-1]).need_hidden()
        target.prefill_mtp(state, tokens[1:-1], hidden[:-1])
        start = GreedyStart((tokens[-1],), hidden[-1:], head)
        options: dict[str, Any] = {"stop_tokens": (), "limit": 40}
        made = StepwiseCycles(target, state, start, **options) if stepwise else None
        made = made or target.greedy_cycles(state, start, **options)
        assert made is not None
        done = []
        for depth in depths:
            made.submit(depth)
            done.append(made.collect())
        held = [*tokens, *(token for cycle in done for token in cycle.emitted)]
        waiting = made.close()
        after = target.decode(state, held[-1:]).need_logits().rows()[0].tolist()
        pairs = target.decode_mtp(state, held[len(held) - len(waiting) :], waiting).need_logits().rows()[0].tolist()
        found.append((done, state.length, state.mtp_length, after, pairs))
    return found


@pytest.mark.parametrize("extra", [0, 8])
def test_a_pruned_head_drafts_what_it_drafts_step_by_step(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Its own rows and those that the sequence added; two sequences that added others."""
    monkeypatch.setattr(cycles_module, "_ADDED_ROWS", (4, 16))
    target = build(FAMILY, **WIDE)
    head = target.draft_head(range(30, 90, 2))
    for tokens in ([3, 1, 5], [7, 9, 11, 13, 250]):
        ours = head.extended(tokens[: extra and len(tokens)])
        cycles, steps = both_ways(target, tokens, [2, 2], ours)
        assert cycles == steps
        assert {token for cycle in cycles[0] for token in cycle.drafted} <= set(ours.tokens)


def test_what_does_not_fit_goes_step_by_step(build: Callable[..., Any]) -> None:
    target = build(FAMILY, **WIDE)
    state = target.new_state(64)
    hidden = target.prefill(state, [1, 2]).need_hidden()
    target.prefill_mtp(state, [2], hidden[:1])
    start = GreedyStart((5,), hidden[1:])
    assert target.greedy_cycles(state, start, stop_tokens=range(VOCAB), limit=4) is None
    assert (
        build(FAMILY, eager=True).greedy_cycles(build(FAMILY, eager=True).new_state(64), start, stop_tokens=(), limit=4)
        is None
    )


def _stale_pairs(original: Any) -> Any:
    def settle(control: Any, fresh: Any, waiting: Any, ids: Any, counters: Any, verified: Any) -> None:
        kept = waiting.clone()
        original(control, fresh, waiting, ids, counters, verified)
        waiting.copy_(kept)

    return settle


def _one_more(original: Any) -> Any:
    def moved(drafted: Any, best: Any, stops: Any, control: Any) -> None:
        original(drafted, best, stops, control)
        two = accept.CYCLES.value  # 2 in the second cycle
        control[accept.KEPT.value : accept.KEPT.value + 1].copy_(control[two : two + 1])

    return moved


def _keeps_chained(original: Any) -> Any:
    def commit_rows(table: Any, kinds: Any, kept: Any, **options: Any) -> None:
        if not (isinstance(kept, int) and kept < 0):
            original(table, kinds, kept, **options)

    return commit_rows


MUTANTS = {
    "pairs of the cycle before": (cycle, "settle", _stale_pairs),
    "another number of rows is kept": (accept, "accept", _one_more),
    "chained rows stay": (accept, "commit_rows", _keeps_chained),
}


@pytest.mark.parametrize("name", ["none", *MUTANTS])
def test_mutants_are_caught(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name != "none":
        module, attribute, make = MUTANTS[name]
        monkeypatch.setattr(module, attribute, make(getattr(module, attribute)))
    target = build(FAMILY, **WIDE, seed=2 + ["none", *MUTANTS].index(name))  # graphs of its own
    try:
        cycles, steps = both_ways(target, [3, 1, 5], [3, 3, 2])
    except PromptError:  # a token that no cycle emitted
        cycles, steps = [], [name]
    assert (cycles == steps) is (name == "none")
