"""Tokens sampled on the device: the reference's or left open, and cycles that are those of the host."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.arrays import HostLogits
from specdec.backends.cuda import executor
from specdec.backends.cuda import ops as cuda_ops
from specdec.backends.cuda.kernels import accept, filters
from specdec.backends.cuda.kernels.accept import OPEN, STOP, UNDECIDED, Decision
from specdec.backends.cuda.kernels.head import Noise
from specdec.contract import Context, DeviceDraft, Sampling
from specdec.errors import PluginError, PromptError, ShapeError, StateError
from specdec.sampling import Rows
from tests import tiny
from tests.backends.choices import SETTINGS, logits_of, outcome, random_case, tied
from tests.backends.cuda.kernels import open_rows_kernel
from tests.backends.cuda.tables import mutated
from tests.backends.cuda.test_cuda_executor import FAMILY, WIDE, generate
from tests.backends.cuda.test_models import PROMPT, TINY, OnHost, _short_caches, build  # noqa: F401  (two are fixtures)
from tests.decoding import fake_device
from tests.selection import cases, examples

pytestmark = pytest.mark.interpreter

FILTERS = ("temperature", "top-k", "top-p", "min-p", "top-k and top-p", "all")
V = 277


def bare(context: Context) -> Context:
    """The same without bans, biases and penalties, and never greedy."""
    s = context.sampling
    kept = {name: getattr(s, name) for name in ("top_k", "top_p", "min_p", "seed")}
    return Context(list(context), Sampling(temperature=s.temperature or 0.8, **kept))


def chosen(module: Any, values: np.ndarray, context: Context, device: torch.device, **options: Any) -> list[int]:
    sampling = context.sampling
    key = Noise.of(sampling.seed, len(context), 1.0, device).key
    settings = torch.tensor(filters.settings_of(sampling), dtype=torch.float64, device=device)
    out = torch.full((len(values),), 99, dtype=torch.int32, device=device)
    module.choose(torch.from_numpy(values).to(device), key, settings, out, **options)
    return [int(token) for token in out]


def wrong_rows(module: Any, values: np.ndarray, context: Context, device: torch.device) -> tuple[list[str], int]:
    """Rows whose token is neither the reference's nor open, and how many are open."""
    reference = Rows(HostLogits(values), (0,) * (len(values) - 1), context)
    found = chosen(module, values, context, device)
    wrong = [
        f"row {row}: {token}, {context.sampling}"
        for row, token in enumerate(found)
        if token != OPEN.value and token != outcome(lambda row=row: reference.choose(row))
    ]
    return wrong, found.count(OPEN.value)


@pytest.mark.parametrize("share", cases([0.02, 0.15], sample=1, mark="slow"))
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_the_references_or_open(name: str, share: float, device: torch.device) -> None:
    """Every kind of row, near ties and nuclei that end within rounding of a boundary among them."""
    rng = np.random.default_rng([*name.encode(), 7])
    undecided = done = 0
    for vocab, rows in ((1, 20), (5, 100), (V, 400), (4500, 80)):
        for _ in range(round(max(1, rows * share / 2))):
            values, _, context = random_case(rng, SETTINGS[name], vocab, 2)
            wrong, unsure = wrong_rows(filters, values, bare(context), device)
            assert not wrong, wrong[0]
            undecided, done = undecided + unsure, done + 2
    assert undecided < 0.3 * done  # at most 0.23 of these cases, many of which are made to end within rounding


@given(case=tied())
@examples(40)
def test_ties_are_the_references_or_open(
    case: tuple[np.ndarray, tuple[int, ...], Context], device: torch.device
) -> None:
    values, _, context = case
    wrong, _ = wrong_rows(filters, values, bare(context), device)
    assert not wrong, wrong[0]


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "quarters", "equal"])
def test_few_rows_are_open(kind: str, device: torch.device) -> None:
    values = logits_of(kind, np.random.default_rng(7), 16, 5000)
    for sampling in (
        Sampling(temperature=0.6, top_k=20, top_p=0.95, seed=5),
        Sampling(temperature=1.0, top_p=0.99, min_p=1e-6, seed=2**63 - 1),
    ):
        wrong, unsure = wrong_rows(filters, values, Context([1, 2, 3], sampling), device)
        assert not wrong, wrong[0]
        assert unsure <= 1


