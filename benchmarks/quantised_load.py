"""Peak resident memory and time of loading a quantised checkpoint, against the size of the decoded weights.

    python -m benchmarks.quantised_load [--format fp8|nvfp4] [--layers N] [--folder DIR] [--json FILE]

A dense Qwen3.5 of about 1 GB with random codes is written to a temporary folder unless ``--folder`` names one. Each
measurement runs in a fresh process: "weights" checks and decodes every weight and keeps them all, "load" is
``load_target`` with everything that it builds. The peak is ``VmHWM`` less the resident set before the checkpoint is
opened (interpreter, torch, kernels). Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import machine, resident_bytes, save

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "mtp_num_hidden_layers": 1,
}
LAYERS = {"fp8": 18, "nvfp4": 32}  # about 1 GB each
TOLD = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
LEFT = ("embed_tokens.weight", "in_proj_a.weight", "in_proj_b.weight", "mtp.fc.weight", "conv1d.weight")


def write(folder: Path, kind: str, layers: int) -> None:
    """Random codes in the layout of the releases: norms, embedding and small projections stay in bfloat16."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from specdec.checkpoints import write_checkpoint
    from specdec.models.weights import dry_run
    from specdec.registry import registry

    config = {**CONFIG, "num_hidden_layers": layers}
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    family = registry().model("qwen3_5_text")
    for name, spec in dry_run(family, family.parse(config)).tensors.items():
        original = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        if len(spec.shape) == 2 and not name.endswith(LEFT):
            module = original.removesuffix("weight")
            stored |= {module + part: tensor for part, tensor in _codes(kind, spec.shape, generator).items()}
        else:
            values = torch.empty(spec.shape).normal_(0.0, 0.02, generator=generator)
            stored[original] = values.to(torch.bfloat16)
    write_checkpoint(folder, {**config, "quantization_config": TOLD[kind]}, stored, shards=4)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))


def _codes(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    n, k = shape
    if kind == "fp8":
        codes = torch.randint(0, 127, (n, k), dtype=torch.uint8, generator=generator)  # 127 is NaN
        codes |= torch.randint(0, 2, (n, k), dtype=torch.uint8, generator=generator) << 7
        scale = torch.full((math.ceil(n / 128), math.ceil(k / 128)), 1e-4)
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale}
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(40, 80, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(1e-3)}


def measure(folder: Path, what: str) -> dict[str, Any]:
    """Load in this process, which must be fresh, and say what it took."""
    from specdec.backends.cpu.compiler import load_kernels
    from specdec.checkpoints import Checkpoint, StoredWeights, check_weights
    from specdec.checkpoints.quantised import formats_of
    from specdec.config import RunConfig, TargetConfig
    from specdec.models.loading import load_target
    from specdec.models.weights import dry_run
    from specdec.registry import registry

    family = registry().model("qwen3_5_text")
    load_kernels()
    torch.ones(256, 256) @ torch.ones(256, 256)  # the libraries' own buffers and threads
    config = RunConfig(target=TargetConfig(model=str(folder), dtype="bfloat16"))
    before, started = resident_bytes(), perf_counter()
    if what == "weights":
        checkpoint = Checkpoint.open(folder)
        expected = dry_run(family, family.parse(checkpoint.config), StoredWeights(checkpoint))
        check_weights(checkpoint, expected.tensors).raise_for_errors()
        checked = perf_counter() - started
        weights = StoredWeights(checkpoint)
        kept: Any = [weights[name] for name in weights]
    else:
        checked = None
        kept = load_target(config)
        checkpoint = Checkpoint.open(folder)
    took, peak = perf_counter() - started, _peak()
    formats = formats_of(checkpoint).values()
    decoded = sum(math.prod(found.shape) * 2 if found.quantised else found.stored_bytes for found in formats)
    return {
        "what": what,
        "formats": sorted({found.format for found in formats}),
        "stored_bytes": checkpoint.size_bytes,
        "decoded_bytes": decoded,
        "baseline_bytes": before,
        "peak_bytes": peak,
        "loading_bytes": peak - before,
        "loading_over_decoded": (peak - before) / decoded,
        "seconds": took,
        "weight_check_seconds": checked,
        "kept": type(kept).__name__,
    }


def _peak() -> int:
    """The largest resident set so far, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=sorted(LAYERS), default="fp8")
    parser.add_argument("--layers", type=int, help="decoder layers; more make a larger checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint, or one that is there already")
    parser.add_argument("--json", type=Path, help="write the record there too")
    parser.add_argument("--measure", choices=("weights", "load"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.folder, given.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "checkpoint"
        if not (folder / "config.json").exists():
            write(folder, given.format, given.layers or LAYERS[given.format])
        found = []
        for what in ("weights", "load"):
            command = [sys.executable, "-m", "benchmarks.quantised_load", "--folder", str(folder), "--measure", what]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        save({**machine(), "format": given.format, "measured": found}, given.json)


if __name__ == "__main__":
    main()
