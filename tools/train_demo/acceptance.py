"""Measure the MTP head's greedy acceptance: ``python -m tools.train_demo.acceptance``.

The trunk continues held-out prompts greedily. Every position of a continuation then starts a draft of ``DEPTH`` tokens,
and each drafted token is compared with the trunk's own. A drafted position is *offered* if the continuation is long
enough, *reached* if everything drafted before it was right, and *accepted* if it is right too. On reached rows the
drafted tokens equal the trunk's, so feeding the trunk's tokens to the chain gives the same drafts as decoding would.
Everything runs in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_demo.data import END_OF_TEXT, IM_END
from tools.train_demo.decode import generate_ragged
from tools.train_demo.export import load_model
from tools.train_demo.model import RIGHT, DemoModel, MtpVariant
from tools.train_demo.prepare import DEFAULT_EXPORT, PROMPTS_FILE

DEPTH = 4
NEW_TOKENS = 64
TRAPS = {
    "none": RIGHT,
    "silu instead of sigmoid as the MTP attention's gate": MtpVariant(gate="silu"),
    "h taken before the final norm": MtpVariant(hidden="pre"),
    "chained hidden taken before `mtp.norm`": MtpVariant(chain="pre"),
    "MTP norm weights without the 1": MtpVariant(norm_offset=0.0),
    "query and gate as two halves instead of per head": MtpVariant(interleave="halves"),
    "hidden first in `mtp.fc`": MtpVariant(order="hidden_first"),
}


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A prompt with the trunk's greedy answer, cut after its first end token."""

    tokens: Tensor  # [prompt + answer] int64
    prompt_length: int


@dataclasses.dataclass
class Tally:
    """Counts by drafted position, and the cost of decoding with drafts of DEPTH tokens."""

    offered: list[int] = dataclasses.field(default_factory=lambda: [0] * DEPTH)
    reached: list[int] = dataclasses.field(default_factory=lambda: [0] * DEPTH)
    accepted: list[int] = dataclasses.field(default_factory=lambda: [0] * DEPTH)
    passes: int = 0
    emitted: int = 0

    def add(self, matches: list[list[bool]]) -> None:
        """``matches``: one row per start, holding at most DEPTH results."""
        for row in matches:
            alive = True
            for s, match in enumerate(row):
                self.offered[s] += 1
                self.reached[s] += alive
                alive = alive and match
                self.accepted[s] += alive
        start = 0
        while start < len(matches):
            right = (matches[start] + [False]).index(False)
            self.passes += 1
            self.emitted += right + 1
            start += right + 1

    def plus(self, other: Tally) -> Tally:
        def both(name: str) -> list[int]:
            return [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)]

        passes, emitted = self.passes + other.passes, self.emitted + other.emitted
        return Tally(both("offered"), both("reached"), both("accepted"), passes, emitted)

    def conditional(self, s: int) -> float:
        return self.accepted[s] / max(self.reached[s], 1)

    def cumulative(self, s: int) -> float:
        return self.accepted[s] / max(self.offered[s], 1)

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted / max(self.passes, 1)


def continue_prompts(model: DemoModel, tokenizer: Tokenizer, prompts: list[str]) -> list[Continuation]:
    encoded = [torch.tensor(tokenizer.encode(prompt).ids) for prompt in prompts]
    answers = generate_ragged(model, encoded, NEW_TOKENS)
    ends = [tokenizer.token_to_id(token) for token in (IM_END, END_OF_TEXT)]
    continuations = []
    for prompt, answer in zip(encoded, answers, strict=True):
        stops = torch.isin(answer, torch.tensor(ends)).nonzero()
        length = int(stops[0]) + 1 if len(stops) else len(answer)
        continuations.append(Continuation(torch.cat([prompt, answer[:length]]), len(prompt)))
    return continuations