@given(data=st.data())
@examples(25)
def test_columns_may_have_any_ids(data: st.DataObject, device: torch.device) -> None:
    """As the rows of a pruned head have: the token is that of the full row, also the lowest and the highest id."""
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, 60), min_size=1))), np.int32)
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=len(ids), max_size=len(ids)))
    sampling = Sampling(temperature=0.9, top_k=data.draw(st.integers(0, 5)), seed=data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(range(len(ids))))
    full = np.full((1, 61), -np.inf, np.float32)
    full[0, ids] = values
    context = Context([1], sampling)
    on_device = torch.from_numpy(ids[order]).to(device)
    (token,) = chosen(filters, full[:, ids[order]], context, device, ids=on_device)
    assert token in (OPEN.value, Rows(HostLogits(full), (), context).choose(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_open(bad: float, device: torch.device) -> None:
    """So that the host raises its error; as a draft it is no token."""
    values = logits_of("normal", np.random.default_rng(3), 3, V)
    values[1] = bad if bad == -np.inf else values[1]
    values[1, 9] = bad
    context = Context([1], Sampling(temperature=1.0, top_k=40, top_p=0.9))
    found = chosen(filters, values, context, device)
    assert found[1] == OPEN.value
    assert min(found[0], found[2]) >= 0
    assert chosen(filters, values, context, device, guess=True) == [found[0], -1, found[2]]


def test_shapes_are_checked(device: torch.device) -> None:
    key, settings = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(4, device=device)
    out = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ShapeError, match="a place for each"):
        filters.choose(torch.zeros(3, 5, device=device), key, settings.double(), out)
    with pytest.raises(ShapeError, match="float64"):
        filters.choose(torch.zeros(2, 5, device=device), key, settings, out)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_keys_are_those_of_the_positions(device: torch.device, seed: int) -> None:
    control = accept.new_control(remaining=9, pending=7, position=41, depth=2, device=device)
    ours, theirs = torch.zeros(16, 2, dtype=torch.int64, device=device), torch.zeros(16, 2, dtype=torch.int64)
    held = torch.tensor([seed], dtype=torch.int64, device=device)
    filters.keys(control, held, ours)
    filters.keys_reference(control.cpu(), held.cpu(), theirs)
    assert torch.equal(ours.cpu(), theirs)
    assert ours[0].tolist() == [seed, 42]


# --- acceptance with an open row --------------------------------------------------------------------------------------


OPEN_ROWS: list[tuple[list[int], list[int], list[int], int, tuple[int, ...], Any]] = [
    ([1, 2], [1, -2, 5], [], 9, (1,), UNDECIDED),
    ([1, 2], [-2, 2, 5], [], 9, (), UNDECIDED),
    ([1, 2], [1, 2, -2], [], 9, (1, 2), UNDECIDED),
    ([1, 2], [1, 3, -2], [], 9, (1, 3), accept.RUNNING),
    ([1, 2], [1, -2, 5], [1], 9, (1,), STOP),
    ([1, 2], [1, 2, -2], [], 2, (1, 2), accept.LIMIT),
    ([1, -1], [1, -2, 5], [], 9, (1,), UNDECIDED),
    ([], [-2], [], 1, (), UNDECIDED),
]
"""Draft, the target's choices, stop ids and tokens that remain; what is emitted, and why the cycle is the last."""


def decide(decided: Any, case: tuple[Any, ...], place: torch.device) -> None:
    draft, choices, stops, remaining, emitted, halted = case
    control = accept.new_control(remaining=remaining, pending=7, position=4, depth=3, device=place)
    decided(*(torch.tensor(values, dtype=torch.int32, device=place) for values in (draft, choices, stops)), control)
    decision = Decision.of(control.tolist())
    assert (decision.emitted, decision.halted) == (emitted, halted.value)
    assert (decision.position, decision.remaining) == (4 + len(emitted), remaining - len(emitted))
    assert decision.pending == (emitted[-1] if emitted else 7)


@pytest.mark.parametrize("case", OPEN_ROWS)
def test_the_tokens_before_an_open_row_are_kept(case: tuple[Any, ...], device: torch.device) -> None:
    decide(accept.accept, case, device)
    decide(accept.accept_reference, case, torch.device("cpu"))


# --- cycles -----------------------------------------------------------------------------------------------------------

SAMPLINGS = {
    "temperature": {"temperature": 0.9},
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "hot": {"temperature": 1.8, "top_p": 0.9},
}


def _open_rows(original: Any, every: int) -> Any:
    """Rows are left open now and then, by the position that they decide; drafts never."""

    def choose(logits: Any, key: Any, settings: Any, out: Any, **options: Any) -> None:
        original(logits, key, settings, out, **options)
        if not options.get("guess"):
            filters.launch(open_rows_kernel, (1,), key, out, len(out), EVERY=every, BLOCK=16)

    return choose


def both_ways(target: Any, sampling: Sampling, depths: list[int], *, ahead: bool) -> list[Any]:
    """Tokens, cycles, and what is left behind: of the device and of the host."""
    draft, found = DeviceDraft(), []
    for host in (False, True):
        sequence = fake_device.prefilled(target, [3, 1, 5], draft, 64)
        sequence.context.change("sampling", sampling)
        executor = fake_device.on_host(sequence) if host else fake_device.on_device(sequence, draft)
        done = fake_device.run(sequence, executor, depths, ahead=ahead and not host)
        executor.close()
        sequence.context.change("sampling", Sampling())
        found.append((list(sequence.tokens), done, fake_device.left_behind(sequence)))
    return found


@pytest.mark.parametrize(("name", "ahead"), [("temperature", True), ("filters", False), ("hot", True)])
def test_cycles_are_those_of_the_host(build: Callable[..., Any], name: str, ahead: bool) -> None:  # noqa: F811
    """Drafts, acceptance, tokens, caches and waiting pairs."""
    sampling = Sampling(seed=2**63 - 1 if ahead else 4, **SAMPLINGS[name])
    device, host = both_ways(build(FAMILY, **WIDE), sampling, [3, 0, 2, 0, 0], ahead=ahead)
    assert device == host


@pytest.mark.parametrize(("depths", "every"), [([2, 0, 2], 2), ([3], 3)])
def test_open_rows_are_chosen_by_the_host(
    build: Callable[..., Any],  # noqa: F811
    checkpoint: Callable[..., pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    depths: list[int],
    every: int,
) -> None:
    """In whole generations, with a cycle ahead and without: text, end and state are those of the host's cycles."""
    original, opened = filters.choose, []
    monkeypatch.setattr(filters, "choose", _open_rows(original, every))
    decide = executor.CudaExecutor._decide
    monkeypatch.setattr(executor.CudaExecutor, "_decide", lambda self: opened.append(1) or decide(self))
    shape = {**WIDE, "seed": 20 + every}  # graphs of its own, with this ``choose``
    target, folder = build(FAMILY, **shape), checkpoint(FAMILY, **{**TINY[FAMILY], **shape})
    options = {"seed": every, **SAMPLINGS["filters"]}
    wanted, plainly = generate(folder, OnHost(target), PROMPT, 9, [0], **options)
    result, session = generate(folder, target, PROMPT, 9, depths, **options)
    assert result.tokens == wanted.tokens
    assert result.stats.whole_cycles == result.stats.cycles
    assert len(opened) >= 9 // every - 1
    tiny.assert_same_bits(
        tiny.state_arrays(target, session._sequence.state), tiny.state_arrays(target, plainly._sequence.state)
    )
    stop = (wanted.text[3:5],)
    plainly, _ = generate(folder, OnHost(target), PROMPT, 9, [0], stop=stop, **options)
    ours, session = generate(folder, target, PROMPT, 9, depths, stop=stop, **options)
    assert plainly.finish_reason == "stop_string"
    assert (ours.tokens, ours.text, ours.finish_reason) == (plainly.tokens, plainly.text, plainly.finish_reason)
    rest = session.generate(max_new_tokens=4, ignore_eos=True, **options).tokens
    assert [*ours.tokens, *rest] == wanted.tokens[: len(ours.tokens) + 4]


def test_settings_that_need_the_host_stay_there(build: Callable[..., Any]) -> None:  # noqa: F811
    target = build(FAMILY, **WIDE)
    for settings in ({"banned": (3,)}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 0.5}}, {"min_new_tokens": 2}):
        sampling = Sampling(temperature=0.8, **settings)
        assert not target.device_samples(sampling)
        sequence = fake_device.prefilled(target, [3, 1, 5], DeviceDraft(), 64)
        sequence.context.change("sampling", sampling)
        assert fake_device.on_device(sequence, DeviceDraft()) is None
    assert target.device_samples(Sampling(temperature=0.8, top_k=3, top_p=0.5, min_p=0.1))


