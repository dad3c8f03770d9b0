"""Build, check and time the CUDA backend in one process, with figures relative to the bandwidth measured in it.

    python -m benchmarks.cuda --out FOLDER [--stage check,models,kernels,transformers,demo] [--shapes 0.8b,4b,9b]
                              [--minutes 4] [--total 9.5] [--earlier cuda.json] [--again] [--plot] [--smoke]

Stages run in the order given.

    stream        the bandwidth of a stream read; always measured first
    check         every kernel: row invariance (equal bits), distance from float64; whole models: 64 greedy tokens
                  plain, verified at depth 1, 3 and 7, op by op and from graphs: the same ids and bits of logits
    models        device time of decode, verify(T), draft steps and bookkeeping; generations, plain and speculative
    kernels       every kernel at 1 to 16 rows against the bandwidth; our products against cuBLAS at one row
    transformers  the same weights in transformers' generate, at its best setting
    demo          the embedded model, plain and speculative, by class of prompt

FOLDER/cuda.json is rewritten after every figure, so a time limit loses none. Another run in the same folder, or one
with --earlier, adds to it and skips completed parts (unless --again). Weights are random and created on the device.

The exit status is 1 if a parity gate or a part failed, 2 if there is no device, otherwise 0; a missed target is not an
error. With --smoke everything runs on the host with interpreted kernels and a toy shape; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.cuda.kernels import Case
    from benchmarks.cuda.record import Record
    from benchmarks.cuda.shapes import Shape
    from benchmarks.cuda.timing import Lab

STAGES = ("stream", "check", "models", "kernels", "tiles", "transformers", "demo")
ORDER = ("0.8b", "4b", "9b")
DEPTHS = (3, 4, 2, 1)  # of generations, the most promising first


class Deadline:
    """Minutes that a stage and the whole run may take, checked between measurements."""

    def __init__(self, minutes: float, total: float) -> None:
        self._minutes, self._total = minutes, total
        self._began = self._stage_began = perf_counter()

    def stage(self) -> None:
        """A stage begins."""
        self._stage_began = perf_counter()

    def passed(self) -> bool:
        """Whether the time is up."""
        now = perf_counter()
        return now - self._stage_began > 60 * self._minutes or now - self._began > 60 * self._total


class Session:
    """One run of the script: its measurements, their file, and the failures."""

    def __init__(self, lab: Lab, record: Record, options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
        import torch

        self.lab, self.record, self.options, self.shapes = lab, record, options, shapes
        self.deadline = Deadline(options.minutes, options.total)
        self.dtype = torch.bfloat16 if lab.real else torch.float32
        self.failures: list[str] = []
        self.bandwidth = 0.0

    def run(self) -> int:
        """Run all stages; return the exit status."""
        from benchmarks.cuda.timing import stream_bandwidth

        with self.part("stream", "all") as part:
            part |= stream_bandwidth(self.lab)
            self.bandwidth = part["bytes_per_second"]
            self.say(f"stream read: {self.bandwidth / 1e12:.3f} TB/s")
        for stage in self.options.stage:
            self.deadline.stage()
            for name, measure in self.parts(stage):
                self.attempt(stage, name, measure)
        return self.report()

    def parts(self, stage: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], None]]]:
        """The parts of a stage, by name."""
        if stage == "stream":
            return
        if stage == "demo":
            yield "embedded", self.demo
            return
        measure = {
            "check": self.check,
            "models": self.models,
            "kernels": self.kernels,
            "tiles": self.tiles,
            "transformers": self.transformers,
        }[stage]
        for shape in self.shapes:
            yield shape.name, functools.partial(measure, shape)
        if stage == "check":
            yield "others", self.check_others
        if stage == "kernels":
            yield "others", self.time_others

    def attempt(self, stage: str, name: str, measure: Callable[[dict[str, Any]], None]) -> None:
        """Measure a part, unless it is complete or time is up; an error ends the part, not the run."""
        if self.record.has(stage, name) and not self.options.again:
            self.record.skip(stage, name, "complete in an earlier run")
            return
        if self.deadline.passed():
            self.record.skip(stage, name, "no time was left")
            return
        began = perf_counter()
        self.say(f"{stage} {name} ...")
        try:
            with self.part(stage, name) as part:
                measure(part)
        except Exception as error:  # noqa: BLE001  any error: the other parts still run
            traceback.print_exc()
            self.failures.append(f"{stage} {name} ended with {type(error).__name__}: {error}")
        self.say(f"{stage} {name}: {perf_counter() - began:.1f} s")
        self.clean()

    @contextlib.contextmanager
    def part(self, stage: str, name: str) -> Iterator[dict[str, Any]]:
        """A part of the record, with the card's state before and after."""
        from benchmarks.cuda.timing import watched

        with self.record.measuring(stage, name) as part, watched(part, real=self.lab.real):
            yield part

    def clean(self) -> None:
        """Free memory between parts."""
        import torch

        if self.lab.real:
            gc.collect()
            torch.cuda.empty_cache()

    def say(self, text: str) -> None:
        print(text, flush=True)

    # --- stages ------------------------------------------------------------------------------------------------------

    def check(self, shape: Shape, part: dict[str, Any]) -> None:
        from benchmarks.cuda import kernels, models

        self._check(shape.name, kernels.cases(shape, self.lab, self.dtype), part)
        sizes: dict[str, Any] = {} if self.lab.real else {"tokens": 3, "depths": (0, 1), "prompt_tokens": 3}
        with tempfile.TemporaryDirectory() as folder:
            found = models.gates(shape, self.lab, Path(folder), self.dtype, **sizes)
        part["gates"] = found
        self.failed(f"{shape.name}, whole model", found["failures"])

    def check_others(self, part: dict[str, Any]) -> None:
        self._check("others", self._others(), part)

    def _others(self) -> Iterator[Case]:
        from benchmarks.cuda import others

        return others.cases(others.Sizes() if self.lab.real else others.TOY_SIZES, self.lab, self.dtype)

    def _check(self, name: str, cases: Iterator[Case], part: dict[str, Any]) -> None:
        from benchmarks.cuda import kernels

        part["kernels"] = {}
        few: dict[str, Any] = {} if self.lab.real else {"counts": (3,), "alone": (7,)}
        for case in cases:
            found = kernels.check(case, **few)
            part["kernels"][case.name] = found
            self.failed(f"{name}, {case.name}", found["failures"])
            del case
            self.clean()
        self.record.write()

    def models(self, shape: Shape, part: dict[str, Any]) -> None:
        from benchmarks.cuda import models

        rows = models.ROWS if self.lab.real else (1, 2, 4)
        with tempfile.TemporaryDirectory() as folder:
            model = models.made(shape, self.lab, Path(folder), self.dtype)
            part["build_seconds"] = model.build_seconds
            part["kernels"] = model.target.info.kernels
            costs = models.passes(model, self.bandwidth, part, self.record.write, rows)
            self.say(
                f"  decode {1e3 * costs.decode:.3f} ms, {part['decode']['of_bound']:.3f} of the bound; "
                f"verify(4) x{part['verify']['4']['of_decode']:.3f}; draft x{part['draft']['pruned']['of_decode']:.3f}"
            )
            broken = models.generations(
                model,
                costs,
                part,
                self.record.write,
                tokens=128 if self.lab.real else 3,
                repeats=1,
                depths=DEPTHS if self.lab.real else (1,),
                out_of_time=self.deadline.passed,
            )
        self.failed(f"{shape.name}, generations", broken)
        for depth, entry in part["generation"].items():
            made, coin = entry["made"], entry["coin"]
            rate = entry["plain"]["tokens_per_second"]
            self.say(
                f"  depth {depth}: plain {rate:.0f} tokens/s; speed-up {made['speedup']:.2f} "
                f"(identity {made['identity']:.3f}), by coin {coin['speedup']:.2f} (identity {coin['identity']:.3f})"
            )
            for name in ("plain", "made", "coin"):
                if not entry[name]["identity_holds"] and self.lab.real:
                    self.say(f"  depth {depth}, {name}: parts explain {entry[name]['identity']:.1%} of a cycle")
        missing = [depth for depth in DEPTHS if str(depth) not in part["generation"]]
        if missing and self.lab.real:
            self.record.skip("models", shape.name, f"generations at depth {missing}: no time was left")

    def kernels(self, shape: Shape, part: dict[str, Any]) -> None:
        from benchmarks.cuda import kernels

        part["cases"], part["prices"] = {}, {}
        prices = []
        for name, n, k, times in kernels.products(shape):
            if self.deadline.passed():
                self.record.skip("kernels", shape.name, f"price of {name} and what follows: no time was left")
                break
            found = kernels.price(name, n, k, times, self.lab, self.dtype)
            prices.append(found)
            part["prices"][name] = found.to_dict()
            self.clean()
            self.record.write()
        if len(prices) == len(kernels.products(shape)):
            part["price"] = kernels.total_price(prices)
        self._time(shape.name, kernels.cases(shape, self.lab, self.dtype), part)

    def tiles(self, shape: Shape, part: dict[str, Any]) -> None:
        from benchmarks.cuda import kernels

        part["products"] = {}
        for name, n, k, _ in kernels.products(shape):
            if name == "head":  # its statistics need complete sums
                continue
            if self.deadline.passed():
                self.record.skip("tiles", shape.name, f"{name} and what follows: no time was left")
                break
            found = kernels.sweep(name, n, k, self.lab, self.dtype, self.bandwidth)
            part["products"][name] = found
            chosen = next(entry["median"] for entry in found.values() if entry["chosen"])
            label, fastest = min(found.items(), key=lambda one: one[1]["median"])
            self.say(f"  {name}: {label} takes {fastest['median'] / chosen:.2f} of the chosen tile's time")
            self.clean()
            self.record.write()

    def time_others(self, part: dict[str, Any]) -> None:
        part["cases"] = {}
        self._time("others", self._others(), part)

    def _time(self, name: str, cases: Iterator[Case], part: dict[str, Any]) -> None:
        from benchmarks.cuda import kernels

        counts = kernels.ROWS if self.lab.real else (1, 2)
        for case in cases:
            if self.deadline.passed():
                self.record.skip("kernels", name, f"{case.name} and what follows: no time was left")
                break
            part["cases"][case.name] = kernels.time(case, self.lab, self.bandwidth, counts)
            del case
            self.clean()
            self.record.write()

    def transformers(self, shape: Shape, part: dict[str, Any]) -> None:
        from benchmarks.cuda import models, peers
        from benchmarks.cuda.weights import AGREEMENT

        generation = self.record.results.get("models", {}).get(shape.name, {}).get("generation", {})
        best = max(generation, key=lambda depth: generation[depth]["made"]["speedup"], default="3")
        with tempfile.TemporaryDirectory() as folder:
            model = models.made(shape, self.lab, Path(folder), self.dtype)
            peers.beside_transformers(
                model,
                int(best),
                part,
                self.record.write,
                agreement=AGREEMENT,
                tokens=64 if self.lab.real else 4,
                repeats=2 if self.lab.real else 1,
                out_of_time=self.deadline.passed,
                skip=lambda what, reason: self.record.skip("transformers", f"{shape.name}, {what}", reason),
            )
        if not part["settings"]:
            raise RuntimeError("transformers' generate ran at no setting; the skipped ones say why")

    def demo(self, part: dict[str, Any]) -> None:
        from benchmarks.cuda import peers

        real = self.lab.real
        depths = (1, 2, 3) if real else (1,)
        broken = peers.demo(
            self.lab, part, self.record.write, tokens=128 if real else 4, repeats=3 if real else 1, depths=depths
        )
        self.failed("the embedded model", broken)

    def failed(self, what: str, failures: Sequence[str]) -> None:
        """Record the result of a gate."""
        for text in failures:
            self.failures.append(f"{what}: {text}")
            self.say(f"  FAILED {what}: {text}")

    # --- the end -----------------------------------------------------------------------------------------------------

    def report(self) -> int:
        """Print the table; return 1 if anything failed."""
        from benchmarks.cuda import report

        data = self.record.data
        found = report.print_table(data, real=self.lab.real)
        data["table"] = [line.to_dict() for line in found]
        data["runs"][self.record.run]["failures"] = self.failures
        self.record.write()
        if self.options.plot:
            report.plot(found, self.record.path.with_suffix(".png"))
        for entry in self.record.skipped():
            self.say(f"left out: {entry['stage']} {entry['part']}: {entry['reason']}")
        for text in self.failures:
            self.say(f"FAILED: {text}")
        self.say(f"{self.record.path}: {len(self.failures)} failures")
        return 1 if self.failures else 0


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Parse comma-separated names."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


