"""Whole models of a shape: device time of every kind of pass, and generations.

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

import torch

from benchmarks.cuda.shapes import DEPTHS, IDENTITY, PROFILE, Costs, Shape
from benchmarks.cuda.timing import Lab
from benchmarks.cuda.weights import MadeWeights, build_target, language_model
from specdec.backends.cuda import choosing, products
from specdec.backends.cuda.arrays import CudaHidden, materialised
from specdec.backends.cuda.caches import CapturedCache
from specdec.backends.cuda.kernels.commit import commit_rows
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.placeholders import DeviceTokens
from specdec.contract import Needs, State
from specdec.measuring.runs import generate
from specdec.models.causal_lm import PrunedHead, _run_mtp

ROWS = (1, 2, 3, 4, 5, 8, 16)
PROMPTS = 3  # number of different start tokens of generations


def prompt_of(shape: Shape, length: int, start: int = 0) -> list[int]:
    """Arbitrary tokens, all within the draft vocabulary."""
    return [(7 * i + 3 + 101 * start) % shape.draft_rows for i in range(length)]


class Model:
    """A target of a shape on the device, whose MTP head is right about as often as the profile says, and pipelines."""

    def __init__(self, shape: Shape, lab: Lab, folder: Path, dtype: torch.dtype) -> None:
        self.shape = shape
        self.lab = lab
        self.folder = folder
        self.dtype = dtype
        began = perf_counter()
        self.weights = MadeWeights(shape, lab.place, dtype=dtype)
        ops: Any = CudaOps(lab.device, dtype)
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
        weights, names = (target._lm_head_of(0),), None
    else:
        rows_kept: Any = pruned.rows[0]
        weights, names = rows_kept.parts, rows_kept.part_ids[0]

    def body() -> object:
        x = materialised(_run_mtp(target.model, 0, caches, DeviceTokens(ids), hidden))
        return choosing.best(products.logits(x[-1:], weights), names)

    return body


def commit_body(model: Model, state: Any) -> Callable[[], object]:
    """The commit of all caches, on a copy of the tables."""
    kinds = torch.tensor([cache.kind for cache in state.caches], dtype=torch.int32, device=model.lab.place)
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

    The head of the weights drafts the target's tokens in about the profile's share of cases, so the speed is a timing
    and no result of a model. ``speedup`` uses measured seconds per cycle and the profile's expected tokens per cycle.
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
        runs: dict[str, list[Any]] = {"plain": [], "made": []}
        arms = {"plain": plain, "made": made}
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
    arm = found["made"]
    arm["measured_speedup"] = arm["tokens_per_second"] / found["plain"]["tokens_per_second"]
    arm["speedup"] = (1.0 + sum(PROFILE[:depth])) * plain / arm["seconds_per_cycle"]
    arm["speedup_over_graph_decode"] = arm["speedup"] * costs.decode / plain  # excludes plain decoding's host time
    arm["identity"] = costs.cycle(depth) / arm["seconds_per_cycle"]
    arm["identity_holds"] = abs(arm["identity"] - 1) <= IDENTITY
    found["plain"]["identity"] = costs.decode / plain
    found["plain"]["identity_holds"] = abs(costs.decode / plain - 1) <= IDENTITY
    cycles = [cycle for run in runs["made"] for cycle in run.cycles]
    arm["acceptance"] = [
        sum(cycle.accepted > place for cycle in cycles) / max(1, sum(cycle.offered > place for cycle in cycles))
        for place in range(depth)
    ]
    return found
