"""A process that loads what a stranger wrote, under limits: it is asked by path and reports how that ended.

The parent side is ``Loader``. A request and a report are JSON objects, one a line. The process ends itself when one
command or call takes ``HANG_S`` seconds of processor time, however busy the machine is; the parent ends it after
``HUNG`` seconds on the clock, which only a process that waits for something can reach.
"""

import contextlib
import io
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any

from tests.processes import HUNG

HANG_S = 20
ROOM = 4 * 2**30  # bytes of address space beyond what the process has at its start


def _sizes() -> dict[str, int]:
    """Bytes by the names of /proc/self/status: VmSize, VmRSS, VmHWM, ..."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if "kB" in value
    }


def _start_the_clock(seconds: float = HANG_S) -> None:
    """End the process after so many seconds of its processor time; 0 is never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _walk(path: pathlib.Path) -> None:
    """Look at a checkpoint and generate with it, or generate with a configuration, as a user does."""
    from specdec.cli import main
    from specdec.errors import SpecdecError

    tail = [str(path)] if path.is_file() else ["-m", str(path), "-s", "depth.depth=1", "-s", "target.dtype=float32"]
    generate = ["generate", *tail, "-p", "the eel", "-n", "2"]
    commands = [["info", str(path)], [*generate, "--chat"]] * path.is_dir() + [[*generate, "--raw"]]
    refused = ""
    for command in commands:
        _start_the_clock()
        said, printed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            try:
                main(command, standalone_mode=True)
                status: Any = 0
            except SystemExit as ended:
                status = ended.code or 0
        assert status in (0, 2), f"exit status {status}: {said.getvalue()[:500]}"
        if status == 2:
            refused = said.getvalue()
            assert "Traceback" not in refused
            _check_message(refused)
    if refused:
        raise SpecdecError(refused)


def _check_message(message: str) -> None:
    assert len(message) <= 2000, f"a message of {len(message)} characters: {message[:200]}"
    assert message.encode("utf-8")


def _attempt(path: pathlib.Path) -> dict[str, Any]:
    import specdec.models.loading as loading
    from specdec.errors import SpecdecError

    checks: list[int] = []
    real = loading.check_weights
    loading.check_weights = lambda *args, **options: checks.append(1) or real(*args, **options)  # type: ignore[attr-defined,func-returns-value]
    try:
        _walk(path)
        outcome = "loaded"
    except SpecdecError as error:
        try:
            _check_message(f"{type(error).__name__}: {error}")
            outcome = f"refused: {error.message[:80]}"
        except AssertionError as long:
            outcome = f"bug: {long}"
    except BaseException:  # noqa: BLE001 - a panic is no Exception
        outcome = f"bug: {traceback.format_exc()[-1500:]}"
    finally:
        loading.check_weights = real  # type: ignore[attr-defined]
    if outcome == "loaded" and not checks:
        outcome = "bug: the weights were not checked"
    return {"outcome": outcome}


def _serve() -> None:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what else is printed is no report
    import specdec
    import specdec.cli
    import specdec.testing  # noqa: F401  # torch and all plugins

    first = sys.stdin.readline()
    _attempt(pathlib.Path(json.loads(first)["path"]))  # what is imported once is no part of a case
    _start_the_clock(0)
    limit = _sizes()["VmSize"] + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threads = threading.active_count()
    print("{}", file=reports, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = _sizes()["VmRSS"]
        report = _attempt(pathlib.Path(asked["path"]))
        _start_the_clock(0)
        report["grown"] = _sizes()["VmHWM"] - before
        print(json.dumps(report), file=reports, flush=True)
        if threading.active_count() > threads:  # a tokenizer that was left alone still takes time
            return


class Loader:
    """The process, started again after a case that ended it."""

    def __init__(self, sound: pathlib.Path) -> None:
        self._sound = sound
        self._process: subprocess.Popen[str] | None = None

    def attempt(self, path: pathlib.Path) -> dict[str, Any]:
        """How loading ``path`` ended: "outcome" (loaded, refused: ..., bug: ...) and "grown", bytes of peak memory."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        report = self._ask({"path": str(path)})
        if report is None:
            assert self._process is not None
            return {"outcome": f"bug: the process ended with {self._process.wait()}", "grown": 0}
        return report

    def _start(self) -> None:
        environment = {
            **os.environ,
            **{"SPECDEC_CPU_KERNELS": "torch", "SPECDEC_COSTS": "off", "SPECDEC_PROBES": "off", "HF_HUB_OFFLINE": "1"},
            "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.loading_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self._ask({"path": str(self._sound)}) == {}, "the sound checkpoint does not load"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(HUNG, self._process.kill)
        watchdog.start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    _serve()
