"""Cost tables in files: one per model, backend and drafter in the user's cache folder, with what they belong to.

Costs are true for one machine and one installation only. A kept table of another one is measured again and said so; a
table that the user names is refused instead, because somebody relies on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
from collections.abc import Mapping, MutableSequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from specdec._version import __version__
from specdec.decoding.cost_table import CostTable, depths_that_fit, measure_costs
from specdec.decoding.parts import Parts
from specdec.errors import ConfigError
from specdec.records.folders import cache_folder

log = structlog.get_logger(__name__)

FORMAT = 1
SWITCH = "SPECDEC_COSTS"  # a folder for cost tables, or "off": keep none


@attrs.frozen(kw_only=True)
class CostIdentity:
    """Everything that the seconds of a cost table depend on, as far as it can be asked."""

    model: str  # ModelInfo.fingerprint
    backend: str
    dtype: str
    drafter: str  # its name and configuration
    kernels: str
    processor: str
    cores: int
    threads: int  # torch's, in this process
    torch: str
    specdec: str

    @classmethod
    def of(cls, lm: Parts) -> CostIdentity:
        """The identity of what ``lm`` would measure now."""
        info, config = lm.info, lm.drafter.config
        options = attrs.asdict(config) if attrs.has(type(config)) else {}
        return cls(
            model=info.fingerprint,
            backend=f"{info.backend} {info.device}",
            dtype=info.dtype,
            drafter=f"{lm.drafter.spec.name} {json.dumps(options, sort_keys=True, default=str)}",
            kernels=info.kernels,
            processor=_processor(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            specdec=__version__,
        )

    def key(self) -> str:
        """The file's name: of what was measured, not of where, so that a moved table is found and told."""
        parts = (self.model, self.backend, self.dtype, self.drafter)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def differences(self, told: Mapping[str, Any]) -> list[str]:
        """``threads 2, here 1`` for every part in which ``told`` differs."""
        ours = attrs.asdict(self)
        return [f"{name} {told.get(name)}, here {ours[name]}" for name in ours if told.get(name) != ours[name]]


def costs_of(lm: Parts, notices: MutableSequence[str], file: str | Path | None = None) -> CostTable:
    """The table that fits ``lm`` here: from ``file``, or kept by an earlier process, or measured now and kept.

    What a user should know (a table of another machine, a broken file, a folder that cannot be written) is appended to
    ``notices``. A model without a fingerprint is measured every time, and a table from a busy moment is not kept.

    Raises: ConfigError when ``file`` cannot be read, is no cost table, or belongs to another machine or model;
    UnsupportedError where costs cannot be measured.
    """
    depths_that_fit(lm)
    identity = CostIdentity.of(lm)
    if file is not None:
        return _named(Path(file), identity)
    folder = cost_folder()
    if folder is None or not identity.model:
        return measure_costs(lm)
    path = folder / f"{identity.key()}.json"
    try:
        table, told = read_costs(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notices.append(f"the cost table {path} is broken ({error}): measured again")
    else:
        differences = identity.differences(told)
        if not differences:
            return table
        notices.append(f"cost table of another machine or installation ({'; '.join(differences)}): measured again")
    table = measure_costs(lm)
    if not table.steady:
        log.info("cost_table_not_kept", reason="repeats disagreed: the machine was busy; the next start measures again")
        return table
    try:
        write_costs(path, table, identity)
    except OSError as error:
        notices.append(f"the cost table cannot be kept: {error}; every start measures it again")
    return table


def _named(path: Path, identity: CostIdentity) -> CostTable:
    remedy = f"leave depth.costs out: costs are then measured at load and kept in {cost_folder() or 'no folder'}"
    try:
        table, told = read_costs(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"depth.costs names no cost table: {reason}", file=path, try_=remedy) from error
    differences = identity.differences(told)
    if differences:
        raise ConfigError(
            f"depth.costs names a cost table that does not fit: {'; '.join(differences)}", file=path, try_=remedy
        )
    return table


def cost_folder() -> Path | None:
    """Where tables are kept: $SPECDEC_COSTS, else ``costs`` in specdec's cache folder. None: they are not kept."""
    chosen = os.environ.get(SWITCH)
    if chosen:
        return None if chosen == "off" else Path(chosen)
    return cache_folder() / "costs"


def read_costs(path: Path) -> tuple[CostTable, Mapping[str, Any]]:
    """A table and the identity that was written with it.

    Raises: OSError when the file cannot be read, ValueError when it is no cost table.
    """
    told = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(told, dict) or told.get("format") != FORMAT or not isinstance(told.get("identity"), dict):
        raise ValueError(f"no cost table of format {FORMAT}")
    try:
        verify = {int(rows): _seconds(value) for rows, value in told["verify"].items()}
        draft = {int(tokens): _seconds(value) for tokens, value in told["draft"].items()}
        commit = _seconds(told["commit"])
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if 1 not in verify or draft.get(0) != 0.0 or min(verify) < 1 or min(draft) < 0 or min(verify.values()) <= 0.0:
        raise ValueError("a table has the seconds of 1 row and of 0 drafted tokens at least")
    return CostTable(verify=verify, draft=draft, commit=commit), told["identity"]


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)  # type: ignore[arg-type]


def write_costs(path: Path, table: CostTable, identity: CostIdentity) -> None:
    """Write a table and what it belongs to, replacing the file atomically. Raises: OSError."""
    told = {
        "format": FORMAT,
        "identity": attrs.asdict(identity),
        "verify": {str(rows): seconds for rows, seconds in table.verify.items()},
        "draft": {str(tokens): seconds for tokens, seconds in table.draft.items()},
        "commit": table.commit,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        new.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _processor() -> str:
    """The CPU's name where the system tells it (Linux), else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
