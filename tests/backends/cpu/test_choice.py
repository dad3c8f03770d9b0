"""The native choice of tokens against the reference in numpy: every token that it calls certain is the reference's.

Beside random rows come the cases where float32 could decide wrongly: equal and nearly equal logits, wide nuclei, rows
of minus infinities, all tokens banned but one, tiny and huge temperatures, and vocabularies of 1 to 248,320 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
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
from specdec.errors import SpecdecError
from specdec.sampling import Purpose, Rows, exponential_sum, gumbel
from tests.backends.cpu.mutated import mutated
from tests.instruction_sets import kernels_of
from tests.selection import cases

KINDS = ("normal", "flat", "peaked", "few values", "equal", "mostly -inf", "far apart", "nearly equal", "quarters")
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "temperature": {},
    "top-k": {"top_k": [1, 2, 5, 40, 1000]},
    "top-p": {"top_p": [1e-6, 0.1, 0.25, 0.5, 0.9, 0.95, 0.99999]},
    "min-p": {"min_p": [1e-9, 0.05, 0.5, 1.0]},
    "top-k and top-p": {"top_k": [1, 5, 40], "top_p": [0.3, 0.5, 0.95]},
    "penalties": {"repetition_penalty": [0.8, 1.3, 100.0], "presence_penalty": [-1.0, 0.0, 0.7]},
    "all": {
        "top_k": [0, 3, 40],
        "top_p": [0.5, 0.9, 1.0],
        "min_p": [0.0, 0.02, 0.5],
        "repetition_penalty": [1.0, 1.1],
        "frequency_penalty": [0.0, -0.5, 0.4],
        "logit_bias": [{}, {0: 5.0}, {0: -1e6, 2: 0.1}],
        "banned": [(), (0,), (0, 3)],
        "end_tokens": [(), (1,)],
        "min_new_tokens": [0, 3],
    },
}
ROWS = 10_000  # per combination of settings, over all vocabularies


def logits_of(kind: str, rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows ``[rows, vocab]`` float32."""
    values = rng.normal(0, {"flat": 0.01, "far apart": 1e6, "nearly equal": 1e-12}.get(kind, 3), (rows, vocab))
    if kind == "peaked":
        values[np.arange(rows), rng.integers(0, vocab, rows)] += 15
    elif kind == "few values":
        values = rng.integers(-3, 4, (rows, vocab)).astype(float)
    elif kind == "equal":
        values = np.full((rows, vocab), rng.normal())
    elif kind == "mostly -inf":
        values[rng.random((rows, vocab)) < 0.9] = -np.inf
        values[:, rng.integers(vocab)] = 1.0
    elif kind == "quarters":
        values = np.round(values * 4) / 4
    return values.astype(np.float32)


def random_case(
    rng: np.random.Generator, settings: dict[str, list[Any]], vocab: int
) -> tuple[np.ndarray, tuple[int, ...], Context]:
    """Logits, drafted tokens, and a context with a ``Sampling``."""
    rows = int(rng.integers(1, 4))
    values: dict[str, Any] = {name: options[rng.integers(len(options))] for name, options in settings.items()}
    if vocab < 5:
        values = {name: value for name, value in values.items() if name not in ("logit_bias", "banned", "end_tokens")}
    elif settings and rng.random() < 0.02:  # all banned but one
        kept = int(rng.integers(vocab))
        values["banned"] = tuple(token for token in range(vocab) if token != kept)
    temperature = float(rng.choice([0.0, 1e-6, 0.05, 0.3, 0.8, 1.0, 1.7, 100.0], p=[0.1, *[0.1] * 2, *[0.14] * 5]))
    sampling = Sampling(temperature=temperature, seed=int(rng.integers(0, 2**62)), **values)
    history = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
    logits = logits_of(str(rng.choice(KINDS)), rng, rows, vocab)
    if 0.01 < temperature < 10 and vocab > 1 and rng.random() < 0.5 and np.isfinite(logits).all():
        if "top_p" in values and not sampling.top_k and rng.random() < 0.5:
            sampling = attrs.evolve(sampling, top_p=close_mass(logits[0], sampling, rng))
        else:
            close_score(logits[0], sampling, len(history), rng)
    context = Context(history, sampling, generated_from=int(rng.integers(0, len(history) + 1)))
    return logits, tuple(rng.integers(0, vocab, rows - 1).tolist()), context


def close_mass(row: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> float:
    """A ``top_p`` that ends the nucleus within rounding of a token's boundary."""
    probs = np.sort(np.exp((row - row.max()).astype(np.float64) / sampling.temperature))[::-1]
    mass = np.cumsum(probs / probs.sum())[rng.integers(min(len(probs), 6))]
    return float(np.clip(mass * (1 + rng.choice([-1e-7, 0.0, 1e-16, 1e-9])), 1e-6, 1.0))


def close_score(row: np.ndarray, sampling: Sampling, position: int, rng: np.random.Generator) -> None:
    """Change the logit of a token so that its score is that of the best one, within float32."""
    noise = gumbel(sampling.seed, position, np.arange(len(row)), Purpose.TOKEN)
    scores = row / sampling.temperature + noise
    token = int(rng.integers(len(row)))
    row[token] = (np.delete(scores, token).max() - noise[token]) * sampling.temperature


def outcome(call: Callable[[], int]) -> int | str:
    """A token, or the kind of the refusal."""
    try:
        return call()
    except SpecdecError as refusal:
        return type(refusal).__name__


def wrong_rows(
    choose: Callable[[Choosing], Any], values: np.ndarray, drafted: tuple[int, ...], context: Context
) -> tuple[list[str], int]:
    """Descriptions of rows whose certain token is not the reference's, and how many rows were undecided."""
    reference = Rows(HostLogits(values), drafted, context)
    found = choose(Choosing(drafted, context))
    assert len(found) == len(values)
    wrong = [
        f"row {row}: {token}, {context.sampling}"
        for row, token in enumerate(found)
        if token is not None and token != outcome(lambda row=row: reference.choose(row))
    ]
    return wrong, list(found).count(None)


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


@st.composite
def tied(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], Context]:
    """Rows of a few values that differ by much, by one unit in the last place, or not at all."""
    vocab = draw(st.integers(1, 40))
    base = draw(st.sampled_from([0.0, 1.0, -7.25, 1e-30, 3e5]))
    near = float(np.nextafter(np.float32(base), np.float32(np.inf)))
    values = st.sampled_from([base, base, near, base - 1, base + 0.5, -np.inf])
    rows = draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    ids = st.integers(0, vocab - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.7, 1.0, 100.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.25, 0.5, 0.75, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([0.5, -1.0, 1e-9]), max_size=3)),
        banned=draw(st.lists(ids, max_size=3).map(tuple)),
    )
    history = draw(st.lists(ids, min_size=1, max_size=6))
    drafted = draw(st.lists(ids, min_size=len(rows) - 1, max_size=len(rows) - 1).map(tuple))
    return np.array(rows, np.float32), drafted, Context(history, sampling, generated_from=draw(st.integers(0, 1)))


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
