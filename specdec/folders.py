"""Where specdec keeps what it builds or measures once: compiled kernels, cost tables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """specdec's cache folder: $SPECDEC_CACHE_DIR, else ``specdec`` in the user's cache folder. It may not exist yet."""
    if chosen := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"
