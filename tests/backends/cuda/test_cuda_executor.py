"""Cycles that run as one graph: tokens, drafts and states of the host's cycles; graphs serve every sequence."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.backends.cuda import executor as executor_module
from specdec.backends.cuda import memory
from specdec.backends.cuda.executor import CudaExecutor
from specdec.backends.cuda.kernels import accept, cycle
from specdec.contract import DeviceDraft
from specdec.errors import PromptError, StateError
from specdec.testing import as_subject, iter_checks, run_check
from tests import tiny
from tests.backends.cuda.test_models import PROMPT, TINY, VOCAB, OnHost, _short_caches, build  # noqa: F401  (two are fixtures)
from tests.decoding import fake_device
from tests.decoding.test_lossless import Case, ScriptedDepth, mtp

pytestmark = pytest.mark.interpreter

FAMILY = "qwen3_5"
WIDE = {"printable": True}  # few tokens of its own choice: a draft is right now and then


# --- the kernels between the passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "kept"), [(0, 0), (0, 1), (0, 16), (5, 0), (2, 3), (15, 1)])
@pytest.mark.parametrize("halted", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settling_is_that_of_the_host(
    device: torch.device, before: int, kept: int, halted: int, dtype: torch.dtype
) -> None:
    """Rows behind those that were kept are NaN, and must not come along."""
    fresh = torch.full((16, 37), float("nan"), dtype=dtype)
    fresh[:kept] = torch.randn(kept, 37).to(dtype)
    values = [halted, 9, 41, 7, kept, 0, 3, before, *range(100, 100 + kept), *[-1] * (16 - kept)]
    found = []
    for settle, last_row in ((cycle.settle, cycle.last_row), (cycle.settle_reference, cycle.last_row_reference)):
        place = device if settle is cycle.settle else torch.device("cpu")
        waiting = torch.arange(16 * 37, dtype=torch.float32).view(16, 37).to(dtype).to(place)
        ids, counters = (torch.tensor(v, dtype=torch.int32, device=place) for v in ([5] * 16, [77, 99]))
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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[CudaExecutor]:
    """Executors that were begun."""
    made: list[CudaExecutor] = []
    original = CudaExecutor.__init__

    def note(self: CudaExecutor, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(CudaExecutor, "__init__", note)
    return made


def clause(target: Any) -> Any:
    """The kit's check of cycles on a device."""
    check = next(check for check in iter_checks() if check.id == "F20")
    return run_check(check, as_subject(check.subject, target), effort="sample")


@pytest.mark.slow
def test_the_kits_clause(build: Callable[..., Any]) -> None:
    outcome = clause(build(FAMILY, **WIDE))
    assert outcome.status.name == "PASSED", outcome.detail


@pytest.mark.parametrize("depths", [[3], [2, 0, 4, 1], [0]])
def test_generations_are_those_of_single_passes(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path], opened: list[Any], depths: list[int]
) -> None:
    """Also the state: it goes on with single passes afterwards."""
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    wanted, plainly = generate(folder, OnHost(target), PROMPT, 10, [0])
    assert not opened
    result, session = generate(folder, target, PROMPT, 10, depths)
    assert len(opened) == 1
    assert result.tokens == wanted.tokens
    assert result.stats.whole_cycles == result.stats.cycles
    assert sum(result.stats.offered) > 0 or depths == [0]
    tiny.assert_same_bits(
        tiny.state_arrays(target, session._sequence.state), tiny.state_arrays(target, plainly._sequence.state)
    )


def test_two_sequences_take_turns_over_the_same_graphs(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path]
) -> None:
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    prompts = [(3, 1), (40, 41, 42)]
    wanted = [generate(folder, OnHost(target), prompt, 10, [0])[0].tokens for prompt in prompts]
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
        # by pairs and depth: 2 and then 4 pairs before depth 2, and shallower cycles where the room ends
        assert len(target.ops.device.graphs) - graphs <= 4


def test_a_text_that_ends_generation_takes_tokens_back(
    build: Callable[..., Any], checkpoint: Callable[..., pathlib.Path]
) -> None:
    target, folder = build(FAMILY, **WIDE), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE})
    wanted, _ = generate(folder, OnHost(target), PROMPT, 12, [0])
    stop = (wanted.text[2:4],)
    plainly, _ = generate(folder, OnHost(target), PROMPT, 12, [0], stop=stop)
    ours, session = generate(folder, target, PROMPT, 12, [3], stop=stop)
    assert plainly.finish_reason == "stop_string"
    assert (ours.tokens, ours.text, ours.finish_reason) == (plainly.tokens, plainly.text, plainly.finish_reason)
    rest = session.generate(max_new_tokens=4, ignore_eos=True).tokens
    assert [*ours.tokens, *rest] == wanted.tokens[: len(ours.tokens) + 4]


