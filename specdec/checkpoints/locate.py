"""Resolve a model argument ("demo", a folder or a hub id) to a checkpoint folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from specdec.errors import CheckpointError, cut, nearest
from specdec.files.reading import kind, open_file, why

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # of a split GGUF file
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")
_URL = re.compile(r"https?://[\w.-]+/(?P<id>[\w.-]+/[\w.-]+)?.*")
# Files fetched from the hub. Pickles (*.bin, *.pt) and code (*.py) are never fetched.
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "vocab.txt", "merges.txt")
# Sub-folders (original/, onnx/, ...) hold other formats of the same weights; consolidated*.safetensors is a copy.
HUB_IGNORED = ("*/*", "consolidated*.safetensors")
_LISTED = 8  # file names listed in an error
_NAME = 100  # characters of each


def locate(model: str, *, revision: str | None = None) -> Path:
    """Return a checkpoint's folder, downloading a hub id that is not in the cache.

    Args:
        model: "demo" (the embedded model), a folder, or a hub id such as "Qwen/Qwen3.5-4B". Text that starts with
            ``.``, ``~`` or ``/`` is always a path; ``org/name`` is a path if that folder exists, else a hub id.
        revision: a branch, tag or commit of a hub id.

    Raises: CheckpointError if the folder does not exist or holds no checkpoint, or the download fails.
    """
    if revision is not None and (model == "demo" or os.path.exists(os.path.expanduser(model))):
        raise CheckpointError(
            f"the revision {cut(revision, _NAME)!r} is not used: {cut(model, _NAME)!r} is on this machine",
            try_="a hub id, or no revision",
        )
    if model == "demo":
        return _demo()
    if not model.strip():
        raise CheckpointError("the model is empty", try_=_MODELS)
    url = _URL.fullmatch(model)
    if url:
        raise CheckpointError(f"{cut(model, _NAME)!r} is a URL, not a model", try_=url["id"] or _MODELS)
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return check_folder(path)
    if is_hub_id(model):
        return _from_hub(model, revision)
    raise _nothing_there(model, path)


def is_hub_id(model: str) -> bool:
    """Whether ``locate`` would ask the hub: text like ``org/name`` that names no GGUF file, where no such path exists,
    nor a file ``org``."""
    here = os.path.exists(model) or os.path.isfile(os.path.dirname(model)) or model.endswith(".gguf")
    return not here and _HUB_ID.fullmatch(model) is not None


_MODELS = 'a folder with config.json and model.safetensors, a GGUF file, a hub id such as "Qwen/Qwen3.5-4B", or "demo"'


def _demo() -> Path:
    folder = Path(str(resources.files("specdec") / "demo"))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "the embedded model is not part of this installation",
            folder=folder,
            try_="a wheel of specdec-framework, or another model: " + _MODELS,
        )
    return check_folder(folder)


def check_folder(path: Path) -> Path:
    """Return ``path`` if it is a folder with a config.json or a GGUF file, or the only GGUF file in it.

    A head that llama.cpp's converter wrote beside its model, ``mtp-NAME.gguf``, does not count.

    Raises: CheckpointError saying what it is instead.
    """
    if not os.path.exists(path):
        raise _nothing_there(str(path), path)
    if not os.path.isdir(path):
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"{path} is {kind(path.stat().st_mode)}, neither a folder nor a GGUF file", try_=_instead_of_a_file(path)
        )
    if not os.path.lexists(path / "config.json"):
        whole = [name for name in entries(path) if name.lower().endswith(".gguf") and not _LATER_PART.search(name)]
        whole = [name for name in whole if not name.startswith("mtp-")] or whole
        if len(whole) == 1:
            return path / whole[0]
        files = sorted(name + "/" * os.path.isdir(path / name) for name in entries(path))
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no config.json",
            found=listed(files) or "an empty folder",
            try_=what_else(files) or _MODELS,
        )
    return path


def is_gguf(path: Path) -> bool:
    """Whether a path is a file of that name, or one that begins as a GGUF file does."""
    if path.suffix.lower() == ".gguf":
        return path.is_file()
    try:
        with open_file(path) as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _instead_of_a_file(path: Path) -> str:
    return {
        ".bin": "pickled weights are not read; use a checkpoint in safetensors format",
        ".safetensors": f"the folder: {path.parent}",
        ".json": f"the folder: {path.parent}",
    }.get(path.suffix, _MODELS)


def what_else(files: Iterable[str]) -> str | None:
    """Guess what a folder that is no checkpoint is, and say what to use instead."""
    files = list(files)
    if any(name.startswith("adapter_") for name in files):
        return "it looks like a LoRA adapter, which is not read: merge it into its base model and save that"
    if any(name.endswith(".gguf") for name in files):
        return "name one of the GGUF files"
    if pickle := next((name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), ""):
        return (
            "it looks like pickled PyTorch weights, and pickles are not read: use a checkpoint in safetensors format, "
            'or a converted copy: python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() '
            f"for k, v in torch.load('{pickle}', weights_only=True).items()}}, 'model.safetensors')\""
        )
    if any(name.endswith(".safetensors") for name in files):
        return "copy config.json (and tokenizer.json) from the model that the weights belong to"
    if "snapshots/" in files:
        return "it is a folder of the hub cache: use the folder in snapshots/, or the hub id"
    return None


def listed(names: Iterable[str], limit: int = _LISTED) -> str:
    """At most ``limit`` names, then the number of the rest."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(cut(name, _NAME) for name in names[:limit]) + more


