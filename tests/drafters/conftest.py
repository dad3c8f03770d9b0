"""Tiny checkpoints that draft for each other, written and loaded once per session."""

import pytest

from tests.drafters import composed


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return composed.write_folders(tmp_path_factory.mktemp("draft-models"))


@pytest.fixture(scope="session")
def base(folders):
    """The target, decoding plainly."""
    return composed.load_base(folders)
