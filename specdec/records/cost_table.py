"""Cost tables and their files: seconds of a pass by rows, of a draft by tokens, and of the rest of a cycle.

Costs are wall-clock times of one target, drafter and machine, measured by ``specdec.decoding.cycle_timing``.
``specdec.policies.adaptive`` combines them with acceptance into the rate of each depth. A table is one JSON file, named
by the identity of all that its seconds depend on: another machine, model or installation has a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specdec.errors import UnsupportedError, cut, described
from specdec.files.keeping import make_folder, replacing
from specdec.files.reading import parse_json, read_text, why
from specdec.records.store import cache_folder

FORMAT = 2
FOLDER = "SPECDEC_COSTS"
"""Environment variable: the folder of cost tables, or "off" to keep none."""

_LONGEST = 86_400.0  # seconds of one pass; a table of longer ones is not believed
_LARGEST = 2**20  # bytes of a file


def plausible(seconds: Mapping[int, float]) -> dict[int, float]:
    """Measured seconds by rows or tokens, without what only a busy machine explains.

    Noise only adds. A pass of more rows, or several passes of fewer, would do the same work: r rows cost at most what
    s > r rows cost, and at most ceil(r / s) times what s < r rows cost. Entries above such a bound are set to it.
    """
    return {
        rows: min([taken, *(other * max(1, -(-rows // at)) for at, other in seconds.items() if at)])
        for rows, taken in seconds.items()
    }


@attrs.frozen(kw_only=True)
class CostTable:
    """Measured seconds, made ``plausible``; interpolated linearly in between, extrapolated with the last slope."""

    # rows of a pass -> seconds of decode and verify
    verify: Mapping[int, float] = attrs.field(converter=plausible)
    # drafted tokens -> seconds of propose; 0 -> 0.0
    draft: Mapping[int, float] = attrs.field(converter=plausible)
    drafter: str = ""  # whose drafts, by its name in a chain; the others cost nothing beside them
    commit: float  # seconds of commit, observe and bookkeeping per cycle
    steady: bool = attrs.field(default=True, eq=False)  # whether repeats agreed; otherwise the table is not kept

    def cycle(self, depth: int) -> float:
        """t(depth): expected seconds of a cycle that drafts ``depth`` tokens."""
        return self.pass_seconds(depth + 1) + self.draft_seconds(depth) + self.commit

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a verification pass of ``rows`` rows."""
        return _on_line(self.verify, rows)

    def draft_seconds(self, tokens: int) -> float:
        """Seconds of a draft of ``tokens`` tokens."""
        return _on_line(self.draft, tokens)


def _on_line(known: Mapping[int, float], at: int) -> float:
    if at in known:
        return known[at]
    points = sorted(known)
    if len(points) == 1:
        return known[points[0]]
    low = max((p for p in points[:-1] if p < at), default=points[0])
    high = next(p for p in points if p > low)
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    return known[low] + slope * (at - low)


def costs_path(identity: Mapping[str, str | int]) -> Path | None:
    """The file of this identity's table; None if tables are not kept, or the model has no fingerprint."""
    folder = costs_folder()
    if folder is None or not identity["model"]:
        return None
    digest = hashlib.blake2b(json.dumps(list(identity.values())).encode(), digest_size=12).hexdigest()
    return folder / f"{digest}.json"


def costs_folder() -> Path | None:
    """Where tables are kept: $SPECDEC_COSTS, else ``costs`` in the cache folder; None if they are not kept."""
    if chosen := os.environ.get(FOLDER):
        return None if chosen == "off" else Path(chosen)
    try:
        return cache_folder() / "costs"
    except UnsupportedError:  # no home
        return None


def read_costs(path: Path) -> CostTable | str:
    """The table in a file, or why it cannot be used ("" if there is no file)."""
    try:
        return _table(parse_json(read_text(path, _LARGEST)))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"the cost table {path} cannot be read: {why(error)}"
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        return f"the cost table {path} is broken ({cut(described(error), 500)})"


def _table(data: Any) -> CostTable:
    """Raises: ValueError and others for what is no table of this format."""
    if data["format"] != FORMAT:
        raise ValueError(f"not a cost table of format {FORMAT}")
    verify, draft = ({int(at): float(taken) for at, taken in data[part].items()} for part in ("verify", "draft"))
    commit, drafter = float(data["commit"]), str(data["drafter"])
    if not all(0.0 <= seconds <= _LONGEST for seconds in (*verify.values(), *draft.values(), commit)):
        raise ValueError("it has what is not a number of seconds")
    if 1 not in verify or draft.get(0) != 0.0 or min(verify) < 1 or min(verify.values()) <= 0.0:
        raise ValueError("a table has the seconds of 1 row and of 0 drafted tokens at least")
    return CostTable(verify=verify, draft=draft, drafter=drafter, commit=commit)


def write_costs(path: Path, table: CostTable, identity: Mapping[str, str | int]) -> None:
    """Write a table and its identity, replacing the file atomically. Raises: OSError."""
    costs = {part: getattr(table, part) for part in ("verify", "draft", "drafter", "commit")}
    data = {"format": FORMAT, "identity": identity, **costs}
    make_folder(path.parent)
    with replacing(path) as new:
        new.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