def _lab(options: argparse.Namespace) -> Lab:
    if options.smoke:
        from benchmarks.cuda import smoke

        return smoke.lab()
    import torch

    from benchmarks.cuda.timing import Lab
    from specdec.backends.cuda.device import open_device

    lab = Lab(device=open_device(), real=True)
    l2 = torch.cuda.get_device_properties(lab.place).L2_cache_size
    lab.cache_bytes = max(lab.cache_bytes, l2)
    return lab


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--stage", type=_some_of(STAGES), default=list(STAGES), metavar=",".join(STAGES))
    parser.add_argument("--shapes", type=_some_of(ORDER), default=list(ORDER), metavar=",".join(ORDER))
    parser.add_argument("--minutes", type=float, default=1e9, help="time limit of a stage; nothing is started after it")
    parser.add_argument("--total", type=float, default=1e9, help="time limit of the whole run, in minutes")
    parser.add_argument("--earlier", type=Path, help="a cuda.json to continue, if the folder has none")
    parser.add_argument("--again", action="store_true", help="measure completed parts again")
    parser.add_argument("--plot", action="store_true", help="draw cuda.png next to the figures")
    parser.add_argument("--smoke", action="store_true", help="interpreted on the host with a toy shape: no measurement")
    options = parser.parse_args(arguments)
    from specdec.errors import SpecdecError

    try:
        lab = _lab(options)
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
    from benchmarks.cuda.record import Record
    from benchmarks.cuda.shapes import SHAPES, TOY

    shapes = [TOY] if options.smoke else [SHAPES[name] for name in options.shapes]
    facts = {"device": lab.device.name, "measurement": lab.real}
    record = Record(options.out, earlier=options.earlier, facts=facts)
    return Session(lab, record, options, shapes).run()


if __name__ == "__main__":
    sys.exit(main())
