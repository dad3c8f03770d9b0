"""Train an EAGLE-3 head for a model on the model's own answers, and write it as a folder that specdec loads.

Run it with ``python examples/train_eagle3_head.py MODEL PROMPTS OUT --minutes 120``: a checkpoint, a file of prompts,
and a folder. Answers and the head are kept there, and a second run goes on from them.

The head is one decoder layer over three layer boundaries of the model, with a pruned vocabulary and an output matrix
of its own, which starts as the model's. It learns the model's distribution at chained steps, each of which reads the
head's own output (Li et al. 2025, "EAGLE-3", arXiv:2503.01840, section 3).
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import specdec
from specdec.contract import Needs
from specdec.measuring.prompts import Prompt, choose_prompts, load_prompts, own_prompts

STEPS, DECAY, TOP = 3, 0.8, 12  # chained steps, weight of each after the one before, probabilities kept per position
LONGEST, TEXTS = 448, 10  # tokens of a text, texts of a batch
INTERMEDIATE, THETA, EPS = 1536, 1e4, 1e-6


def answer(lm: specdec.LanguageModel, prompts: list[Prompt], new_tokens: int, file: Path) -> list[list[list[int]]]:
    """Prompt and greedy answer of each prompt, as token ids; those in ``file`` are not generated again."""
    pairs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = {tuple(prompt) for prompt, _ in pairs}
    asked = [prompt.encode(lm.tokenizer) for prompt in prompts]
    asked = [tokens for tokens in asked if len(tokens) + new_tokens <= LONGEST and tuple(tokens) not in there]
    with file.open("a", encoding="utf-8") as out:

        def keep(number: int, result: specdec.Result) -> None:
            pairs.append([asked[number], list(result.tokens)])
            out.write(json.dumps(pairs[-1]) + "\n")
            out.flush()
            if len(pairs) % 100 == 0:
                print(f"{len(pairs)} answers", flush=True)

        lm.generate_batch(asked, max_batch=8, on_result=keep, max_new_tokens=new_tokens)
    return pairs


def vocabulary(pairs: list[list[list[int]]], size: int, total: int) -> Tensor:
    """The ``size`` commonest tokens of the answers, ascending; ids that never came fill it up from 0."""
    counts = torch.bincount(torch.tensor([token for _, answer in pairs for token in answer]), minlength=total)
    chosen = counts.argsort(descending=True, stable=True)[:size]
    print(f"{len(chosen)} tokens cover {counts[chosen].sum() / counts.sum():.2%} of the answers", flush=True)
    return chosen.sort().values


def host(lm: specdec.LanguageModel, name: str) -> Tensor:
    """The model's ``embed_tokens`` or ``lm_head``, ``[V, H]`` in bfloat16."""
    shared = lm.target.shared_weights()
    table = getattr(shared, name)
    return torch.as_tensor(table if shared.ops is None else shared.ops.to_host(table)).bfloat16()


def record(
    lm: specdec.LanguageModel, texts: list[list[int]], boundaries: tuple[int, ...], head: Tensor, folder: Path
) -> tuple[dict[str, np.memmap], Tensor, float]:
    """Run the model over all texts.

    Returns: tokens, hidden states and the likeliest tokens of every position, in memory-mapped files; the final norm's
    weight; and the size of the states that enter it.
    """
    hidden, rows, at = lm.info.hidden_size, sum(map(len, texts)), 0
    kept = {
        name: np.memmap(folder / f"{name}.bin", kind, "w+", shape=(rows, *shape))
        for name, kind, shape in (
            ("states", np.uint16, (len(boundaries) * hidden,)),
            ("tokens", np.int32, ()),
            ("ids", np.int32, (TOP,)),
            ("probs", np.float16, (TOP,)),
        )
    }
    for number, tokens in enumerate(texts):
        state = lm.target.new_state(len(tokens), Needs(final_hidden=True, boundaries=boundaries))
        output = lm.target.prefill(state, tokens)
        here = slice(at, at + len(tokens))
        read = np.concatenate([output.boundaries[k].rows() for k in boundaries], 1)
        kept["states"][here] = torch.from_numpy(read).bfloat16().view(torch.uint16).numpy()
        kept["tokens"][here] = tokens
        final = torch.from_numpy(np.array(output.need_hidden().rows())).bfloat16()
        best = (final @ head.T).float().softmax(-1).topk(TOP)
        kept["ids"][here], kept["probs"][here] = best.indices.numpy(), best.values.numpy()
        if number == 0:
            last = torch.from_numpy(read).float()[1:, -hidden:]
            size = last.square().mean(-1, keepdim=True).sqrt()
            norm, scale = (final[1:].float() * size / last).median(0).values, float(size.mean())
        at += len(tokens)
        if number % 200 == 0:
            print(f"states of {number} of {len(texts)} texts", flush=True)
    return kept, norm, scale


