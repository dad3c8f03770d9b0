"""Compare adaptive depth with plain decoding under a useless head, and with the best fixed depth.

    python -m benchmarks.adaptive [--part random_head demo bookkeeping poisoned] [--tokens 400] [--warm 200]
                                  [--settling 50] [--repeats 5] [--deepest 4] [--model FOLDER] [--json FILE]

Prints costs, tokens per second and their ratio to the first arm; ``bookkeeping`` is the policy's own time per cycle.
``random_head``: the embedded model with noise for MTP tensors, or an untrained head, plain against adaptive. ``demo``:
the unchanged embedded model, adaptive against fixed depths, by prompt class. Arms alternate (A B B A) in one process,
every generation in its own session, and all outputs must be equal. "From the start": a newly loaded language model with
its cost table and no knowledge of acceptance. "Warm": after ``--warm`` generated tokens. ``poisoned``: the embedded
model with a cost table of which one row, or all of them, is 30 times too high, against the right table, after
``--settling`` cycles.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

import specdec
from benchmarks.common import arguments, encoded_prompts, median, save
from specdec.checkpoints import Checkpoint, locate, write_checkpoint
from specdec.contract import CycleRecord, Stats
from specdec.measuring.runs import at_depth, plain
from specdec.policies.adaptive import AdaptiveConfig, AdaptivePolicy, Learnt
from specdec.records.cost_table import CostTable

POISON = 30


def with_random_head(folder: Path, seed: int = 0) -> Path:
    """A copy of the embedded model with noise of the same scale for MTP matrices; norms are unchanged."""
    checkpoint = Checkpoint.open(locate("demo"))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name in checkpoint.tensors:
        tensor = checkpoint.load(name)
        if name.startswith("mtp.") and tensor.dim() > 1:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensor = noise.to(tensor.dtype)
        tensors[name] = tensor
    write_checkpoint(folder, checkpoint.config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((checkpoint.path / name).read_bytes())
    return folder


def fresh(lm: specdec.LanguageModel) -> None:
    """Reset what this language model learnt from earlier generations."""
    if isinstance(lm.depth.shared, Learnt):
        lm.depth.shared.last = None


def compare(
    arms: dict[str, specdec.LanguageModel], prompt: list[int], options: argparse.Namespace, *, keep: bool
) -> dict[str, Any]:
    """Tokens per second of each arm (median of its generations), and relative to the first arm.

    The ratio is the median over rounds (A B B A) of the quotient of seconds, which machine slowdowns do not affect.
    ``keep``: adaptive arms keep learning.
    """
    rates: dict[str, list[float]] = {name: [] for name in arms}
    relative: dict[str, list[float]] = {name: [] for name in arms}
    results: dict[str, specdec.Result] = {}
    for turn in range(options.repeats):
        for name in (*arms, *reversed(arms)):
            if not keep:
                fresh(arms[name])
            results[name] = arms[name].generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
            rates[name].append(results[name].stats.tokens_per_second)
        seconds = {name: sum(1.0 / rate for rate in rates[name][2 * turn :]) for name in arms}
        for name in arms:
            relative[name].append(seconds[next(iter(arms))] / seconds[name])
    if len({tuple(result.tokens) for result in results.values()}) != 1:
        raise SystemExit("outputs differ")
    return {
        name: {
            "tokens_per_second": median(rates[name]),
            "of_the_first": median(relative[name]),
            "depths": {str(depth): count for depth, count in sorted(results[name].stats.draft_lengths.items())},
            "reason": results[name].stats.speculation()["reason"],
        }
        for name in arms
    }


def random_head(prompts: dict[str, list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against adaptive depth with heads that are never right.

    The MTP head is the embedded model's with noise, or that of ``--model`` (the checkpoint of
    ``benchmarks.shape_0_8b``).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or str(with_random_head(Path(folder)))
        heads = {"mtp": specdec.load(path, drafter="mtp", depth="adaptive")}
    for name in () if options.model else ("eagle3", "dflash"):
        heads[name] = specdec.load("demo", drafter={"name": name, "model": "random"}, depth="adaptive")
    result: dict[str, Any] = {}
    for name, adaptive in heads.items():
        arms = {"plain": plain(adaptive), "adaptive": adaptive}  # where weights lie in memory must not decide
        from_the_start = compare(arms, prompts["code"], options, keep=False)
        warm_up(adaptive, prompts["code"], options)
        warm = compare(arms, prompts["code"], options, keep=True)
        result[name] = {"costs": cost_figures(adaptive), "from_the_start": from_the_start, "warm": warm}
    return result


def demo(prompts: dict[str, list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Adaptive depth against fixed depths, by prompt class."""
    lm = specdec.load(drafter="mtp", depth={"name": "adaptive", "max_depth": max(options.deepest, 1)})
    fixed = {f"fixed {depth}": at_depth(lm, depth) for depth in range(options.deepest + 1)}  # over the same weights
    classes: dict[str, Any] = {}
    for name, prompt in prompts.items():
        warm_up(lm, prompt, options)
        entry = compare({**fixed, "adaptive": lm}, prompt, options, keep=True)
        rates = {arm: float(entry[arm]["of_the_first"]) for arm in entry}
        best = max(fixed, key=lambda arm: rates[arm])
        classes[name] = entry | {"best": best, "adaptive_of_best": rates["adaptive"] / rates[best]}
    return {"costs": cost_figures(lm), "classes": classes}


