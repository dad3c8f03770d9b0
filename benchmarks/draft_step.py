"""Time an MTP draft step relative to a plain decode step, with the full output head and with pruned ones.

    python -m benchmarks.draft_step [--folder DIR] [--context 256] [--repeats 15] [--rows 8192 16384] [--json FILE]

Prints milliseconds and ratios, best and median. The model has the 0.8B shape and random weights (kept in ``--folder``).
A draft step is one MTP pass over one pair, its logits, and the choice of the token; a plain step is one target row and
its choice. All kinds alternate in one process, so that ratios share the machine's changes. ``--extra`` ids are added to
the smallest head, as a sequence adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import BYTE_TOKENS, arguments, in_turns, median, save, seconds, shape_0_8b


def measure(folder: Path, context: int, repeats: int, sizes: list[int], extra: int) -> dict[str, Any]:
    """Milliseconds and ratios, best and median of the repeats."""
    import specdec
    from specdec.contract import Context, DraftHead, Needs, Sampling
    from specdec.drafters.gate import DraftGate
    from specdec.sampling import draft_token

    lm = specdec.load(str(folder), dtype="bfloat16")
    target, capacity = lm.target, context + (len(sizes) + 8) * (repeats + 2)
    state = target.new_state(capacity, Needs(mtp=True, final_hidden=True))
    tokens = [(37 * i) % BYTE_TOKENS for i in range(context)]
    hidden = target.prefill(state, tokens[:-1]).need_hidden()
    target.decode_mtp(state, tokens[-1:], hidden[-1:])
    vocab_size = lm.info.vocab_size
    gathering: dict[int, float] = {}
    heads: dict[str, DraftHead | None] = {"full head": None}
    for size in sizes:
        ids = list(range(0, vocab_size, vocab_size // size))[:size]
        gathering[size] = seconds(lambda ids=ids, size=size: heads.update({f"{size} rows": target.draft_head(ids)}))
        smallest = heads[f"{size} rows"]
        if size == sizes[0] and extra and smallest is not None:
            more = [token for token in range(1, vocab_size) if token not in set(ids)][:extra]
            heads[f"{size} rows and {extra}"] = smallest.extended(more)

    greedy, drawn = Context(tokens), Context(tokens, Sampling(temperature=1.0, seed=1))
    open_gate = DraftGate(min_confidence=1e-9)

    def plain() -> None:
        target.decode(state, tokens[:1]).need_logits().argmax()

    def step(head: DraftHead | None, chosen: Context = greedy, gate: DraftGate | None = None) -> None:
        options: dict[str, Any] = {} if head is None else {"head": head}
        output = target.decode_mtp(state, tokens[:1], hidden[-1:], provisional=True, **options)
        if gate is not None and gate.stops(output.need_logits(), chosen):
            raise AssertionError("the gate is open")
        draft_token(output.need_logits(), [], chosen)

    calls: dict[str, Callable[[], None]] = {
        "plain": plain,
        **{name: partial(step, head) for name, head in heads.items()},
    }
    for name in ("full head", f"{sizes[len(sizes) // 2]} rows"):
        calls[f"{name}, sampled"] = partial(step, heads[name], drawn)
        calls[f"{name}, gated"] = partial(step, heads[name], gate=open_gate)

    def timed(call: Callable[[], None]) -> float:
        taken = seconds(call)
        target.prefill_mtp(state, tokens[:1], hidden[-1:])  # a true pair drops the chained entries
        return taken

    times = in_turns(calls, repeats, warm_up=1, measure=timed)
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
    options = arguments(__doc__, folder=None, context=256, repeats=15, rows=[8192, 16384, 32768], extra=2048)
    with shape_0_8b(options.folder) as folder:
        save(measure(folder, options.context, options.repeats, options.rows, options.extra), options)


if __name__ == "__main__":
    main()