def test_memory_that_moves_takes_along_what_the_host_has_not_counted(
    build: Callable[..., Any],
    checkpoint: Callable[..., pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    opened: list[Any],
) -> None:
    """Keys and values that outgrow their memory, and more state slots for a longer draft, in the middle of it."""
    monkeypatch.setattr(memory, "FIRST_ROWS", 4)
    monkeypatch.setattr(memory, "GROWTH", 2)
    target, folder = build(FAMILY, **WIDE, seed=1), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE}, seed=1)
    wanted, _ = generate(folder, OnHost(target), PROMPT, 16, [0])
    result, session = generate(folder, target, PROMPT, 16, [1, 0, 1, 6])
    assert result.tokens == wanted.tokens
    assert len(opened) == 1
    assert {cache.slots for cache in session._sequence.state.caches if hasattr(cache, "slots")} == {17}


def close(ours: Any, theirs: Any) -> bool:
    """The same tokens and lengths; the head's logits up to rounding, since long runs of pairs are fed in bulk."""
    (ours, (*held, (logits, *drafts))), (theirs, (*as_held, (as_logits, *as_drafts))) = ours, theirs
    return (ours, held, logits) == (theirs, as_held, as_logits) and np.allclose(drafts, as_drafts, atol=1e-4)


def both_ways(
    target: Any, tokens: list[int], depths: Sequence[int], draft: DeviceDraft | None = None, *, ahead: bool = False
) -> list[Any]:
    """What cycles do and leave behind, those of the device and of the host: two equal things."""
    draft, found = DeviceDraft() if draft is None else draft, []
    for host in (False, True):
        sequence = fake_device.prefilled(target, tokens, draft, 64)
        executor = fake_device.on_host(sequence) if host else fake_device.on_device(sequence, draft)
        done = fake_device.run(sequence, executor, depths, ahead=ahead and not host)
        executor.close()
        found.append((done, fake_device.left_behind(sequence)))
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("depths", [[0, 0, 3, 0, 1], [0] * 18 + [2, 0]])
def test_pairs_of_plain_cycles_wait_for_the_next_draft(
    build: Callable[..., Any], depths: list[int], ahead: bool
) -> None:
    """Also more of them than the buffer holds."""
    device, host = both_ways(build(FAMILY, **WIDE), [3, 1, 5], depths, ahead=ahead)
    assert device == host if len(depths) < 8 else close(device, host)
    assert [len(outcome.drafted) for outcome in device[0]] == depths


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_without_a_head_every_cycle_is_plain(build: Callable[..., Any], family: str) -> None:
    device, host = both_ways(build(family), [3, 1, 5], [0, 2, 0], DeviceDraft(mtp=False), ahead=True)
    assert device == host
    assert all(outcome.drafted == () for outcome in device[0])


def test_the_device_ends_generation_and_the_host_takes_tokens_back(build: Callable[..., Any]) -> None:
    """A stop token that was cut away ends nothing; neither do tokens that were taken back count for the limit."""
    target, draft = build(FAMILY, **WIDE), DeviceDraft()
    sequence = fake_device.prefilled(target, [3, 1, 5], draft, 64)
    truth = [
        token
        for outcome in fake_device.run(sequence, fake_device.on_host(sequence), [0] * 8)
        for token in outcome.emitted
    ]

    def begin(**options: Any) -> Any:
        sequence = fake_device.prefilled(target, [3, 1, 5], draft, 64)
        return sequence, fake_device.on_device(sequence, draft, **options)

    sequence, executor = begin(limit=3)
    assert [len(outcome.emitted) for outcome in fake_device.run(sequence, executor, [0] * 5, ahead=True)] == [
        1,
        1,
        1,
        0,
        0,
    ]
    executor.close()
    assert sequence.tokens[3:] == truth[:3]
    assert target.decode(sequence.state, sequence.tokens[-1:]).need_logits().argmax() == truth[3:4]

    last = next(at for at in range(2, 8) if truth[at] not in truth[:at])
    sequence, executor = begin(stop=[truth[last]])
    done = fake_device.run(sequence, executor, [0, 1] * 4)
    assert sequence.tokens[3:] == truth[: last + 1]
    assert done[-1].emitted == ()
    executor.close()

    sequence, executor = begin(limit=4)
    kept = 0
    while kept < 4:
        executor.submit(3)
        emitted = executor.collect().emitted
        assert list(emitted) == truth[kept : kept + len(emitted)]
        executor.keep(1)
        sequence.tokens.append(emitted[0])
        kept += 1
        if kept == 2:
            with pytest.raises(StateError, match="fewer than all"):
                executor.keep(2)
    executor.close()
    assert target.decode(sequence.state, sequence.tokens[-1:]).need_logits().argmax() == truth[4:5]


