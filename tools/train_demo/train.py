"""Train the demonstration model: ``python -m tools.train_demo.train --budget-minutes 80``; see README.md.

Phase "joint" trains trunk and MTP head together; phase "head" freezes the trunk and distils it into the MTP head.
Both are steered by a wall-clock budget, resumable, and write metrics.jsonl, loss.png and an export.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tools.train_demo import losses
from tools.train_demo.data import WindowSampler
from tools.train_demo.decode import generate
from tools.train_demo.export import export_model
from tools.train_demo.losses import soft_cross_entropy
from tools.train_demo.model import AttentionLayer, DemoModel, LinearLayer, ModelConfig
from tools.train_demo.plot import plot_losses
from tools.train_demo.prepare import DEFAULT_EXPORT, DEFAULT_WORK, load_sampler, load_tokenizer


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One phase of training. Learning rates are peaks."""

    phase: str = "joint"  # or "head"
    budget_s: float = 4800.0
    sequence_length: int = 512
    batch_size: int = 12
    depth: int = 2  # chained steps of the MTP head that are trained
    depth_weights: tuple[float, ...] = (0.3, 0.12, 0.08)
    label_share: float = 0.5  # share of labels in the MTP target; the rest is the trunk's distribution
    matrix_lr: float = 5e-3  # Muon, scaled to AdamW's update size
    other_lr: float = 3e-3  # AdamW
    weight_decay: float = 0.05
    warmup_share: float = 0.02
    clip: float = 1.0


