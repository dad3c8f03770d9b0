"""Build the token cache: ``python -m tools.train_demo.prepare``; run it once, before training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.train_demo.data import WindowSampler, held_out_prompts, load_documents
from tools.train_demo.tokenizer import encode_documents, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_DATA = REPOSITORY.parent / "shared" / "data"
DEFAULT_WORK = REPOSITORY / "build" / "train_demo"
DEFAULT_EXPORT = REPOSITORY / "specdec" / "demo"
PROMPTS_FILE = Path(__file__).with_name("held_out_prompts.json")
PROMPTS_PER_CLASS = 32


def build_cache(data_dir: Path, work_dir: Path, vocab_size: int) -> None:
    """Write tokenizer.json, train.npz and held_out.npz to ``work_dir``, and the held-out prompts next to this file."""
    work_dir.mkdir(parents=True, exist_ok=True)
    training, reserved = load_documents(data_dir)
    tokenizer = train_tokenizer(training, vocab_size)
    tokenizer.save(str(work_dir / "tokenizer.json"))
    for name, documents in (("train", training), ("held_out", reserved)):
        streams, starts = encode_documents(tokenizer, documents, seed=1)
        arrays = {f"tokens_{source}": stream for source, stream in streams.items()}
        arrays |= {f"starts_{source}": offsets for source, offsets in starts.items()}
        np.savez(work_dir / f"{name}.npz", **arrays)
        for source, stream in streams.items():
            characters = sum(len(d.text) for d in documents if d.source == source)
            counts = f"{len(starts[source]):6} documents {len(stream):9} tokens {characters:9} characters"
            print(f"{name:9} {source:11} {counts}")
    prompts = held_out_prompts(reserved, PROMPTS_PER_CLASS)
    PROMPTS_FILE.write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_sampler(work_dir: Path, name: str, length: int) -> WindowSampler:
    """A sampler over the cached stream ``name`` ("train" or "held_out")."""
    with np.load(work_dir / f"{name}.npz") as arrays:
        streams = {key.removeprefix("tokens_"): arrays[key] for key in arrays if key.startswith("tokens_")}
        starts = {key.removeprefix("starts_"): arrays[key] for key in arrays if key.startswith("starts_")}
    return WindowSampler(streams, starts, length)


def load_tokenizer(work_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(work_dir / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with the text files")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for the cache")
    parser.add_argument("--vocab-size", type=int, default=4096)
    arguments = parser.parse_args()
    build_cache(arguments.data, arguments.work, arguments.vocab_size)


if __name__ == "__main__":
    main()