def test_a_head_in_two_parts_drafts_step_by_step(build: Callable[..., Any]) -> None:  # noqa: F811
    """Greedily it drafts on the device; under noise the parts would have to be compared with the noise."""
    target = build(FAMILY, **WIDE)
    draft = DeviceDraft(head=target.draft_head(range(30, 90, 2)).extended([3, 5]))
    sequence = fake_device.prefilled(target, [3, 1, 5], draft, 64)
    sequence.context.change("sampling", Sampling(temperature=0.8))
    assert fake_device.on_device(sequence, draft) is None
    assert fake_device.left_behind(sequence)[:2] == (2, 2)
    assert fake_device.on_device(fake_device.prefilled(target, [3, 1, 5], draft, 64), draft) is not None


# --- mutants ----------------------------------------------------------------------------------------------------------

MUTANTS = {
    "top-k keeps one more": ("N, most).to(tl.int64)", "N, most + 1).to(tl.int64)"),
    "the token that crosses top-p is dropped": ("(ids < token)", "(ids <= token)"),
    "ties go to the highest id": ("(ids < token)", "(ids > token)"),
    "top-p of a mass of all tokens": ("if kept < N:", "if kept < 0:"),
    "the border of top-k counts whole": ("(kept - count).to(tl.float64) *", "1.0 *"),
    "every row has the noise of the first": ("tl.load(key_ptr + 1) + row", "tl.load(key_ptr + 1) + 0 * row"),
    "a float32 score decides": ("score - second > _NOISE", "score >= second"),
    "min-p of the mass": ("share = tl.exp(nats)", "share = tl.exp(nats) / mass"),
    "a temperature of 1": (
        "return x.to(tl.float64) / temperature - top",
        "return x.to(tl.float64) - top * temperature",
    ),
}
"""What is changed in filters.py."""


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    copy = mutated(filters, tmp_path, MUTANTS[name])
    rng = np.random.default_rng(11)
    for number in range(240):
        setting = SETTINGS[FILTERS[number % len(FILTERS)]]
        values, _, context = random_case(rng, setting, (5, 64, V)[number % 3], 4)
        if wrong_rows(copy, values, bare(context), device)[0]:
            return
    pytest.fail("every row was right or open")


