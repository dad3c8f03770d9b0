"""Write the model card from measurements: ``python -m tools.train_demo.card``."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tools.train_demo.data import HELD_OUT_SHARE, HELD_OUT_SHARE_OF_ARTICLES, MIXTURE
from tools.train_demo.export import load_model
from tools.train_demo.prepare import DEFAULT_EXPORT, DEFAULT_WORK

SOURCES = {
    "wiki": ("WikiText-2 validation and test text, continued as prose", "CC BY-SA"),
    "about": ("the same articles as answers to \u201cTell me about X.\u201d", "CC BY-SA"),
    "topics": ("help texts of the Python standard library", "PSF-2.0"),
    "gsm8k": ("GSM8K training problems with worked answers, most inside `<think>`", "MIT"),
    "stdlib": ("source of the Python standard library", "PSF-2.0"),
    "function": ("its documented functions as answers to \u201cWrite a Python function \u2026\u201d", "PSF-2.0"),
    "arithmetic": ("generated sums", "none needed"),
}

CARD = """---
license: other
license_name: mixed-text-licences
language: en
library_name: transformers
pipeline_tag: text-generation
---
# specdec demonstration model

A language model of {parameters:.2f} million parameters in the Qwen3.5 text architecture **with its MTP head** (one
gated attention layer that drafts the token after next, and those after that when fed its own output). It exists
so that speculative decoding with a recurrent target can be tried and tested on any machine, without a download.

**It writes locally plausible text, not sense.** Nothing in its answers can be relied on: no fact, no
sum, no code. It is for exercising software and for nothing else.

## Shape

{layers} layers, every {interval}th one gated full attention and the others gated delta nets; hidden size {hidden}, MLP
{intermediate}, {heads} query and {kv_heads} key-value heads of {head_dim}; {vocab} byte-level BPE tokens, digits
singly; tied embeddings; BF16. All RMS norms except `linear_attn.norm` store the distance from 1, the MTP head's too.
ChatML-like turns; `enable_thinking` in the chat template opens `<think>` (true) or an empty thought (false).

## Text and licences

| source | training documents | training tokens | share of training | licence |
|---|---|---|---|---|
{data_rows}

{held_out:.0%} of the documents of each source ({held_out_articles:.0%} of the articles) were set aside before the
tokenizer and the model were trained; the split is by article, problem, file or sum. The weights were trained on CC
BY-SA text (WikiText-2, from Wikipedia), MIT text (GSM8K, Copyright OpenAI) and PSF-licensed text (Python standard
library, Copyright Python Software Foundation). Each licence is stated here for whoever has to judge what it means for
weights; where the model repeats training text, that text's licence applies.

## Training

| phase | steps | tokens | minutes | trained on |
|---|---|---|---|---|
{phase_rows}

Windows of 512 tokens, 8 to a step; Muon for matrices, AdamW for the rest; warm-up and a cosine to zero over the time
used; BF16 products, float32 weights, norms and recurrence. The minutes are wall clock on a CPU with {cores} cores
(AVX512-BF16) that other programs used as well.

*joint*: cross entropy of the trunk, plus 0.3 of the MTP head's loss at its first position, plus 0.12 at its second
(chained, on a quarter of the windows). The MTP target is half the true token, half the trunk's own distribution. MTP
gradients flow into the trunk (through h, the embedding and the output matrix), but not through the target.

*head*: trunk frozen; the MTP head learns the trunk's distribution at three chained positions, on training text and on
text that the trunk itself continued from training openings, half greedy and half sampled at temperature 0.8.

{note}Loss in nats per token. Held out: {eval_windows} windows of 512 tokens drawn in the training proportions, with
true tokens as the only target (position 1: a quarter of the windows).

| | main | MTP position 0 | MTP position 1 |
|---|---|---|---|
{loss_rows}

The head phase aims at the trunk's distribution, not at the true tokens, so its last row need not fall.

![loss](loss.png)

## Acceptance

Greedy, float32, {prompts} held-out prompts, up to {new_tokens} new tokens each (to the first end token). Every
position of the trunk's answer is once the start of a draft of {depth}. *offered*: the answer is long enough; *reached*:
everything drafted before was right; *conditional*: accepted / reached; *cumulative*: accepted / offered. *Tokens per
pass*: tokens gained per pass of the trunk, drafting {depth} each time.

