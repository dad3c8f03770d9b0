"""A file is replaced as a whole."""

import os

import pytest

from specdec.files.keeping import replacing


def test_a_link_that_waits_in_an_open_folder_is_not_written_through(tmp_path):
    """Catches: a temporary file with a name that others can foresee."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    shared = tmp_path / "shared"
    shared.mkdir()
    for number in range(100):
        (shared / f"t.json.{os.getpid()}.{number}.tmp").symlink_to(mine)
    (shared / "t.json").symlink_to(mine)
    with replacing(shared / "t.json") as new:
        new.write_text("new")
    assert mine.read_text() == "kept"
    assert (shared / "t.json").read_text() == "new"
    assert not (shared / "t.json").is_symlink()


def test_an_error_in_the_block_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted():
        with replacing(path) as new:
            new.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]
