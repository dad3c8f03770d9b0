"""Tokens chosen from rows of logits on the device: every one that is returned is the reference's."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.arrays import HostLogits
from specdec.backends.cuda import choosing
from specdec.backends.cuda.arrays import CudaHeadRows, CudaLogits, CudaPrunedLogits
from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.contract import Choosing, Context, Sampling
from specdec.sampling import Rows
from tests.backends.choices import SETTINGS, logits_of, outcome, random_case, tied, wrong_rows
from tests.selection import cases, examples

pytestmark = pytest.mark.interpreter

ROWS = 1500  # per combination of settings; 10,500 in all
V = 277


class Products:
    """Logits as a head computes them."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self) -> torch.Tensor:
        return self._logits

    def best(self) -> Any:
        raise AssertionError("the head kernel was asked")

    sample: Any = best


def choices(module: Any, values: np.ndarray, device: torch.device) -> Any:
    return lambda one: module.choose(torch.from_numpy(values).to(device), one)


@pytest.mark.parametrize("share", cases([0.02, 1.0], sample=1, mark="slow"))
@pytest.mark.parametrize("name", SETTINGS)
def test_certain_tokens_are_the_references(name: str, share: float, device: torch.device) -> None:
    rng = np.random.default_rng([*name.encode(), 20])
    undecided = done = 0
    for vocab, part in ((1, 0.02), (5, 0.2), (V, 0.7), (4096, 0.08)):
        rows = 0
        while rows < ROWS * part * share:
            values, drafted, context = random_case(rng, SETTINGS[name], vocab, MAX_ROWS)
            wrong, none = wrong_rows(choices(choosing, values, device), values, drafted, context)
            assert not wrong, wrong[0]
            undecided, rows = undecided + none, rows + len(values)
        done += rows
    assert undecided < 0.15 * done  # ties within rounding, and rows without an allowed token


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "quarters", "equal"])
def test_few_rows_are_left_to_the_reference(kind: str, device: torch.device) -> None:
    """Equal logits and nuclei of thousands of tokens included; more rows than one tile of a kernel."""
    values = logits_of(kind, np.random.default_rng(7), 17, 4096)
    sampling = Sampling(temperature=0.8, seed=5, top_k=4000, top_p=0.95, min_p=1e-6, repetition_penalty=1.1)
    context = Context([1, 2, 3], sampling, generated_from=1)
    drafted = tuple(range(16))
    wrong, none = wrong_rows(choices(choosing, values, device), values, drafted, context)
    assert not wrong, wrong[0]
    assert none == 0


@given(case=tied())
@examples(40)
def test_ties_are_the_references(case: tuple[np.ndarray, tuple[int, ...], Context], device: torch.device) -> None:
    """Through ``Rows``, so that rows without a certain token count too."""
    values, drafted, context = case
    if context.sampling.temperature == 0 and not np.isfinite(values).any(axis=1).all():
        return
    found = choosing.choose(torch.from_numpy(values).to(device), Choosing(drafted, context))
    reference = Rows(HostLogits(values), drafted, context)
    for row, token in enumerate(found):
        assert token is None or token == outcome(lambda row=row: reference.choose(row))


@given(case=tied(), data=st.data())
@examples(40)
def test_a_pruned_head_gives_the_token_of_the_full_row(
    case: tuple[np.ndarray, tuple[int, ...], Context], data: st.DataObject, device: torch.device
) -> None:
    """Whose rows come in two parts, in any order of ids."""
    values, drafted, context = case
    vocab = values.shape[1]
    ids = np.array(data.draw(st.permutations(range(vocab)))[: data.draw(st.integers(1, vocab))], np.int32)
    full = np.full_like(values, -np.inf)
    full[:, ids] = values[:, ids]
    split = len(ids) // 2
    parts: list[Any] = [Products(torch.from_numpy(values[:, part]).to(device)) for part in (ids[:split], ids[split:])]
    pruned = CudaPrunedLogits(len(values), parts, CudaHeadRows((), (), ids, vocab))
    found = pruned.choose(Choosing(drafted, context))
    reference = Rows(HostLogits(full), drafted, context)
    for row, token in enumerate(found):
        assert token is None or token == outcome(lambda row=row: reference.choose(row))