OPEN_MUTANTS = {
    "the open row is kept": ("accepted - open_end, stopped_at", "accepted, stopped_at"),
    "the cycle after an open row goes on": ("open_end * 4", "0"),
    "an open row is a fault": (" & (target != OPEN), 1, 0)", ", 1, 0)"),
}


@pytest.mark.mutants
@pytest.mark.parametrize("name", OPEN_MUTANTS)
def test_mutants_of_acceptance_are_found(name: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    copy = mutated(accept, tmp_path, OPEN_MUTANTS[name])

    def all_cases() -> None:
        for case in OPEN_ROWS:
            decide(copy.accept, case, device)

    with pytest.raises(AssertionError):
        all_cases()


CYCLE_MUTANTS = {
    "another row is left to the host": ("b.row.copy_(x[:1])", "b.row.copy_(x[-1:])"),
    "cycles behind an open row are lost": ("self.submit(flight.depth)", "self._flights.append(flight)"),
    "the first token's noise for all drafts": ("self._keys[step]", "self._keys[0]"),
}
"""What is changed in executor.py."""


@pytest.mark.mutants
@pytest.mark.parametrize("name", ["none", *CYCLE_MUTANTS])
def test_mutants_of_cycles_are_found(
    build: Callable[..., Any],  # noqa: F811
    checkpoint: Callable[..., pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    name: str,
) -> None:
    if name != "none":
        copy = mutated(executor, tmp_path, CYCLE_MUTANTS[name])
        monkeypatch.setattr(cuda_ops, "device_executor", copy.device_executor)
    monkeypatch.setattr(filters, "choose", _open_rows(filters.choose, 3))
    options = {"seed": 3, **SAMPLINGS["filters"]}
    seed = 3 + ["none", *CYCLE_MUTANTS].index(name)  # graphs of its own
    target, folder = build(FAMILY, **WIDE, seed=seed), checkpoint(FAMILY, **{**TINY[FAMILY], **WIDE}, seed=seed)
    wanted, plainly = generate(folder, OnHost(target), PROMPT, 8, [0], **options)
    try:
        device, host = both_ways(target, Sampling(seed=4, temperature=3.0), [2, 2], ahead=True)
        same = device == host
        result, session = generate(folder, target, PROMPT, 8, [2, 0], **options)
        same &= result.tokens == wanted.tokens
        tiny.assert_same_bits(
            tiny.state_arrays(target, session._sequence.state), tiny.state_arrays(target, plainly._sequence.state)
        )
    except (PromptError, StateError, PluginError, AssertionError):
        same = False
    assert same is (name == "none")
