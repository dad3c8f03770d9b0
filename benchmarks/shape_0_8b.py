"""The 0.8B shape with random weights in BF16: decode against stream-read bandwidth, rows, memory.

    python -m benchmarks.shape_0_8b [--context 256] [--repeats 15] [--folder DIR] [--json FILE]

The checkpoint (1.5 GB, Hugging Face layout) is written to a temporary folder unless ``--folder`` names one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import machine, median, resident_bytes, save, seconds, stream_bandwidth

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024,
    "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144, "tie_word_embeddings": True, "hidden_act": "silu",
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16)


def write_checkpoint(folder: Path) -> None:
    """Random BF16 weights of the published shape, with a byte-level tokenizer of the same vocabulary size or less."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from specdec.checkpoints import text_config
    from specdec.models.qwen3_5 import Qwen35Config, tensors

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, spec in tensors(Qwen35Config.parse(text_config(CONFIG))).items():
        if spec.optional:
            continue
        scale = 0.02 if len(spec.shape) > 1 else 0.1
        values = torch.empty(spec.shape, dtype=torch.bfloat16).normal_(0.0, scale, generator=generator)
        weights[name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"] = values
    save_file(weights, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def measure(folder: Path, context: int, repeats: int) -> dict[str, Any]:
    """Times of passes by row count, interleaved, as shares of the bandwidth measured in this process."""
    import specdec

    before = resident_bytes()
    lm = specdec.load(str(folder), dtype="bfloat16")
    target, state = lm.target, lm.target.new_state(context + 64)
    tokens = [(37 * i) % 200 for i in range(context)]
    prefill = seconds(lambda: target.prefill(state, tokens))
    weight_bytes = (folder / "model.safetensors").stat().st_size
    resident = resident_bytes()
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    bandwidths = []

    def step(rows: int) -> None:
        target.decode(state, tokens[:rows]).need_logits().argmax()

    step(1)
    for _ in range(repeats):
        bandwidths.append(stream_bandwidth(1.0, repeats=2))
        for rows in (*ROWS, *reversed(ROWS)):
            times[rows].append(seconds(lambda rows=rows: step(rows)))
    decode_bytes = sum(
        tensor.nbytes for tensor in _main_weights(target) if tensor.dtype == torch.bfloat16
    )
    plain = min(times[1])
    best = max(bandwidths)
    return {
        "weight_bytes": weight_bytes,
        "bytes_read_per_token": decode_bytes,
        "stream_bandwidth": best,
        "decode_bandwidth": decode_bytes / plain,
        "decode_share_of_bandwidth": decode_bytes / plain / best,
        "milliseconds": {rows: min(values) * 1e3 for rows, values in times.items()},
        "median_milliseconds": {rows: median(values) * 1e3 for rows, values in times.items()},
        "ratio_to_one_row": {rows: min(values) / plain for rows, values in times.items()},
        "resident_before_load": before,
        "resident_after_load_and_prefill": resident,
        "resident_share_of_weights": resident / weight_bytes,
        "loaded_share_of_weights": (resident - before) / weight_bytes,
        "prefill_tokens_per_second": context / prefill,
        "parity": lm.info.parity.value,
        "kernels": lm.info.kernels,
    }


def _main_weights(target: Any) -> list[torch.Tensor]:
    """The tensors that a decode step reads: every layer, and the head (tied: the embedding matrix, once)."""
    import attrs

    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value
        elif attrs.has(type(value)):
            for field in attrs.fields(type(value)):
                if field.name not in ("mtp", "mtp_lm_head"):
                    visit(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    visit(target.model)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "model.safetensors").exists():
            write_checkpoint(folder)
        save({"machine": machine(), **measure(folder, options.context, options.repeats)}, options.json)


if __name__ == "__main__":
    main()