def test_rows_are_not_read_where_the_device_chooses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    values = logits_of("normal", np.random.default_rng(3), 3, V)
    context = Context([1, 2], Sampling(temperature=0.7, top_p=0.9, logit_bias={5: 1.0}, seed=4), generated_from=1)
    wanted = [Rows(HostLogits(values), (3, 4), context).choose(row) for row in range(3)]
    products: Any = Products(torch.from_numpy(values).to(device))
    monkeypatch.setattr(CudaLogits, "rows", lambda self: pytest.fail("all logits were read"))
    rows = Rows(CudaLogits(3, products), (3, 4), context)
    assert [rows.choose(row) for row in range(3)] == wanted


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5)], ids=["greedy", "plain"])
def test_plain_sampling_is_left_to_the_head_kernel(sampling: Sampling, device: torch.device) -> None:
    products: Any = Products(torch.zeros(1, V, device=device))
    assert CudaLogits(1, products).choose(Choosing((), Context([1], sampling))) == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_not_chosen(bad: float, device: torch.device) -> None:
    values = logits_of("normal", np.random.default_rng(3), 3, V)
    values[1] = bad if bad == -np.inf else values[1]
    values[1, 9] = bad
    for temperature in (0.0, 1.0):
        context = Context([1], Sampling(temperature=temperature, top_k=40, banned=(3,)))
        found = choosing.choose(torch.from_numpy(values).to(device), Choosing((2, 3), context))
        assert found[1] is None
        assert None not in (found[0], found[2])


# --- mutants ---------------------------------------------------------------------------------------------------------

_SORT = "below.sort(dim=1, descending=True, stable=True)"
MUTANTS = {
    "the token that crosses top-p is dropped": ("(mass.cumsum(1) - mass)", "mass.cumsum(1)"),
    "ties go to the highest id": (_SORT, f"_last_first(below.flip(1).{_SORT.removeprefix('below.')})"),
    "top-k keeps one more": ("sampling.top_k or size, size", "sampling.top_k + 1 if sampling.top_k else size, size"),
    "top-p of a mass that does not sum to 1": ("/ mass.sum(1, keepdim=True)", "/ below.exp().sum(1, keepdim=True)"),
    "a float32 score decides": ("score >= floor - _NOISE", "score >= floor"),
    "noise of the next position": ("+ choosing.first\n    noise", "+ choosing.first + 1\n    noise"),
    "drafted tokens are others": (
        "[*choosing.context, *choosing.drafted]",
        "[*choosing.context, *choosing.context, *choosing.drafted]",
    ),
    "a history that is a row short": ("history[: length + row]", "history[:length]"),
    "the winner has the most noise": ("below[rows, columns]", "0 * below[rows, columns]"),
}
"""What is changed in choosing.py."""


def _last_first(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A sort of the columns in reverse, in the columns' own numbers."""
    return found.values, found.indices.shape[1] - 1 - found.indices


def _changed(old: str, new: str) -> Any:
    source = Path(choosing.__file__).read_text()
    assert old in source, old
    module: Any = types.ModuleType("changed")
    module._last_first = _last_first
    exec(compile(source.replace(old, new), choosing.__file__, "exec"), module.__dict__)
    return module


def _wrong(module: Any, device: torch.device) -> bool:
    rng = np.random.default_rng(11)
    for number in range(200):
        setting = SETTINGS[list(SETTINGS)[number % len(SETTINGS)]]
        values, drafted, context = random_case(rng, setting, (5, 64, V)[number % 3], MAX_ROWS)
        if wrong_rows(choices(module, values, device), values, drafted, context)[0]:
            return True
    return False


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, device: torch.device) -> None:
    assert _wrong(_changed(*MUTANTS[name]), device), name