def entries(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises: CheckpointError if they cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {why(error)}", try_="a folder of safetensors") from error


def _nothing_there(model: str, path: Path) -> CheckpointError:
    what, parent = "file" if path.suffix.lower() == ".gguf" else "folder", path.absolute().parent
    if os.path.isdir(parent) and os.access(parent, os.R_OK):
        models = (name for name in entries(parent) if name.endswith(".gguf") or os.path.isdir(parent / name))
        match = nearest(path.name, models)
        did_you_mean = f" Did you mean {str(path.parent / match)!r}?" if match else ""
        instead = _instead_of_a_file(path)
        if re.fullmatch(r"[A-Za-z][\w-]*", model):
            instead = 'a hub id with its organization, as in "openai-community/gpt2"; a folder; or "demo"'
        return CheckpointError(f"there is no {what} {model!r}.{did_you_mean}", looked_in=parent, try_=instead)
    while not os.path.exists(parent):
        parent = parent.parent
    return CheckpointError(f"there is no {what} {model!r}", exists_up_to=parent, try_=_MODELS)


# --- the hub -------------------------------------------------------------------------------------------------------


def _from_hub(model: str, revision: str | None) -> Path:
    import huggingface_hub as hub  # imported late: it is slow, and folders do not need it

    try:
        # fetch config.json first, to refuse an unusable repository before downloading gigabytes
        folder = hub.snapshot_download(model, revision=revision, allow_patterns=["config.json"])
        if not (Path(folder) / "config.json").is_file():
            raise CheckpointError(
                f"the hub model {model} is not a checkpoint: it has no config.json",
                page=f"https://huggingface.co/{model}/tree/{revision or 'main'}",
                try_="the model that it was made from, or a GGUF file that you download; no LoRA adapter is read",
            )
        folder = hub.snapshot_download(
            model, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)
        )
    except CheckpointError:
        raise
    except Exception as error:  # also a full disk, and HTTP errors, whose classes differ between hub versions
        raise _not_fetched(model, revision, error) from error
    return check_folder(Path(folder))


def _not_fetched(model: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub import constants, errors

    message, cure = f"the hub model {model} could not be fetched", "once more, or a folder"
    match error:  # a class before its bases
        case errors.GatedRepoError():
            message = f"the hub model {model} is gated: its owners ask you to accept their terms first"
            cure = f"accept the terms at https://huggingface.co/{model}, then `hf auth login` (or set HF_TOKEN)"
        case errors.RevisionNotFoundError():
            message = f"the hub model {model} has no revision {revision!r}"
            cure = "a branch, tag or commit of it, or none (main)"
        case errors.RepositoryNotFoundError():
            message = f"there is no model {model} on the hub (or it is private), and no folder of that name here"
            cure = "check the spelling, `hf auth login` for a private model, or ./path for a folder"
        case errors.LocalEntryNotFoundError():
            why, cure = "the hub cannot be reached", "a network connection (HTTPS_PROXY and HF_ENDPOINT are respected)"
            if constants.HF_HUB_OFFLINE:
                why, cure = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
            what = f"{model} (revision {revision})" if revision else model
            message = f"{what} is not (completely) in the hub cache, and {why}"
            cure = f'{cure}, a folder, or "demo"'
        case errors.HFValidationError():
            message, cure = f"{model!r} is neither a folder nor a hub id: {error}", _MODELS
    reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
    return CheckpointError(message, reason=reason, try_=cure)