def make_optimizers(model: DemoModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest; only for parameters that require gradients."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim == 2 and min(parameter.shape) >= 64 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return [muon, adamw]


def learning_rate_factor(progress: float, warmup_share: float) -> float:
    """Linear warm-up, then a cosine to zero, over the share of the time budget used."""
    if progress < warmup_share:
        return max(progress / warmup_share, 0.02)
    rest = (progress - warmup_share) / (1 - warmup_share)
    return 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


def joint_loss(model: DemoModel, tokens: Tensor, config: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """Main cross entropy plus the weighted MTP losses; ``tokens [B, T + depth + 1]``.

    MTP step s of row j predicts x_{j+s+2}; its teacher is the trunk at position j + s + 1. Gradients of the MTP loss
    reach the trunk through h, the embedding and the output matrix, but not through the teacher.
    Chained steps are trained on a third of the sequences to save time.
    """
    weight, dtype, length = model.model.embed_tokens.weight, model.compute_dtype, config.sequence_length
    hidden, _ = model.hidden_states(tokens[:, :length])
    ones = torch.ones(tokens.shape[0], length, device=tokens.device)
    loss = soft_cross_entropy(hidden, weight, tokens[:, 1 : length + 1], ones, dtype)
    metrics = {"main": loss.item()}
    rows = max(1, tokens.shape[0] // 3)
    first = model.draft_states(hidden, tokens, 1)
    chained = model.draft_states(hidden[:rows], tokens[:rows], config.depth)[1:] if config.depth > 1 else []
    for s, out in enumerate([*first, *chained]):
        count = out.shape[0]
        row_weight = ones[:count].clone()
        row_weight[:, length - s - 1 :] = 0  # the teacher's hidden lies past the window
        labels = tokens[:count, s + 2 : s + 2 + length]
        teacher = hidden[:count].detach().roll(-(s + 1), 1)
        step_loss = soft_cross_entropy(out, weight, labels, row_weight, dtype, teacher, config.label_share)
        metrics[f"mtp{s}"] = step_loss.item()
        loss = loss + config.depth_weights[s] * step_loss
    return loss, metrics


def head_loss(model: DemoModel, tokens: Tensor, config: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """The MTP losses alone against the frozen trunk's distribution; all rows, all depths."""
    weight, dtype, length = model.model.embed_tokens.weight.detach(), model.compute_dtype, config.sequence_length
    with torch.no_grad():
        hidden, _ = model.hidden_states(tokens[:, :length])
    loss = torch.zeros((), device=tokens.device)
    metrics = {}
    for s, out in enumerate(model.draft_states(hidden, tokens, config.depth)):
        row_weight = torch.ones(tokens.shape[0], length, device=tokens.device)
        row_weight[:, length - s - 1 :] = 0
        labels = tokens[:, s + 2 : s + 2 + length]
        teacher = hidden.roll(-(s + 1), 1)
        step_loss = soft_cross_entropy(out, weight, labels, row_weight, dtype, teacher, config.label_share)
        metrics[f"mtp{s}"] = step_loss.item()
        loss = loss + config.depth_weights[s] / config.depth_weights[0] * step_loss
    return loss, metrics


@torch.no_grad()
def evaluate(model: DemoModel, sampler: WindowSampler, config: TrainConfig, batches: int = 3) -> dict[str, float]:
    """Mean label losses on held-out windows, the same ones every time."""
    rng = np.random.default_rng(5)
    plain = dataclasses.replace(config, label_share=1.0, depth=2)
    totals: dict[str, float] = {}
    for _ in range(batches):
        tokens = torch.from_numpy(sampler.draw(config.batch_size, rng))
        tokens = tokens.to(model.model.embed_tokens.weight.device)
        for name, value in joint_loss(model, tokens, plain)[1].items():
            totals[f"held_out_{name}"] = totals.get(f"held_out_{name}", 0.0) + value / batches
    return totals


class GeneratedText:
    """A pool of sequences that the trunk continues from training openings, refilled one batch at a time."""

    def __init__(self, model: DemoModel, sampler: WindowSampler, config: TrainConfig) -> None:
        self._model, self._sampler, self._config = model, sampler, config
        self._width = config.sequence_length + config.depth + 2
        self._pool = np.zeros((0, self._width), dtype=np.int64)

    @property
    def is_empty(self) -> bool:  # true after a resume: the pool is not in the checkpoint
        return len(self._pool) == 0

    def refill(self, batch: int, rng: np.random.Generator) -> None:
        """Half of the batch greedy, half sampled at temperature 0.8. Openings have 16 to 96 tokens."""
        opening = int(rng.integers(16, 97))
        device = self._model.model.embed_tokens.weight.device
        prompts = torch.from_numpy(self._sampler.draw_openings(batch, opening, rng)).to(device)
        temperature = torch.where(torch.arange(batch, device=device) % 2 == 0, 0.0, 0.8)
        with torch.compiler.set_stance("force_eager"):  # every step has a new shape and would recompile
            tokens = generate(self._model, prompts, self._width - opening, temperature, seed=int(rng.integers(2**31)))
        self._pool = np.concatenate([self._pool, tokens.cpu().numpy()])

    def draw(self, batch: int, rng: np.random.Generator) -> np.ndarray:
        return self._pool[rng.integers(len(self._pool), size=batch)]


class Run:
    """The state a resumed run needs: model, optimisers, counters, the random generator."""

    def __init__(self, model: DemoModel, config: TrainConfig, work_dir: Path) -> None:
        self.model, self.config, self.work_dir = model, config, work_dir
        self.optimizers = make_optimizers(model, config)
        self.rng = np.random.default_rng(0)
        self.step, self.tokens, self.consumed_s = 0, 0, 0.0

    @property
    def checkpoint_path(self) -> Path:
        return self.work_dir / f"{self.config.phase}.pt"

    def save(self) -> None:
        """Write the checkpoint to a temporary name and rename it, so that a kill leaves the old one intact."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.bit_generator.state,
            "counters": (self.step, self.tokens, self.consumed_s),
        }
        part = self.checkpoint_path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint_path)

    def restore(self) -> bool:
        if not self.checkpoint_path.exists():
            return False
        state = torch.load(self.checkpoint_path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = state["rng"]
        self.step, self.tokens, self.consumed_s = state["counters"]
        return True

    def log(self, **values: Any) -> None:
        record = {"phase": self.config.phase, "step": self.step, "tokens": self.tokens, "consumed_s": self.consumed_s}
        with (self.work_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | values) + "\n")


def train(run: Run, export_dir: Path | None, save_every_s: float, export_every_s: float) -> None:
    """Train until the budget is used up."""
    config, model = run.config, run.model
    device = model.model.embed_tokens.weight.device
    width = config.sequence_length + config.depth + 2
    sampler = load_sampler(run.work_dir, "train", width)
    held_out = load_sampler(run.work_dir, "held_out", width)
    tokenizer = load_tokenizer(run.work_dir)
    generated = GeneratedText(model, sampler, config) if config.phase == "head" else None
    last_save = run.consumed_s
    last_export = run.consumed_s - export_every_s / 2  # the first export comes early
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(config.phase, total=config.budget_s, completed=run.consumed_s, shown="")
        while run.consumed_s < config.budget_s:
            started = time.perf_counter()
            if generated is not None and (run.step % 60 == 0 or generated.is_empty):
                generated.refill(64, run.rng)
            if generated is not None and run.step % 5 >= 2:  # three steps in five
                batch = generated.draw(config.batch_size, run.rng)
            else:
                batch = sampler.draw(config.batch_size, run.rng)
            tokens = torch.from_numpy(batch).to(device)
            factor = learning_rate_factor(run.consumed_s / config.budget_s, config.warmup_share)
            for optimizer, peak in zip(run.optimizers, (config.matrix_lr, config.other_lr), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
            compute = head_loss if config.phase == "head" else joint_loss
            loss, metrics = compute(model, tokens, config)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], config.clip)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.step += 1
            run.tokens += batch.shape[0] * config.sequence_length
            elapsed_s = time.perf_counter() - started
            # exclude compilation: a step costs at most 20 s of the schedule
            run.consumed_s += min(elapsed_s, 20.0)

            shown = " ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            progress.update(task, completed=run.consumed_s, shown=shown)
            speed = batch.shape[0] * config.sequence_length / elapsed_s
            if run.step % 10 == 0:
                run.log(**metrics, norm=norm.item(), lr_factor=factor, tokens_per_s=speed)
            if run.step % 50 == 0 or run.step <= 3:
                clock = time.strftime("%H:%M:%S")
                progress.console.print(
                    f"{clock} step {run.step} {run.consumed_s:.0f}s {shown} norm {norm:.2f} {speed:.0f} tokens/s",
                    soft_wrap=True,
                )
            if run.step % 200 == 0:
                scores = evaluate(model, held_out, config)
                run.log(**scores)
                progress.console.print(" ".join(f"{k} {v:.3f}" for k, v in scores.items()), soft_wrap=True)
                plot_losses(run.work_dir / "metrics.jsonl", run.work_dir / "loss.png")
            if run.consumed_s - last_save >= save_every_s:
                run.save()
                last_save = run.consumed_s
            if export_dir is not None and run.consumed_s - last_export >= export_every_s:
                export_model(model, tokenizer, export_dir)
                last_export = run.consumed_s
                progress.console.print(f"exported at step {run.step}")
    run.save()
    scores = evaluate(model, held_out, config, batches=8)
    run.log(final=True, eval_windows=8 * config.batch_size, **scores)
    print(" ".join(f"{k} {v:.4f}" for k, v in scores.items()), f"tokens {run.tokens} steps {run.step}")
    plot_losses(run.work_dir / "metrics.jsonl", run.work_dir / "loss.png")
    if export_dir is not None:
        export_model(model, tokenizer, export_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="token cache, checkpoints and metrics")
    parser.add_argument("--export", type=Path, default=DEFAULT_EXPORT, help="folder of the exported model")
    parser.add_argument("--no-export", action="store_true")
    parser.add_argument("--phase", choices=("joint", "head"), default="joint")
    parser.add_argument("--budget-minutes", type=float, default=80.0)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--save-every-s", type=float, default=300.0)
    parser.add_argument("--export-every-s", type=float, default=1200.0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--no-compile", action="store_true", help="run the layers uncompiled (no C++ compiler needed)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    config = TrainConfig(phase=arguments.phase, budget_s=60 * arguments.budget_minutes, batch_size=arguments.batch_size)
    vocab_size = load_tokenizer(arguments.work).get_vocab_size()
    model = DemoModel(ModelConfig(vocab_size=vocab_size)).to(device)
    if config.phase == "head":
        config = dataclasses.replace(
            config, depth=3, depth_weights=(1.0, 0.7, 0.5), label_share=0.0, matrix_lr=2e-3, other_lr=1e-3
        )
        model.load_state_dict(torch.load(arguments.work / "joint.pt", weights_only=False)["model"])
        model.model.requires_grad_(False)
    if not arguments.no_compile:
        LinearLayer.forward = torch.compile(LinearLayer.forward)  # type: ignore[method-assign]
        AttentionLayer.forward = torch.compile(AttentionLayer.forward)  # type: ignore[method-assign]
        losses.row_gradient = torch.compile(losses.row_gradient)
        losses.label_gradient = torch.compile(losses.label_gradient)
    run = Run(model, config, arguments.work)
    print("resumed" if run.restore() else "fresh", f"{run.consumed_s:.0f}s used, {run.step} steps", flush=True)
    train(run, None if arguments.no_export else arguments.export, arguments.save_every_s, arguments.export_every_s)


if __name__ == "__main__":
    main()
