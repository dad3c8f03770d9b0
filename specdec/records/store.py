"""Where specdec keeps files between processes."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import UnsupportedError


def cache_folder() -> Path:
    """specdec's cache folder: $SPECDEC_CACHE_DIR, else ``specdec`` in the user's cache folder. It may not exist yet.

    Raises: UnsupportedError when the user's home is unknown, as in some containers.
    """
    if chosen := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError as error:
        raise UnsupportedError(
            "there is no folder for caches: HOME is not set, and the system does not know this user's home",
            try_="SPECDEC_CACHE_DIR=FOLDER",
        ) from error


def weights_folder() -> Path:
    """Where rounded weights of large checkpoints are kept. Raises: as ``cache_folder``."""
    return cache_folder() / "weights"
