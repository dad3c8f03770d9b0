"""The native choice of tokens against the reference in numpy: every token that it calls certain is the reference's.

Beside random rows come the cases where float32 could decide wrongly: equal and nearly equal logits, wide nuclei, rows
of minus infinities, all tokens banned but one, tiny and huge temperatures, and vocabularies of 1 to 248,320 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.arrays import HostLogits
from specdec.backends.cpu.instruction_sets import available
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.pruned import HeadRows, NativePrunedLogits, SearchKernels
from specdec.backends.cpu.tape import Kernel
from specdec.backends.cpu.threads import Threads
from specdec.contract import Choosing, Context, Sampling
from specdec.sampling import Rows, exponential_sum
from tests.backends.choices import KINDS, ROWS, SETTINGS, logits_of, outcome, random_case, tied, wrong_rows
from tests.backends.cpu.mutated import mutated
from tests.instruction_sets import kernels_of
from tests.selection import cases


@pytest.fixture(scope="module")
def ops(instruction_set: str) -> NativeOps:
    return NativeOps(torch.float32, kernels_of(instruction_set))


@pytest.mark.parametrize("share", cases([0.005, 1.0], sample=1, mark="slow"))
@pytest.mark.parametrize("name", SETTINGS)
def test_certain_tokens_are_the_references(ops: NativeOps, name: str, share: float) -> None:
    rng = np.random.default_rng([*name.encode()])
    undecided = done = 0
    for vocab, part in ((1, 0.02), (5, 0.2), (277, 0.4), (4096, 0.379), (248_320, 0.001)):
        rows, wanted = 0, ROWS * part * share
        while rows < wanted:
            values, drafted, context = random_case(rng, SETTINGS[name], vocab)
            wrong, none = wrong_rows(ops.logits(torch.from_numpy(values)).choose, values, drafted, context)
            assert not wrong, wrong[0]
            undecided, rows = undecided + none, rows + len(values)
        done += rows
    assert undecided < 0.15 * done  # ties within rounding, and rows without an allowed token


@pytest.mark.parametrize("name", SETTINGS)
def test_few_rows_are_left_to_the_reference(ops: NativeOps, name: str) -> None:
    """Where logits are not tied; a wide nucleus has its boundary among thousands of nearly equal tokens."""
    rng = np.random.default_rng(7)
    undecided = 0
    for number in range(60):
        values = logits_of(("normal", "flat", "peaked")[number % 3], rng, 3, 4096)
        chosen = {one: options[-1] if one == "top_p" else options[1] for one, options in SETTINGS[name].items()}
        context = Context([1, 2, 3], Sampling(temperature=0.8, seed=number, **chosen), generated_from=1)
        tokens = ops.logits(torch.from_numpy(values)).choose(Choosing((4, 5), context))
        undecided += list(tokens).count(None)
    assert undecided <= 2


@given(case=tied())
def test_ties_are_the_references(ops: NativeOps, case: tuple[np.ndarray, tuple[int, ...], Context]) -> None:
    """Through ``Rows``, so that rows without a certain token count too."""
    values, drafted, context = case
    native, reference = (
        Rows(logits, drafted, context) for logits in (ops.logits(torch.from_numpy(values)), HostLogits(values))
    )
    for row in range(len(values)):
        if np.isfinite(values).any(axis=1).all():
            got, wanted = (outcome(lambda rows=rows, row=row: rows.choose(row)) for rows in (native, reference))
            assert got == wanted


@given(case=tied(), data=st.data())
def test_a_pruned_row_gives_the_token_of_the_full_row(
    ops: NativeOps, case: tuple[np.ndarray, tuple[int, ...], Context], data: st.DataObject
) -> None:
    values, drafted, context = case
    vocab = values.shape[1]
    ids = np.array(data.draw(st.permutations(range(vocab)))[: data.draw(st.integers(1, vocab))], np.int32)
    full = np.full_like(values, -np.inf)
    full[:, ids] = values[:, ids]
    if not np.isfinite(full).any(axis=1).all():
        return
    head = HeadRows((), ids, vocab)
    pruned = NativePrunedLogits(values[:, ids], head, ops._search)
    wrong, _ = wrong_rows(pruned.choose, full, drafted, context)
    assert not wrong, wrong[0]


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", cases([1, 5, 17, 4096, 248_320], sample=4, mark="slow"))
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_have_the_references_bits(ops: NativeOps, kind: str, vocab: int) -> None:
    values = logits_of(kind, np.random.default_rng(vocab), 2, vocab)
    native, host = ops.logits(torch.from_numpy(values)), HostLogits(values)
    for row in range(2):
        best = float(values[row].max())
        assert native.exponential_sum(row, best) == exponential_sum(values[row], best)
    context = Context([0], Sampling(logprobs=min(vocab, 5)))
    tokens = [0, vocab - 1]
    reported = Rows(native, (0,), context).reported(tokens)
    assert reported == Rows(host, (0,), context).reported(tokens)
    for row, (logprob, top) in enumerate(reported):
        logs, best_ids = Rows(host, (0,), context).logprobs(row)
        assert logprob == logs[tokens[row]] or (np.isnan(logprob) and np.isnan(logs[tokens[row]]))
        assert [value for _, value in top] == [logs[one] for one in best_ids]


def test_the_sum_of_exponentials_is_accurate() -> None:
    for kind in KINDS:
        row = logits_of(kind, np.random.default_rng(3), 1, 4096)[0].astype(np.float64)
        exact = np.exp(row - row.max()).sum()
        assert exponential_sum(row, float(row.max())) / 2**80 == pytest.approx(exact, rel=1e-14)


# --- mutants ---------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a float32 score decides": ("(token.logit - top_) / choice_.temperature + gumbel(c.word)", "c.score"),
    "contenders within float32's error are dropped": ("(float)(4 * NOISE_ERROR", "0 * (float)(4 * NOISE_ERROR"),
    "the token at the boundary is certain": ("mass_before < wanted - bound ||", "mass_before < wanted + bound ||"),
    "ties go to the highest id": ("a.id < b.id", "a.id > b.id"),
    "top-k keeps all ties": ("maybe_ = tokens[k - 1];", "maybe_ = {tokens[k - 1].logit, INT32_MAX};"),
    "top-p of a mass that does not sum to 1": (
        "double total = 0;\n                for",
        "double total = 1;\n                for",
    ),
    "min-p of a quarter": ("std::log(choice_.min_p)", "std::log(choice_.min_p / 4)"),
    "the repetition penalty ignores the sign": ("value > 0 ? value / c", "true ? value / c"),
    "drafted tokens are not seen": ("i < c.first + row;", "i < c.first;"),
    "a ban ends early": ("c.position + row < c.end_after", "c.position + row + 1 < c.end_after"),
    "noise of the next position": ("(uint32_t)(choice.position + row)", "(uint32_t)(choice.position + row + 1)"),
    "less noise than there is": ("MOST_NOISE = 22.9f", "MOST_NOISE = 3.0f"),
    "edits stay for the next row": ("places_[e.id] = 0;", ";"),
    "bans are forgotten": ("return e.banned ? -INFINITY : value;", "return value;"),
    "frequency counts presence": ("c.frequency * e.generated", "c.frequency"),
}
"""What is changed in kernels/choice.cpp."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], SearchKernels]:
    """Compiles the searches with one change."""
    build = mutated(tmp_path_factory.mktemp("mutants"), "choice", available()[0], ["search", "team"])

    def searches(old: str, new: str) -> SearchKernels:
        kernels = build(old, new)
        return SearchKernels(kernels, Kernel(kernels, "choose_rows", "piipippi", threads=Threads(2)))

    return searches


def _wrong(search: SearchKernels) -> bool:
    rng = np.random.default_rng(11)
    for number in range(4000):
        name = list(SETTINGS)[number % len(SETTINGS)]
        values, drafted, context = random_case(rng, SETTINGS[name], (5, 64, 277)[number % 3])
        rows, size = values.shape

        def choose(choosing: Choosing, values: np.ndarray = values, rows: int = rows, size: int = size) -> Any:
            return search.choose(values.ctypes.data, rows, size, choosing)

        if wrong_rows(choose, values, drafted, context)[0]:
            return True
    return False


@pytest.mark.mutants
def test_the_unchanged_kernel_survives(built: Callable[[str, str], SearchKernels]) -> None:
    assert not _wrong(built("", ""))


@pytest.mark.mutants
@pytest.mark.parametrize("name", cases(MUTANTS, sample=0))
def test_mutants_of_the_kernel_are_noticed(name: str, built: Callable[[str, str], SearchKernels]) -> None:
    assert _wrong(built(*MUTANTS[name])), name
