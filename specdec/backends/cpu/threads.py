"""How many threads a pass may use: as many as asked for, or as the machine gives to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

import attrs
import torch

_before_fork = 0  # torch's threads in the process that this one was forked from


def _forked() -> None:
    """Keep torch to one thread: its pool does not survive a fork, and the next large operation would wait for it."""
    global _before_fork
    _before_fork = max(_before_fork, torch.get_num_threads())
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@attrs.define
class Threads:
    """The number of threads for the passes of one model.

    Attributes:
        chosen: ``target.threads``; None takes torch's number, but no more than ``given``.
        given: processors that the affinity mask and the quota of the control group leave to this process.
    """

    chosen: int | None = None
    given: int = attrs.field(factory=lambda: given_processors())

    def count(self) -> int:
        """Threads of the next pass; follows ``torch.set_num_threads`` unless a number was chosen."""
        return self.chosen or min(max(torch.get_num_threads(), _before_fork), self.given)


def given_processors(root: Path = Path("/")) -> int:
    """Processors that this process may use: by its affinity mask, and by the CPU quota of its control group (Linux).

    A quota of one and a half processors gives two. ``root`` is where ``proc`` and ``sys`` are mounted.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """CPU quotas of this process's control group and its parents, in processors (cgroups(7), versions 1 and 2)."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        own = Path(name.lstrip("/"))
        for folder in (base / own, *(base / parent for parent in own.parents)):
            if controllers:
                limits = [_text(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period")]
            else:
                limits = _text(folder / "cpu.max").split()
            if len(limits) == 2 and all(limit.strip().isdigit() for limit in limits) and int(limits[1]):
                quotas.append(int(limits[0]) / int(limits[1]))
    return quotas


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
