"""Train a head for the embedded model: ``python -m tools.train_heads.train eagle3 --budget-minutes 45``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.train_demo.prepare import DEFAULT_DATA, DEFAULT_EXPORT
from tools.train_demo.train import learning_rate_factor
from tools.train_heads.eagle import Eagle
from tools.train_heads.text import Text

KINDS = {"eagle3": Eagle}
REFILL_EVERY = 120  # steps between two lots of generated text
MATRIX_LR, OTHER_LR, CLIP = 3e-3, 2e-3, 1.0


def export(head: Eagle, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` in bfloat16."""
    config, tensors = head.export()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--budget-minutes", type=float, default=45.0)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--model", type=Path, default=DEFAULT_EXPORT)
    parser.add_argument("--export", type=Path, help="folder of the exported head; default: in the model's")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kind = KINDS[arguments.kind]
    text = Text(arguments.model, arguments.data, kind.boundaries, compile_layers=not arguments.no_compile)
    embedding = text.model.model.embed_tokens.weight.detach()
    head = kind(embedding, 1.0 + text.model.model.norm.weight.detach())
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    others = [weight for weight in head.parameters() if weight.ndim == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    started, budget, step, exported = time.monotonic(), 60 * arguments.budget_minutes, 0, 0.0
    folder = arguments.export or arguments.model / kind.kind
    while (spent := time.monotonic() - started) < budget:
        if step % REFILL_EVERY == REFILL_EVERY // 2:
            text.refill()
        factor = learning_rate_factor(spent / budget, 0.02)
        for optimizer, peak in zip(optimizers, (MATRIX_LR, OTHER_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        tally: list[float] = []
        loss = head.loss(text.old() if step % 2 else text.new(), tally)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 20 == 0 or step <= 3:
            shown = " ".join(f"{share:.3f}" for share in tally)
            print(f"{spent:6.0f} s step {step} loss {loss.item():.3f} right {shown}", flush=True)
        if spent - exported > 300:
            export(head, folder)
            exported = spent
    export(head, folder)
    print(f"{step} steps; exported to {folder}")


if __name__ == "__main__":
    main()
