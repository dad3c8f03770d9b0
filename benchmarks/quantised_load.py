"""Measure peak resident memory and time of loading a quantised checkpoint, relative to the decoded weights' size.

    python -m benchmarks.quantised_load [--format fp8|nvfp4] [--layers N] [--folder DIR] [--json FILE]

A dense Qwen3.5 of about 1 GB with random codes is written to a temporary folder unless ``--folder`` names one. Each
measurement runs in a fresh process: "weights" checks, decodes and keeps every weight; "load" runs ``load_target``. The
peak is ``VmHWM`` minus the resident set before opening the checkpoint (interpreter, torch, kernels). Prints bytes,
their ratio and seconds. Linux only.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import arguments, bfloat16, qwen3_5_config, random_checkpoint, resident_bytes, save

SHAPE = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32768, "max_position_embeddings": 4096}
LAYERS = {"fp8": 18, "nvfp4": 32}  # about 1 GB each
QUANTISATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
LEFT = ("embed_tokens.weight", "in_proj_a.weight", "in_proj_b.weight", "mtp.fc.weight", "conv1d.weight")


def stored(kind: str, name: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random codes in the layout of the releases; norms, embedding and small projections stay in bfloat16."""
    if len(shape) != 2 or name.endswith(LEFT):
        return bfloat16(name, shape, generator)
    n, k = shape
    module = name.removesuffix("weight")
    if kind == "fp8":
        codes = torch.randint(0, 127, (n, k), dtype=torch.uint8, generator=generator)  # 127 is NaN
        codes |= torch.randint(0, 2, (n, k), dtype=torch.uint8, generator=generator) << 7
        scale = torch.full((math.ceil(n / 128), math.ceil(k / 128)), 1e-4)
        return {name: codes.view(torch.float8_e4m3fn), f"{module}weight_scale_inv": scale}
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(40, 80, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    return {name: codes, f"{module}weight_scale": scale, f"{module}weight_scale_2": torch.tensor(1e-3)}


def measure(folder: Path, what: str) -> dict[str, Any]:
    """Load in this process, which must be fresh, and report the cost."""
    from specdec.backends.cpu.library import load_kernels
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
    took, peak = perf_counter() - started, resident_bytes("VmHWM")
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


def main() -> None:
    given = arguments(__doc__, format=tuple(LAYERS), layers=0, folder=None, measure="")
    if given.measure:  # the fresh process
        print(json.dumps(measure(given.folder, given.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "checkpoint"
        if not (folder / "config.json").exists():
            config = qwen3_5_config(**SHAPE, num_hidden_layers=given.layers or LAYERS[given.format])
            make = functools.partial(stored, given.format)
            random_checkpoint(folder, config, make, quantisation=QUANTISATION[given.format], shards=4)
        found = []
        for what in ("weights", "load"):
            command = [sys.executable, "-m", "benchmarks.quantised_load", "--folder", str(folder), "--measure", what]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        save({"format": given.format, "measured": found}, given)


if __name__ == "__main__":
    main()
