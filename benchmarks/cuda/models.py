"""Whole models of a shape: parity gates, device time of every kind of pass, and generations.

A pass is timed as its own graph with everything that a cycle needs of it: embedding, layers, head and the choice of the
best token, over one sequence's tables at the wanted context. Nothing is committed, so every replay computes the same
rows. Generations go through ``LanguageModel.generate``, on whatever path it takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from benchmarks.cuda.shapes import DEPTHS, IDENTITY, PROFILE, Costs, Shape, conditional
from benchmarks.cuda.timing import Lab
from benchmarks.cuda.weights import AGREEMENT, MadeWeights, build_target, language_model
from specdec.backends.cuda import choosing, products
from specdec.backends.cuda.arrays import CudaHidden, materialised
from specdec.backends.cuda.caches import CapturedCache
from specdec.backends.cuda.kernels.commit import commit_rows
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.passes import DeviceTokens
from specdec.contract import Needs, State
from specdec.measuring.runs import generate
from specdec.measuring.speed_model import expected_tokens
from specdec.measuring.synthetic import SyntheticVerifier
from specdec.models.causal_lm import CausalLM, PrunedHead, _run_mtp

ROWS = (1, 2, 3, 4, 5, 8, 16)
GATED_TOKENS = 64
GATED_DEPTHS = (0, 1, 3, 7)
PROMPTS = 3  # number of different start tokens of generations
REFERENCE_TOLERANCE = 0.1  # bfloat16 against float32 logits: norm of the difference over the norm


def prompt_of(shape: Shape, length: int, start: int = 0) -> list[int]:
    """Arbitrary tokens, all within the draft vocabulary."""
    return [(7 * i + 3 + 101 * start) % shape.draft_rows for i in range(length)]


class Model:
    """A target of a shape on the device, and pipelines over it."""

    def __init__(
        self, shape: Shape, lab: Lab, folder: Path, dtype: torch.dtype, *, agreement: float | None, eager: str = ""
    ) -> None:
        self.shape = shape
        self.lab = lab
        self.folder = folder
        self.dtype = dtype
        began = perf_counter()
        self.weights = MadeWeights(shape, lab.place, dtype=dtype, agreement=agreement)
        ops: Any = CudaOps(lab.device, dtype, eager_reason=eager)
        name = str(dtype).removeprefix("torch.")
        self.target = build_target(shape, ops, self.weights, backend="cuda", dtype=name)
        lab.synchronise()
        self.build_seconds = perf_counter() - began

    def state(self, context: int, room: int) -> State:
        """A sequence of ``context`` tokens whose caches, including the MTP head's, have room for the next passes."""
        target = self.target
        tokens = prompt_of(self.shape, context)
        state = target.new_state(context + room, Needs(mtp=True, final_hidden=True))
        target.prefill(state, tokens[:-1])
        target.decode(state, tokens[-1:])
        target.commit(state, 1)
        target.feed_mtp(state)
        return state

    def pipeline(self, drafter: str, depth: int, *, pruned: bool = True, capacity: int | None = None) -> Any:
        """A language model over the target."""
        return language_model(
            self.target, self.shape, self.folder, drafter=drafter, depth=depth, pruned=pruned, capacity=capacity
        )


# --- parity gates -----------------------------------------------------------------------------------------------------


def gates(
    shape: Shape,
    lab: Lab,
    folder: Path,
    dtype: torch.dtype,
    *,
    tokens: int = GATED_TOKENS,
    depths: Sequence[int] = GATED_DEPTHS,
    prompt_tokens: int = 24,
) -> dict[str, Any]:
    """Plain decoding against everything that must have its bits, on random weights. ``failures`` lists differences.

    - the same passes op by op instead of from graphs;
    - verification at every depth, forcing every number of accepted tokens in turn, followed by wrong drafts;
    - generation with the MTP head at every depth, with the full and a pruned head.
    """
    failures: list[str] = []
    model = Model(shape, lab, folder, dtype, agreement=None)
    capacity = prompt_tokens + tokens + 2 * max(depths) + 4
    prompt = prompt_of(shape, prompt_tokens)
    ids, logits = _plain(model.target, prompt, tokens, capacity, failures)
    eager = Model(shape, lab, folder, dtype, agreement=None, eager="the parity gate compares it with graphs")
    other, other_logits = _plain(eager.target, prompt, tokens, capacity, failures)
    _compare("op by op", ids, logits, other, other_logits, failures)
    del eager
    for depth in depths:
        if depth:
            found = _forced(model.target, prompt, ids, logits, depth, capacity)
            failures += [f"depth {depth}: {text}" for text in found]
        for pruned in (False, True) if depth else (False,):
            lm = model.pipeline("mtp" if depth else "none", depth, pruned=pruned, capacity=capacity)
            result = lm.generate(prompt, max_new_tokens=tokens)
            if list(result.tokens) != ids:
                at = next((i for i, (a, b) in enumerate(zip(ids, result.tokens, strict=False)) if a != b), None)
                which = f"generation at depth {depth}, {'pruned' if pruned else 'full'} head"
                failures.append(f"{which}: token {at} differs from plain decoding")
            if depth and not result.stats.offered:
                failures.append(f"generation at depth {depth} drafted nothing: {result.stats.inactive_reason}")
    return {
        "failures": failures,
        "tokens": tokens,
        "depths": list(depths),
        "distinct": len(set(ids)),
        "kernels": model.target.info.kernels,
        "parity": model.target.info.parity.value,
        **_against_host(model, prompt, failures),
    }


