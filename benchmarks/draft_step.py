"""A draft step of the MTP head in units of a plain decode step, with the full output head and with pruned ones.

    python -m benchmarks.draft_step [--folder DIR] [--context 256] [--repeats 15] [--rows 8192 16384] [--json FILE]

The 0.8B shape with random weights (``benchmarks.shape_0_8b`` writes it where ``--folder`` has none). A step is one MTP
pass over one pair, its logits, and the choice of the token; a plain step is one row of the target and its choice. All
kinds take turns in one process, so that the ratios share whatever the machine did meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.common import machine, median, save, seconds
from benchmarks.shape_0_8b import write_checkpoint


def measure(folder: Path, context: int, repeats: int, sizes: list[int], extra: int) -> dict[str, Any]:
    """Milliseconds and ratios, best and median of the repeats."""
    import specdec
    from specdec.contract import Context, DraftHead, Sampling
    from specdec.drafters.gate import DraftGate
    from specdec.sampling import draft_token

    lm = specdec.load(str(folder), dtype="bfloat16")
    target, state = lm.target, lm.target.new_state(context + 64)
    tokens = [(37 * i) % 200 for i in range(context)]
    hidden = target.prefill(state, tokens[:-1]).need_hidden()
    target.prefill_mtp(state, tokens[1:-1], hidden[:-1])
    target.decode_mtp(state, tokens[-1:], hidden[-1:])
    vocab_size = lm.info.vocab_size
    gathering = {}
    heads: dict[str, DraftHead | None] = {"full head": None}
    for size in sizes:
        ids = list(range(0, vocab_size, vocab_size // size))[:size]
        started = perf_counter()
        head = heads[f"{size} rows"] = target.draft_head(ids)
        gathering[size] = perf_counter() - started
        if size == sizes[0] and extra:
            heads[f"{size} rows and {extra}"] = head.extended(
                [token for token in range(1, vocab_size) if token not in set(ids)][:extra]
            )

    greedy, drawn = Context(tokens), Context(tokens, Sampling(temperature=1.0, seed=1))
    gate = DraftGate(min_confidence=1e-9)

    def plain() -> None:
        target.decode(state, tokens[:1]).need_logits().argmax()

    def step(head: DraftHead | None, chosen: Context, gate: DraftGate | None) -> None:
        options: dict[str, Any] = {} if head is None else {"head": head}
        output = target.decode_mtp(state, tokens[:1], hidden[-1:], provisional=True, **options)
        if gate is not None and gate.stops(output.need_logits(), chosen):
            raise AssertionError("the gate is open")
        draft_token(output.need_logits(), [], chosen)

    def kinds() -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {"plain": plain}
        for name, head in heads.items():
            found[name] = partial(step, head, greedy, None)
        for name in ("full head", f"{sizes[len(sizes) // 2]} rows"):
            found[f"{name}, sampled"] = partial(step, heads[name], drawn, None)
            found[f"{name}, gated"] = partial(step, heads[name], greedy, gate)
        return found

    times: dict[str, list[float]] = {name: [] for name in kinds()}
    for number in range(repeats + 1):
        for name, call in kinds().items():
            taken = seconds(call)
            if number:  # the first of each is warm-up
                times[name].append(taken)
        target.prefill_mtp(state, tokens[:1], hidden[-1:])  # a true pair drops the chained entries
    best = {name: min(values) for name, values in times.items()}
    middle = {name: median(values) for name, values in times.items()}
    return {
        "milliseconds": {name: 1e3 * value for name, value in best.items()},
        "median_milliseconds": {name: 1e3 * value for name, value in middle.items()},
        "ratio_to_plain": {name: value / best["plain"] for name, value in best.items() if name != "plain"},
        "median_ratio_to_plain": {name: value / middle["plain"] for name, value in middle.items() if name != "plain"},
        "gathering_seconds": gathering,
        "kernels": lm.info.kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--extra", type=int, default=2048, help="ids added to the smallest head, as a sequence does")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "model.safetensors").exists():
            write_checkpoint(folder)
        measured = measure(folder, options.context, options.repeats, options.rows, options.extra)
        save({"machine": machine(), **measured}, options.json)


if __name__ == "__main__":
    main()