def warm_up(lm: specdec.LanguageModel, prompt: list[int], options: argparse.Namespace) -> None:
    """Reset and learn from ``--warm`` tokens."""
    fresh(lm)
    lm.generate(prompt, max_new_tokens=options.warm, ignore_eos=True)


def cost_figures(lm: specdec.LanguageModel) -> dict[str, Any]:
    """The cost table as break-even points: the acceptance at position 0 above which depth 1 pays."""
    table: CostTable = lm.depth.shared.table
    plain = table.cycle(0)
    return {
        "cycle_of_depth": {str(depth): table.cycle(depth) / plain for depth in range(7)},
        "plain_cycle_ms": 1e3 * plain,
        "break_even_acceptance": table.cycle(1) / plain - 1.0,
    }


def bookkeeping(prompts: dict[str, list[int]], options: argparse.Namespace, cycles: int = 20000) -> dict[str, float]:
    """Microseconds per cycle in the policy itself, for a drafter that is always wrong and one that is always right."""
    found = {}
    for right in (False, True):
        policy, stats = AdaptivePolicy(AdaptiveConfig()), Stats()
        started = perf_counter()
        for _ in range(cycles):
            depth = policy.next_depth(stats)
            policy.record(
                CycleRecord(9, depth, depth, depth * right, (0,) * (depth * right + 1), 2e-4 * depth, 1e-3, 0.0)
            )
        found["right" if right else "wrong"] = 1e6 * (perf_counter() - started) / cycles
    return found


def poisoned(prompts: dict[str, list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Adaptive depth with a wrong cost table against the right one, after some cycles."""
    lm = specdec.load(drafter="mtp", depth="adaptive")
    table: CostTable = lm.depth.shared.table

    def wrong(*rows: int) -> CostTable:
        return attrs.evolve(table, verify={n: POISON * s if n in rows else s for n, s in table.verify.items()})

    tables = {"right": table, **{f"{rows} rows": wrong(rows) for rows in sorted(table.verify)}}
    tables["all rows"] = wrong(*table.verify)
    arms = {name: attrs.evolve(lm, depth=attrs.evolve(lm.depth, shared=Learnt(one))) for name, one in tables.items()}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    outputs = set()
    for _ in range(options.repeats):
        for name in (*arms, *reversed(arms)):
            fresh(arms[name])
            ends: list[tuple[float, int]] = []
            stream = arms[name].stream(prompts["code"], max_new_tokens=options.tokens, ignore_eos=True)
            stream.on_cycle = lambda record, ends=ends: ends.append((perf_counter(), len(record.emitted)))
            outputs.add(tuple(stream.result.tokens))
            settled = ends[options.settling - 1 :]
            rates[name].append(sum(tokens for _, tokens in settled[1:]) / (settled[-1][0] - settled[0][0]))
    if len(outputs) != 1:
        raise SystemExit("outputs differ")
    right = median(rates["right"])
    return {
        name: {"tokens_per_second": median(one), "of_the_right": median(one) / right} for name, one in rates.items()
    }


def main() -> None:
    options = arguments(__doc__, tokens=400, warm=200, settling=50, repeats=5, deepest=4, part=list(PARTS), model="")
    prompts = encoded_prompts(specdec.load(drafter="none").tokenizer)
    save({name: PARTS[name](prompts, options) for name in options.part}, options)


PARTS = {"random_head": random_head, "demo": demo, "bookkeeping": bookkeeping, "poisoned": poisoned}

if __name__ == "__main__":
    main()
