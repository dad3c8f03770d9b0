"""Time the CUDA backend in one process, with figures relative to the bandwidth measured in it.

    python -m benchmarks.cuda --out FOLDER [--stage models transformers] [--shapes 0.8b 4b 9b]

Stages run in the order given. What must hold on a device is checked by ``pytest tests/backends/cuda -m gpu``.

    stream        the bandwidth of a stream read; always measured first
    models        device time of decode, verify(T), draft steps and commits; generations, plain and speculative, whose
                  tokens must be equal
    transformers  the same weights in transformers' generate, at its best setting

FOLDER/cuda.json is rewritten after every figure, so an end loses none. Weights are random and created on the device.

The exit status is 1 if tokens differ or a part failed, 2 if there is no device, otherwise 0. With --smoke everything
runs on the host with interpreted kernels and a toy shape; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.cuda.models import Model
    from benchmarks.cuda.shapes import Shape
    from benchmarks.cuda.timing import Lab

STAGES = ("models", "transformers")
ORDER = ("0.8b", "4b", "9b")
DEPTHS = (3, 4, 2, 1)  # of generations, the most promising first


class Session:
    """One run of the script: its measurements, their file, and the failures."""

    def __init__(self, lab: Lab, options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
        import torch
        import triton

        from benchmarks.common import machine

        self.lab, self.options, self.shapes = lab, options, shapes
        self.dtype = torch.bfloat16 if lab.real else torch.float32
        self.path: Path = options.out / "cuda.json"
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.data: dict[str, Any] = {
            "machine": machine(),
            "device": lab.device.name,
            "measurement": lab.real,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "results": self.results,
            "failures": self.failures,
        }
        options.out.mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def run(self) -> int:
        """Run all stages; return the exit status."""
        from benchmarks.cuda.timing import stream_bandwidth

        stream = stream_bandwidth(self.lab)
        self.results["stream"] = {"all": stream}
        self.bandwidth: float = stream["bytes_per_second"]
        print(f"stream read: {self.bandwidth / 1e12:.3f} TB/s", flush=True)
        for stage in self.options.stage:
            for shape in self.shapes:
                self.attempt(stage, shape)
        for text in self.failures:
            print(f"FAILED: {text}")
        if not self.lab.real:
            print("not a measurement: kernels were interpreted on the host, and the shape is a toy")
        print(f"{self.path}: {len(self.failures)} failures")
        return 1 if self.failures else 0

    def attempt(self, stage: str, shape: Shape) -> None:
        """Measure a part, with the card's state before and after; an error ends the part, not the run."""
        import torch

        from benchmarks.cuda.models import Model
        from benchmarks.cuda.timing import watched

        print(f"{stage} {shape.name} ...", flush=True)
        part = self.results.setdefault(stage, {}).setdefault(shape.name, {})
        try:
            with watched(part, real=self.lab.real), tempfile.TemporaryDirectory() as folder:
                getattr(self, stage)(Model(shape, self.lab, Path(folder), self.dtype), part)
            part["complete"] = True
        except Exception as error:  # noqa: BLE001  any error: the other parts still run
            traceback.print_exc()
            self.failures.append(f"{stage} {shape.name} ended with {type(error).__name__}: {error}")
        self.write()
        if self.lab.real:
            gc.collect()
            torch.cuda.empty_cache()

    # --- stages ------------------------------------------------------------------------------------------------------

    def models(self, model: Model, part: dict[str, Any]) -> None:
        from benchmarks.cuda import models

        real = self.lab.real
        part["build_seconds"] = model.build_seconds
        part["kernels"] = model.target.info.kernels
        costs = models.passes(model, self.bandwidth, part, self.write, models.ROWS if real else (1, 2, 4))
        self.failures += models.generations(
            model, costs, part, self.write, tokens=128 if real else 3, repeats=1, depths=DEPTHS if real else (1,)
        )

    def transformers(self, model: Model, part: dict[str, Any]) -> None:
        from benchmarks.cuda import peers

        generation = self.results.get("models", {}).get(model.shape.name, {}).get("generation", {})
        best = max(generation, key=lambda depth: generation[depth]["made"]["speedup"], default="3")
        extent = {"tokens": 64, "repeats": 2} if self.lab.real else {"tokens": 4, "repeats": 1}
        peers.beside_transformers(model, int(best), part, self.write, **extent)
        if not part["settings"]:
            raise RuntimeError(f"transformers' generate ran at no setting: {part['skipped']}")


def _lab(options: argparse.Namespace) -> Lab:
    if options.smoke:
        from benchmarks.cuda import smoke

        return smoke.lab()
    from benchmarks.cuda.timing import Lab
    from specdec.backends.cuda.device import open_device

    return Lab(device=open_device(), real=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--shapes", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--smoke", action="store_true", help="interpreted on the host with a toy shape: no measurement")
    options = parser.parse_args(arguments)
    from specdec.errors import SpecdecError

    try:
        lab = _lab(options)
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
    from benchmarks.cuda.shapes import SHAPES, TOY

    shapes = [TOY] if options.smoke else [SHAPES[name] for name in options.shapes]
    return Session(lab, options, shapes).run()


if __name__ == "__main__":
    sys.exit(main())