@torch.no_grad()
def measure(model: DemoModel, continuations: list[Continuation], variants: list[MtpVariant]) -> list[Tally]:
    """Draft from every position of every continuation, once per variant of the MTP head."""
    tallies = [Tally() for _ in variants]
    for c in continuations:
        begin, end = c.prompt_length - 1, len(c.tokens)  # row j drafts x_{j+2}, x_{j+3}, ...
        tokens = F.pad(c.tokens, (0, DEPTH))[None]  # reads past the end belong to drafts that are not offered
        post, pre = model.hidden_states(tokens[:, :end])
        for variant, tally in zip(variants, tallies, strict=True):
            hidden = post if variant.hidden == "post" else pre
            hits = []
            for s, out in enumerate(model.draft_states(hidden, tokens, DEPTH, variant, first_row=begin)):
                starts = max(end - begin - 2 - s, 0)
                drafted = model.logits(out[0, :starts]).argmax(-1)
                hits.append((drafted == c.tokens[begin + 2 + s :]).tolist())
            tally.add([[hits[s][j] for s in range(DEPTH) if j < len(hits[s])] for j in range(len(hits[0]))])
    return tallies


def markdown(by_class: dict[str, Tally], by_trap: dict[str, dict[str, Tally]]) -> str:
    """The two tables of the model card."""
    lines = [
        "| prompts | position | offered | reached | accepted | conditional | cumulative | tokens per pass |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, tally in by_class.items():
        for s in range(DEPTH):
            counts = f"{tally.offered[s]} | {tally.reached[s]} | {tally.accepted[s]}"
            first, gain = (name, f"{tally.tokens_per_pass:.2f}") if s == 0 else ("", "")
            shares = f"{tally.conditional(s):.3f} | {tally.cumulative(s):.3f}"
            lines.append(f"| {first} | {s} | {counts} | {shares} | {gain} |")
    heads = " | ".join(f"position {s}" for s in range(DEPTH))
    lines += ["", f"| mistake | {heads} | tokens per pass |", "|---" * (DEPTH + 2) + "|"]
    for trap, tallies in by_trap.items():
        means = [sum(t.cumulative(s) for t in tallies.values()) / len(tallies) for s in range(DEPTH)]
        speed = sum(t.tokens_per_pass for t in tallies.values()) / len(tallies)
        lines.append(f"| {trap} | {' | '.join(f'{mean:.3f}' for mean in means)} | {speed:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_EXPORT)
    parser.add_argument("--output", type=Path, help="write the Markdown tables here and the counts as .json")
    parser.add_argument("--show", action="store_true", help="print two continuations of each class")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts: dict[str, list[str]] = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    continuations = {name: continue_prompts(model, tokenizer, texts) for name, texts in prompts.items()}
    if arguments.show:
        for name, items in continuations.items():
            for c in items[:2] + items[-1:]:
                text = [
                    tokenizer.decode(part.tolist(), skip_special_tokens=False)
                    for part in c.tokens.split([c.prompt_length, len(c.tokens) - c.prompt_length])
                ]
                print(f"--- {name}\n{text[0]}>>>{text[1]}")
    by_trap: dict[str, dict[str, Tally]] = {trap: {} for trap in TRAPS}
    for name, items in continuations.items():
        for trap, tally in zip(TRAPS, measure(model, items, list(TRAPS.values())), strict=True):
            by_trap[trap][name] = tally
    by_class = dict(by_trap["none"])
    total = Tally()
    for tally in by_class.values():
        total = total.plus(tally)
    by_class["all"] = total
    tables = markdown(by_class, by_trap)
    print(tables)
    if arguments.output:
        arguments.output.write_text(tables, encoding="utf-8")
        settings = {"prompts": sum(map(len, prompts.values())), "new_tokens": NEW_TOKENS, "depth": DEPTH}
        counts = {
            "settings": settings,
            "classes": {name: dataclasses.asdict(tally) for name, tally in by_class.items()},
            "mistakes": {
                trap: {name: dataclasses.asdict(tally) for name, tally in tallies.items()}
                for trap, tallies in by_trap.items()
            },
        }
        arguments.output.with_suffix(".json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
