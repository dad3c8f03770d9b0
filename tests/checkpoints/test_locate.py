"""Finding a checkpoint: every wrong place is refused with what is there and what would work."""

import os
from importlib import resources

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from specdec.checkpoints import locate
from specdec.errors import CheckpointError


def folder_of(path, *files):
    path.mkdir(parents=True)
    for file in files:
        (path / file).write_bytes(b"{}")
    return path


def refusal(model, **options):
    with pytest.raises(CheckpointError) as caught:
        locate(model, **options)
    return caught.value


def test_demo_is_the_embedded_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    assert "not part of this installation" in str(refusal("demo"))
    folder_of(tmp_path / "demo", "config.json")
    assert locate("demo") == tmp_path / "demo"
    assert "revision 'v1' is not used" in refusal("demo", revision="v1").message


def test_a_misspelt_folder_names_its_nearest_sibling(tmp_path):
    folder_of(tmp_path / "Qwen3.5-4B", "config.json")
    assert str(tmp_path / "Qwen3.5-4B") in refusal(str(tmp_path / "Qwen3.5-4b")).message
    assert str(tmp_path) in str(refusal(str(tmp_path / "a" / "b" / "c")))  # how far the path exists


@pytest.mark.parametrize("model", ["./nothing", "../nothing/x", "~/nothing-here", "a/b/c", "nothing", "/nothing/x", ""])
def test_paths_never_go_to_the_hub(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert refusal(model).facts["try"]


@pytest.mark.parametrize(
    ("name", "kind"), [("pipe", "a named pipe"), ("pipe.gguf", "a named pipe"), ("device", "a device")]
)
def test_what_is_no_file_is_named(tmp_path, name, kind):
    path = tmp_path / name
    path.symlink_to("/dev/null") if name == "device" else os.mkfifo(path)
    assert refusal(str(path)).message == f"{path} is {kind}, neither a folder nor a GGUF file"


def test_a_file_is_not_a_folder(tmp_path, monkeypatch):
    file = folder_of(tmp_path / "m", "model.safetensors") / "model.safetensors"
    assert str(file.parent) in refusal(str(file)).facts["try"]
    monkeypatch.chdir(file.parent)
    assert refusal("model.safetensors/head").facts["exists up to"] == str(file)  # no hub id


def test_a_gguf_file_is_located_by_its_name_or_in_its_folder(tmp_path):
    folder = folder_of(tmp_path / "m", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf")
    first = folder / "x-00001-of-00002.gguf"
    assert locate(str(first)) == locate(str(folder)) == first
    (folder / "mtp-x.gguf").touch()  # a head of the model
    assert locate(str(folder)) == first
    (folder / "other.gguf").touch()
    assert "name one of the GGUF files" in refusal(str(folder)).facts["try"]
    assert "there is no file" in refusal(str(folder / "others.gguf")).message
    assert "there is no file" in refusal("models/mistyped.gguf").message  # no id of the hub
    assert "Did you mean" in refusal(str(folder / "others.gguf")).message


@pytest.mark.parametrize("rest", ["", "/", "/tree/main?x=1"])
def test_a_url_is_refused_with_the_id_in_it(rest):
    error = refusal(f"https://huggingface.co/Qwen/Qwen3-4B{rest}")
    assert "is a URL, not a model" in error.message
    assert error.facts["try"] == "Qwen/Qwen3-4B"
    assert "a hub id" in refusal("http://localhost/").facts["try"]


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (["a.gguf", "b.gguf"], "name one of the GGUF files"),
        (["pytorch_model.bin"], "pickled"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA"),
        (["model.safetensors"], "config.json"),
        ([], "empty"),
    ],
)
def test_a_folder_without_config_says_what_it_looks_like(tmp_path, files, word):
    error = refusal(str(folder_of(tmp_path / "m", *files)))
    assert "not a checkpoint" in error.message
    assert word in str(error)
    assert all(file in error.facts["found"] for file in files)


class Hub:
    """Stands in for ``snapshot_download``: a folder, or an error."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def __call__(self, repo, **options):
        self.calls.append({"repo": repo, **options})
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_hub_id_fetches_no_pickles_and_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = Hub(folder_of(tmp_path / "snapshot", "config.json"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert locate("org/name", revision="v1") == tmp_path / "snapshot"
    assert {(call["repo"], call["revision"]) for call in hub.calls} == {("org/name", "v1")}
    from huggingface_hub.utils import filter_repo_objects

    stored = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer.model",
        "pytorch_model.bin",
        "modeling.py",
        "original/consolidated.safetensors",
        "consolidated.safetensors",
        "m.gguf",
    ]
    last = hub.calls[-1]
    fetched = filter_repo_objects(
        stored, allow_patterns=last["allow_patterns"], ignore_patterns=last["ignore_patterns"]
    )
    assert list(fetched) == stored[:5]


def test_a_hub_repository_without_config_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    hub = Hub(folder_of(tmp_path / "snapshot"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert "not a checkpoint" in refusal("org/gguf-only").message
    assert len(hub.calls) == 1


def hub_error(kind):
    if not issubclass(kind, errors.HfHubHTTPError):
        return kind("what happened\nand more")
    error = kind.__new__(kind)  # these take the HTTP library's response, whose class depends on the hub's version
    Exception.__init__(error, "what happened")
    return error


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (errors.RepositoryNotFoundError, ["no model org/name", "private", "no folder"]),
        (errors.GatedRepoError, ["gated", "huggingface.co/org/name", "HF_TOKEN"]),
        (errors.RevisionNotFoundError, ["no revision 'v9'"]),
        (errors.LocalEntryNotFoundError, ["cannot be reached", "cache", "network"]),
        (errors.HFValidationError, ["neither a folder nor a hub id"]),
        (PermissionError, ["could not be fetched", "PermissionError: what happened"]),
        (RuntimeError, ["could not be fetched", "RuntimeError: what happened"]),
    ],
)
def test_hub_errors_become_one_sentence(kind, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(hub_error(kind)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    text = str(refusal("org/name", revision="v9"))
    assert [fact for fact in facts if fact not in text] == []


def test_offline_uses_the_cache_and_says_so_when_it_is_empty(tmp_path, monkeypatch):
    """With huggingface_hub's real code, on a cache folder made by hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "HF_HUB_OFFLINE" in str(refusal("org/name"))
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--org--name"
    snapshot = folder_of(repository / "snapshots" / commit, "config.json", "model.safetensors")
    folder_of(repository / "refs")
    (repository / "refs" / "main").write_text(commit)
    assert locate("org/name") == snapshot