def _plain(
    target: CausalLM, prompt: Sequence[int], tokens: int, capacity: int, failures: list[str]
) -> tuple[list[int], list[Any]]:
    """Greedy tokens and the logits that chose them, one pass per token."""
    state = target.new_state(capacity)
    target.prefill(state, prompt[:-1])
    pending, ids, rows = prompt[-1], [], []
    for place in range(tokens):
        output = target.decode(state, [pending]).need_logits()
        rows.append(output.rows()[0].copy())
        pending = output.argmax()[0]
        if pending != int(np.argmax(rows[-1])):
            failures.append(f"token {place}: the head's best is {pending}, its logits say {int(np.argmax(rows[-1]))}")
        ids.append(pending)
        target.commit(state, 1)
    return ids, rows


def _compare(
    what: str,
    ids: Sequence[int],
    logits: Sequence[Any],
    other: Sequence[int],
    others: Sequence[Any],
    failures: list[str],
) -> None:
    for place, (a, b) in enumerate(zip(logits, others, strict=True)):
        if a.tobytes() != b.tobytes():
            failures.append(f"{what}: the logits of token {place} have other bits")
            return
    if list(ids) != list(other):
        failures.append(f"{what}: other tokens")


def _forced(
    target: CausalLM, prompt: Sequence[int], ids: Sequence[int], logits: Sequence[Any], depth: int, capacity: int
) -> list[str]:
    """Verify drafts with 0, 1, ... ``depth`` right tokens in turn; return the first differing bits."""
    state = target.new_state(capacity)
    target.prefill(state, prompt[:-1])
    pending, done, cycle = prompt[-1], 0, 0
    while done < len(ids):
        right = min(cycle % (depth + 1), len(ids) - 1 - done)
        draft = list(ids[done : done + right])
        wanted = ids[done + right]
        draft += [(wanted + 1 + i) % target.info.vocab_size for i in range(depth - right)]
        rows = target.decode(state, [pending, *draft]).need_logits().rows()
        for row in range(right + 1):
            if rows[row].tobytes() != logits[done + row].tobytes():
                return [f"row {row} of a verification with {right} of {depth} accepted, token {done + row}: other bits"]
        target.commit(state, right + 1)
        pending, done, cycle = wanted, done + right + 1, cycle + 1
    return []


