"""Where specdec keeps what it builds or measures once: compiled kernels, cost tables."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import UnsupportedError


def cache_folder() -> Path:
    """specdec's cache folder: $SPECDEC_CACHE_DIR, else ``specdec`` in the user's cache folder. It may not exist yet.

    Raises: UnsupportedError where nothing says where the user's folder is, as in some containers.
    """
    if chosen := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError as error:
        raise UnsupportedError(
            "there is no folder for caches: HOME is not set, and the system knows no home of this user",
            try_="SPECDEC_CACHE_DIR=FOLDER",
        ) from error
