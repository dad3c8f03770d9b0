"""Tiny checkpoints that draft for each other, written and loaded once per session."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drafters import composed


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> composed.Folders:
    return composed.write_folders(tmp_path_factory.mktemp("draft-models"))


@pytest.fixture(scope="session")
def base(folders: composed.Folders) -> Any:
    """The target, decoding plainly."""
    return composed.load_base(folders)