{acceptance}
The second table runs the same weights with one mistake at a time (means of the four classes, cumulative). Chaining
begins after position 0, so a mistake in the chained hidden cannot show there. Reading a hidden before its norm loses
only the norm's gain per channel. Those gains spread by {norm_spread:.0%} (`norm`) and {mtp_norm_spread:.0%}
(`mtp.norm`) of their mean, so how much the two mistakes show depends on this spread; where the table shows no
difference, a test has to compare logits.

## Reproduce

`tools/train_demo/README.md` in the repository: `prepare`, `train --phase joint`, `train --phase head`, `acceptance`,
`card`. The schedule follows the clock, so another machine gives other numbers.
"""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def loss_row(title: str, record: dict[str, float], prefix: str) -> str:
    cells = (f"{record[prefix + k]:.3f}" if prefix + k in record else "" for k in ("main", "mtp0", "mtp1"))
    return f"| {title} | {' | '.join(cells)} |"


def gain_spread(weight: Tensor) -> float:
    """Standard deviation over mean of an offset norm's gains."""
    gain = 1 + weight.detach()
    return float(gain.std() / gain.mean())


def write_card(export_dir: Path, work_dir: Path, acceptance: Path, note: str) -> None:
    """README.md of the export, from its weights, the run's metrics, the token cache and the acceptance tables."""
    records = read_metrics(work_dir / "metrics.jsonl")
    finals = {record["phase"]: record for record in records if record.get("final")}
    subjects = {"joint": "everything", "head": "MTP head only"}
    phase_rows = [
        f"| {phase} | {r['step']} | {r['tokens']:,} | {r['consumed_s'] / 60:.0f} | {subjects[phase]} |"
        for phase, r in finals.items()
    ]
    recent = [record for record in records if record["phase"] == "joint" and "main" in record][-20:]
    means = {key: float(np.mean([record[key] for record in recent])) for key in ("main", "mtp0", "mtp1")}
    loss_rows = [loss_row("joint, training, mean of the last 200 steps (mixed MTP target)", means, "")]
    loss_rows += [loss_row(f"held out after {phase}", record, "held_out_") for phase, record in finals.items()]
    with np.load(work_dir / "train.npz") as arrays:
        data_rows = [
            f"| {SOURCES[name][0]} | {len(arrays[f'starts_{name}']):,} | {len(arrays[f'tokens_{name}']):,} "
            f"| {share:.0%} | {SOURCES[name][1]} |"
            for name, share in MIXTURE.items()
        ]
    measured = json.loads(acceptance.with_suffix(".json").read_text(encoding="utf-8"))
    model = load_model(export_dir)
    c = model.config
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        layers=c.num_hidden_layers,
        interval=c.full_attention_interval,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab=c.vocab_size,
        data_rows="\n".join(data_rows),
        held_out=HELD_OUT_SHARE,
        held_out_articles=HELD_OUT_SHARE_OF_ARTICLES,
        phase_rows="\n".join(phase_rows),
        cores=os.cpu_count(),
        eval_windows=next(iter(finals.values())).get("eval_windows", 64),
        note=textwrap.fill(note, 120) + "\n\n" if note else "",
        loss_rows="\n".join(loss_rows),
        prompts=measured["settings"]["prompts"],
        new_tokens=measured["settings"]["new_tokens"],
        depth=measured["settings"]["depth"],
        norm_spread=gain_spread(model.model.norm.weight),
        mtp_norm_spread=gain_spread(model.mtp.norm.weight),
        acceptance=acceptance.read_text(encoding="utf-8"),
    )
    (export_dir / "README.md").write_text(card, encoding="utf-8")
    plot = work_dir / "loss.png"
    if plot.exists():
        (export_dir / "loss.png").write_bytes(plot.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_EXPORT)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    parser.add_argument("--acceptance", type=Path, help="tables by acceptance.py; default: acceptance.md in --work")
    parser.add_argument("--note", default="", help="a remark about this run's training")
    arguments = parser.parse_args()
    tables = arguments.acceptance or arguments.work / "acceptance.md"
    write_card(arguments.model, arguments.work, tables, arguments.note)


if __name__ == "__main__":
    main()