@pytest.mark.parametrize("extra", [0, 8])
def test_a_pruned_head_drafts_what_it_drafts_step_by_step(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Its own rows and those that the sequence added; two sequences that added others."""
    monkeypatch.setattr(executor_module, "_ADDED_ROWS", (4, 16))
    target = build(FAMILY, **WIDE)
    head = target.draft_head(range(30, 90, 2))
    for tokens in ([3, 1, 5], [7, 9, 11, 13, 250]):
        ours = head.extended(tokens[: extra and len(tokens)])
        device, host = both_ways(target, tokens, [2, 2], DeviceDraft(head=ours))
        assert device == host
        assert {token for outcome in device[0] for token in outcome.drafted} <= set(ours.tokens)


def test_sequences_with_other_heads_take_turns_without_new_graphs(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full head, a pruned one, and two that sequences extended by few and by more rows; and few sets are kept."""
    monkeypatch.setattr(executor_module, "_ADDED_ROWS", (4, 16))
    target = build(FAMILY, **WIDE, seed=31)
    head = target.draft_head(range(30, 90, 2))
    drafts = [DeviceDraft(head=one) for one in (None, head, head.extended([3, 5]), head.extended([3, 5, 7, 9, 11, 13]))]

    def generated() -> list[list[int]]:
        sequences = [fake_device.prefilled(target, [3, 1, 5], draft, 64) for draft in drafts]
        executors = [fake_device.on_device(one, draft) for one, draft in zip(sequences, drafts, strict=True)]
        for _ in range(3):
            for sequence, one in zip(sequences, executors, strict=True):
                fake_device.run(sequence, one, [2])
        for one in executors:
            one.close()
        return [list(sequence.tokens) for sequence in sequences]

    first = generated()
    captured = len(target.ops.device.graphs) if hasattr(target.ops.device, "graphs") else 0
    assert generated() == first
    if captured:
        assert len(target.ops.device.graphs) == captured
    monkeypatch.setattr(executor_module, "_HEADS", 2)
    assert generated() == first
    if captured:
        assert len(target.ops.device.graphs) > captured


def test_what_does_not_fit_goes_step_by_step(build: Callable[..., Any]) -> None:
    draft = DeviceDraft()
    sequence = fake_device.prefilled(build(FAMILY, **WIDE), [1, 2, 5], draft, 64)
    assert fake_device.on_device(sequence, draft, stop=range(VOCAB), limit=4) is None
    eagerly = fake_device.prefilled(build(FAMILY, eager=True), [1, 2, 5], draft, 64)
    assert fake_device.on_device(eagerly, draft, limit=4) is None
    assert fake_device.left_behind(eagerly)[:2] == (2, 2)


def _stale_pairs(original: Any) -> Any:
    def settle(control: Any, fresh: Any, waiting: Any, ids: Any, counters: Any, verified: Any) -> None:
        kept = waiting.clone()
        original(control, fresh, waiting, ids, counters, verified)
        waiting.copy_(kept)

    return settle


def _one_more(original: Any) -> Any:
    def moved(drafted: Any, best: Any, stops: Any, control: Any, **options: Any) -> None:
        original(drafted, best, stops, control, **options)
        two = accept.CYCLES.value  # 2 in the second cycle
        control[accept.KEPT.value : accept.KEPT.value + 1].copy_(control[two : two + 1])

    return moved


def _replaces(original: Any) -> Any:
    def settle(control: Any, *others: Any) -> None:
        waiting, nothing = accept.WAITING.value, accept.HALTED.value
        control[waiting : waiting + 1].copy_(control[nothing : nothing + 1])
        original(control, *others)

    return settle


def _never_fed(original: Any) -> Any:
    return lambda *arguments, fed: original(*arguments, fed=False)


def _keeps_chained(original: Any) -> Any:
    def commit_rows(table: Any, kinds: Any, kept: Any, **options: Any) -> None:
        if not (isinstance(kept, int) and kept < 0):
            original(table, kinds, kept, **options)

    return commit_rows


MUTANTS = {
    "pairs of the cycle before": (cycle, "settle", _stale_pairs),
    "pairs replace those that wait": (cycle, "settle", _replaces),
    "pairs wait after they were fed": (accept, "accept", _never_fed),
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
        device, host = both_ways(target, [3, 1, 5], [3, 0, 3, 2])
    except (PromptError, StateError):  # a token that no cycle emitted, or pairs that do not fit the state
        device, host = [], [name]
    assert (device == host) is (name == "none")