def stored(name: str) -> str:
    """The name of a weight in speculators' layout."""
    part = "self_attn." if name[1:] == "_proj" else "mlp." if name.endswith("_proj") else ""
    return f"{'' if name in ('fc', 'lm_head', 'norm') else f'layers.0.{part}'}{name}.weight"


class Head(nn.Module):
    """The head's weights under the names of speculators' layout, and its loss."""

    def __init__(self, heads: int, embedding: Tensor, lm_head: Tensor, norm: Tensor, scale: float, states: int) -> None:
        super().__init__()
        self.embedding, self.heads, hidden = embedding, heads, embedding.shape[1]
        self.group = 3 if heads % 3 == 0 else 1  # query heads of a head of keys and values
        self.kv_heads = heads // self.group
        self.dim = hidden // heads
        fc = torch.zeros(hidden, states)
        fc[:, -hidden:] = torch.eye(hidden) * scale

        def matrix(rows: int, columns: int, size: float = 1.0) -> Tensor:
            return torch.randn(rows, columns) * size / math.sqrt(columns)

        self.weights = nn.ParameterDict()
        for name, value in {
            "fc": fc,
            "lm_head": lm_head.float(),
            "norm": norm,
            "hidden_norm": torch.ones(hidden),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
            "q_proj": matrix(heads * self.dim, 2 * hidden),
            "k_proj": matrix(self.kv_heads * self.dim, 2 * hidden),
            "v_proj": matrix(self.kv_heads * self.dim, 2 * hidden),
            "o_proj": matrix(hidden, heads * self.dim, 0.3),
            "gate_proj": matrix(INTERMEDIATE, hidden),
            "up_proj": matrix(INTERMEDIATE, hidden),
            "down_proj": matrix(hidden, INTERMEDIATE, 0.3),
        }.items():
            self.weights[name] = nn.Parameter(value)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A product in bfloat16, as float32."""
        return F.linear(x.bfloat16(), self.weights[name].bfloat16()).float()

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm in float32."""
        return F.rms_norm(x, x.shape[-1:], self.weights[name], EPS)

    def turned(self, name: str, x: Tensor, first: int) -> Tensor:
        """Projected and rotated heads ``[B, n, T, dim]`` at positions from ``first``."""
        y = self.linear(name, x).view(*x.shape[:2], -1, self.dim).transpose(1, 2)
        angle = (first + torch.arange(x.shape[1]).float())[:, None] * THETA ** -(
            torch.arange(0, self.dim, 2) / self.dim
        )
        left, right = y.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[float]]:
        """Cross entropy to the model's distribution over all steps, and each step's share of right tokens."""
        x, tokens = self.linear("fc", batch["states"]), batch["tokens"]
        count, length = tokens.shape
        rows = torch.arange(length)
        causal, own = rows[:, None] >= rows, rows[:, None] == rows
        keys, values, masks, right = [], [], [], []
        total = torch.zeros(())
        for step in range(STEPS):
            following = F.pad(tokens[:, step + 1 :], (0, step + 1))
            e = self.norm("input_layernorm", self.embedding[following].float())
            pair = torch.cat([e, self.norm("hidden_norm", x)], -1)
            query = self.turned("q_proj", pair, step)
            keys.append(self.turned("k_proj", pair, step).repeat_interleave(self.group, 1))
            value = self.linear("v_proj", pair).view(count, length, -1, self.dim).transpose(1, 2)
            values.append(value.repeat_interleave(self.group, 1))
            masks.append(own if step else causal)
            mixed = F.scaled_dot_product_attention(
                query, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=torch.cat(masks, 1)
            )
            x = x + self.linear("o_proj", mixed.transpose(1, 2).flatten(2))
            y = self.norm("post_attention_layernorm", x)
            x = x + self.linear("down_proj", F.silu(self.linear("gate_proj", y)) * self.linear("up_proj", y))
            learnt = F.pad(batch["probs"][:, step + 1 :, 0], (0, step + 1)).nonzero(as_tuple=True)  # not the padding
            ids = batch["ids"][learnt[0], learnt[1] + step + 1]
            probs = batch["probs"][learnt[0], learnt[1] + step + 1]
            logits = self.linear("lm_head", self.norm("norm", x[learnt]))
            taken = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
            total = total - DECAY**step * (probs / probs.sum(1, keepdim=True) * taken).sum(1).mean()
            right.append(float((logits.detach().argmax(1) == ids[:, 0]).float().mean()))
        return total, right

    def export(self, folder: Path, boundaries: tuple[int, ...], chosen: Tensor, model: str) -> None:
        """Write ``config.json`` and ``model.safetensors`` in speculators' layout."""
        tensors = {stored(name): weight.detach().bfloat16().contiguous() for name, weight in self.weights.items()}
        total, hidden = self.embedding.shape
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": len(chosen),
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(boundaries),
            "transformer_layer_config": {
                "model_type": "llama",
                "vocab_size": total,
                "hidden_size": hidden,
                "intermediate_size": INTERMEDIATE,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.dim,
                "rms_norm_eps": EPS,
                "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            },
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": model, "architectures": ["LlamaForCausalLM"]},
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def batches(data: dict[str, np.memmap], lengths: list[int], seed: int) -> Iterator[dict[str, Tensor]]:
    """All texts once, in random groups of similar length, padded at their ends."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    begins = np.cumsum([0, *lengths])
    for at in range(0, len(order), 16 * TEXTS):
        group = sorted(order[at : at + 16 * TEXTS], key=lambda text: lengths[text])
        groups = [group[i : i + TEXTS] for i in range(0, len(group), TEXTS)]
        for texts in (groups[i] for i in torch.randperm(len(groups)).tolist()):
            longest = max(lengths[text] for text in texts)
            batch = {}
            for name, kept in data.items():
                padded = np.zeros((len(texts), longest, *kept.shape[1:]), kept.dtype)
                for row, text in enumerate(texts):
                    padded[row, : lengths[text]] = kept[begins[text] : begins[text + 1]]
                batch[name] = torch.from_numpy(padded)
            batch["states"] = batch["states"].view(torch.bfloat16)
            batch["tokens"], batch["ids"] = batch["tokens"].long(), batch["ids"].long()
            batch["probs"] = batch["probs"].float()
            yield batch


def train(head: Head, data: dict[str, np.memmap], lengths: list[int], budget: float, save: Callable[[], None]) -> None:
    """Train for ``budget`` seconds of processor time."""
    layer = [w for name, w in head.weights.items() if w.ndim == 2 and name != "lm_head"]
    others = [w for name, w in head.weights.items() if w.ndim == 1]
    optimizers = [
        torch.optim.Muon(layer, lr=2e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([head.weights["lm_head"]], lr=4e-4, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started, step, saved, shown = time.process_time(), 0, 0.0, [0.0] * STEPS
    for epoch in itertools.count():
        for batch in batches(data, lengths, epoch):
            spent = time.process_time() - started
            if spent > budget:
                return
            factor = min(1.0, (step + 1) / 30, max(0.02, 1.25 * (1 - spent / budget)))
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
            loss, right = head.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            shown = [0.9 * old + 0.1 * new for old, new in zip(shown, right, strict=True)]
            if step % 20 == 0 or step <= 3:
                shares = " ".join(f"{share / (1 - 0.9**step):.3f}" for share in shown)
                print(f"{spent:6.0f} s, step {step}, epoch {epoch}, loss {loss.item():.3f}, right {shares}", flush=True)
            if spent - saved > 300:
                save()
                saved = spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("prompts", nargs="?", type=Path, help="as for specdec accept; default: specdec's own")
    parser.add_argument("out", nargs="?", type=Path, help="the head's folder; default: a temporary one")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of the head's vocabulary")
    parser.add_argument("--new-tokens", type=int, default=160, help="tokens of an answer at most")
    parser.add_argument("--minutes", type=float, default=0.05, help="processor time of the training")
    options = parser.parse_args()
    options.out = options.out or Path(tempfile.mkdtemp(prefix="eagle3-"))
    torch.manual_seed(0)
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    lm = specdec.load(options.model, drafter="none")
    layers = lm.info.layers
    boundaries = (layers // 5, layers * 3 // 5, layers)
    classes = (
        load_prompts(options.prompts, chat=True) if options.prompts else choose_prompts(own_prompts(), per_class=4)
    )
    prompts = [prompt for group in classes.values() for prompt in group]
    pairs = answer(lm, prompts, options.new_tokens, work / "answers.jsonl")
    before = options.out / "model.safetensors"
    earlier = load_file(before) if before.exists() else {}
    if earlier:
        chosen = earlier["d2t"] + torch.arange(len(earlier["d2t"]))
    else:
        chosen = vocabulary(pairs, options.vocabulary, lm.info.vocab_size)
    texts = [prompt + answered for prompt, answered in pairs]
    lm_head = host(lm, "lm_head")[chosen]
    data, norm, scale = record(lm, texts, boundaries, lm_head, work)
    head = Head(lm.info.hidden_size // 64, host(lm, "embed_tokens"), lm_head, norm, 1 / scale, data["states"].shape[1])
    if earlier:
        for name, weight in head.weights.items():
            weight.data.copy_(earlier[stored(name)])

    def save() -> None:
        head.export(options.out, boundaries, chosen, Path(options.model).name)

    train(head, data, list(map(len, texts)), 60 * options.minutes, save)
    save()
    print(
        f"{options.out} holds a head for {options.model}: specdec generate {options.model} --drafter eagle3 "
        f"-s drafter.model={options.out}"
    )


if __name__ == "__main__":
    main()