def _against_host(model: Model, prompt: Sequence[int], failures: list[str]) -> dict[str, Any]:
    """Compare logits with the float32 torch reference on the host, over the same weights; small shapes only."""
    from specdec.backends.cpu.reference import ReferenceOps

    if model.shape.pass_bytes(1) > 4e9:
        return {"host_reference": "left out: too large for the host"}

    class OnHost(MadeWeights):
        def __getitem__(self, name: str) -> Tensor:
            return super().__getitem__(name).cpu().float()

    weights = OnHost(model.shape, model.lab.place, dtype=model.dtype)
    ops: Any = ReferenceOps(torch.float32)
    reference = build_target(model.shape, ops, weights, backend="cpu", dtype="float32")
    rows, compared = [], min(8, len(prompt) // 2)
    for target in (model.target, reference):
        state = target.new_state(len(prompt) + 16)
        target.prefill(state, prompt[:-compared])
        rows.append(target.decode(state, prompt[-compared:]).need_logits().rows().astype(np.float64))
    error = float(np.linalg.norm(rows[0] - rows[1]) / np.linalg.norm(rows[1]))
    agreeing = float((rows[0].argmax(1) == rows[1].argmax(1)).mean())
    tolerance = REFERENCE_TOLERANCE if model.dtype is torch.bfloat16 else 1e-4
    if not error <= tolerance:
        failures.append(f"logits are {error:.1e} from the reference on the host, tolerance {tolerance:.1e}")
    return {"host_reference": {"error": error, "tolerance": tolerance, "same_best": agreeing}}


# --- passes -----------------------------------------------------------------------------------------------------------


def decode_body(model: Model, state: Any, rows: int) -> Callable[[], object]:
    """A target pass of ``rows`` rows with its head and the best tokens, over the tables of ``state``."""
    target = model.target
    target.decode(state, prompt_of(model.shape, rows))  # allocates memory for this row count
    target.commit(state, 0)
    caches = [CapturedCache(cache, cache.row, cache.bound) for cache in state.caches]
    run = state.target_pass.passes.body
    ids = torch.tensor(prompt_of(model.shape, rows), dtype=torch.int32, device=model.lab.place)

    def body() -> object:
        x = materialised(run(caches, DeviceTokens(ids), None))
        return choosing.best(products.logits(x, [target.model.lm_head]))

    return body


def draft_body(model: Model, state: Any, pruned: PrunedHead | None, rows: int = 1) -> Callable[[], object]:
    """An MTP pass over ``rows`` pairs with its head, full or pruned, and the best token of the last row."""
    target = model.target
    cache = state.mtp
    cache.reserve(rows)
    caches = [CapturedCache(cache, cache.row, cache.bound)]
    ids = torch.tensor(prompt_of(model.shape, rows), dtype=torch.int32, device=model.lab.place)
    last = state.pairs.last
    assert isinstance(last, CudaHidden)
    hidden = last.array.repeat(rows, 1)
    if pruned is None:
        weights, names = (target._mtp_lm_head,), None
    else:
        rows_kept: Any = pruned.rows[0]
        weights, names = rows_kept.parts, rows_kept.part_ids[0]

    def body() -> object:
        x = materialised(_run_mtp(target.model, caches, DeviceTokens(ids), hidden))
        return choosing.best(products.logits(x[-1:], weights), names)

    return body


def commit_body(model: Model, state: Any) -> Callable[[], object]:
    """The commit of all caches, on a copy of the tables."""
    kinds = torch.tensor([int(cache.kind) for cache in state.caches], dtype=torch.int32, device=model.lab.place)
    table = torch.stack([cache.row for cache in state.caches])
    return lambda: commit_rows(table, kinds, 0)


def passes(
    model: Model, bandwidth: float, out: dict[str, Any], write: Callable[[], None], rows: Sequence[int]
) -> Costs:
    """Device times of all passes, written into ``out`` one by one; returns their cost in a cycle."""
    shape, lab = model.shape, model.lab
    state: Any = model.state(shape.context, 64)
    bound = shape.pass_bytes(1) / bandwidth
    out |= {"bytes": shape.pass_bytes(1), "bandwidth": bandwidth, "bound_seconds": bound, "context": state.length}
    bodies = {str(count): decode_body(model, state, count) for count in rows}
    found = lab.compare(bodies)
    decode = found["1"].median
    out["decode"] = {**found["1"].to_dict(), "of_bound": bound / decode}
    out["verify"] = {
        count: {**spread.to_dict(), "of_decode": spread.median / decode, "bytes": shape.pass_bytes(int(count))}
        for count, spread in found.items()
    }
    write()
    pruned = model.target.draft_head(list(range(shape.draft_rows)))
    drafts = lab.compare(
        {
            "pruned": _repeated(draft_body(model, state, pruned), lab),
            "full": _repeated(draft_body(model, state, None), lab),
            "pruned, 4 pairs": _repeated(draft_body(model, state, pruned, 4), lab),
        },
        parts=_parts(lab),
    )
    out["draft"] = {
        name: {**spread.to_dict(), "of_decode": spread.median / decode} for name, spread in drafts.items()
    } | {"bytes": {"pruned": shape.draft_bytes(shape.draft_rows), "full": shape.draft_bytes(shape.vocabulary)}}
    bookkeeping = lab.time(_repeated(commit_body(model, state), lab), parts=_parts(lab))
    out["bookkeeping"] = {**bookkeeping.to_dict(), "of_decode": bookkeeping.median / decode}
    costs = Costs(
        decode=decode,
        verify={int(count): spread.median for count, spread in found.items()},
        draft=drafts["pruned"].median,
        bookkeeping=bookkeeping.median,
    )
    depth, speedup = costs.best()
    out["speedup_by_identity"] = {
        "profile": list(PROFILE),
        "best_depth": depth,
        "speedup": speedup,
        "by_depth": {depth: costs.speedup(depth) for depth in DEPTHS if depth + 1 in costs.verify},
    }
    write()
    return costs


def _parts(lab: Lab) -> int:
    """How often to repeat a short body in its graph, to exclude the gap between graphs."""
    return 8 if lab.real else 1


def _repeated(body: Callable[[], object], lab: Lab) -> Callable[[], object]:
    def run() -> None:
        for _ in range(_parts(lab)):
            body()

    return run


# --- generations ------------------------------------------------------------------------------------------------------


def generations(
    model: Model,
    costs: Costs,
    out: dict[str, Any],
    write: Callable[[], None],
    *,
    tokens: int,
    repeats: int,
    depths: Sequence[int] = DEPTHS,
) -> list[str]:
    """Wall-clock tokens per second, plain and by depth, interleaved; returns parity failures.

    There are two kinds of speculative generation: ``made``, where the head of the weights drafts the target's tokens in
    about the profile's share of cases, and ``coin``, where a coin replaces the outcome. Neither is a result of a model.
    ``speedup`` uses measured seconds per cycle and the profile's expected tokens per cycle.
    """
    shape, failures = model.shape, []
    prompts = [prompt_of(shape, shape.context, start) for start in range(PROMPTS if model.lab.real else 1)]
    capacity = shape.context + tokens + 24
    plain = model.pipeline("none", 0, capacity=capacity)
    settings: dict[str, Any] = {"max_new_tokens": tokens}
    if model.lab.real:
        generate(plain, prompts[0], **settings)
    found: dict[str, Any] = {}
    out["generation"] = found
    for depth in depths:
        made = model.pipeline("mtp", depth, capacity=capacity)
        coin = attrs.evolve(made, verifier=SyntheticVerifier(made.verifier, PROFILE))
        runs: dict[str, list[Any]] = {"plain": [], "made": [], "coin": []}
        arms = {"plain": plain, "made": made, "coin": coin}
        for _ in range(repeats):
            for prompt in prompts:
                outputs = {}
                for name in (*arms, *reversed(arms)) if model.lab.real else arms:
                    run = generate(arms[name], prompt, **settings)
                    runs[name].append(run)
                    outputs[name] = run.tokens
                if outputs["made"] != outputs["plain"]:
                    failures.append(f"{shape.name}, depth {depth}: speculative tokens differ from plain ones")
        found[str(depth)] = _generation(runs, costs, depth)
        write()
    return failures


def _generation(runs: dict[str, list[Any]], costs: Costs, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, members in runs.items():
        rates = [run.rate for run in members]
        cycles = [cycle for run in members for cycle in run.cycles]
        seconds = sum(run.seconds for run in members)
        found[name] = {
            "tokens_per_second": sum(len(run.tokens) for run in members) / seconds,
            "spread": [min(rates), statistics.median(rates), max(rates)],
            "seconds_per_cycle": seconds / len(cycles),
            "tokens_per_cycle": sum(len(cycle.emitted) for cycle in cycles) / len(cycles),
        }
    plain = found["plain"]["seconds_per_cycle"]
    for name in ("made", "coin"):
        arm = found[name]
        arm["measured_speedup"] = arm["tokens_per_second"] / found["plain"]["tokens_per_second"]
        arm["speedup"] = expected_tokens(conditional(PROFILE, depth)) * plain / arm["seconds_per_cycle"]
        arm["speedup_over_graph_decode"] = arm["speedup"] * costs.decode / plain  # excludes plain decoding's host time
        arm["identity"] = costs.cycle(depth) / arm["seconds_per_cycle"]
        arm["identity_holds"] = abs(arm["identity"] - 1) <= IDENTITY
    found["plain"]["identity"] = costs.decode / plain
    found["plain"]["identity_holds"] = abs(costs.decode / plain - 1) <= IDENTITY
    cycles = [cycle for run in runs["made"] for cycle in run.cycles]
    found["made"]["acceptance"] = [
        sum(cycle.accepted > place for cycle in cycles) / max(1, sum(cycle.offered > place for cycle in cycles))
        for place in range(depth)
    ]
    return found


def made(shape: Shape, lab: Lab, folder: Path, dtype: torch.dtype) -> Model:
    """The timed model, with weights that make the MTP head right about as often as the profile says."""
    return Model(shape, lab, folder, dtype, agreement=AGREEMENT)
