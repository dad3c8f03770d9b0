"""``specdec vocab MODEL``: choose the token ids of a pruned draft head, from text or from the model's own outputs."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.config import Override, load_config
from specdec.errors import PromptError

if TYPE_CHECKING:
    from specdec.drafters.draft_vocabulary import DraftVocabulary, TokenCounts
    from specdec.pipeline import LanguageModel

PART = 1 << 18  # characters tokenised at a time; a part ends with a line


@click.command()
@click.argument("model")
@click.option("--text", "texts", metavar="FILE", multiple=True, help="Count the ids of a UTF-8 file; may be repeated.")
@click.option(
    "--generate", "prompts", metavar="FILE",
    help='Count the ids of greedy outputs: a prompt a line; a line in double quotes is a JSON string ("a\\nb").',
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", default=100_000, show_default=True,
    help="With --generate: tokens in all, shared equally by the prompts.",
)  # fmt: skip
@click.option("--chat", is_flag=True, help="With --generate: put prompts into the checkpoint's chat template.")
@click.option("--size", type=click.IntRange(1), metavar="N", default=16_384, show_default=True, help="Ids to keep.")
@click.option("-o", "--output", "file", metavar="OUT", required=True, type=click.Path(path_type=pathlib.Path))
@click.option(
    "-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: target.dtype=float32."
)
@output.json_option
def vocab(
    model: str,
    texts: tuple[str, ...],
    prompts: str | None,
    tokens: int,
    chat: bool,
    size: int,
    file: pathlib.Path,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Choose the token ids of a pruned draft head.

    Ids are ranked by how often they occur, equal counts by id; special tokens and single bytes are always kept, and ids
    that never occurred fill the rest, lowest first. The model's own outputs (--generate) cover more of what it will say
    than text does. Every tenth block of 256 tokens is not counted but measured: its share inside the first n ids is the
    coverage. Use the file with -s drafter.name=mtp -s drafter.vocabulary=OUT.
    """
    if bool(texts) == bool(prompts):
        raise click.UsageError("Give either --text or --generate.")
    if chat and not prompts:
        raise click.UsageError("--chat goes with --generate.")
    config = load_config(None, [*map(Override.parse, settings), Override(("target", "model"), model, "MODEL")])
    sources = [(name, _read(name)) for name in texts]
    asked = _prompts(prompts) if prompts else []

    import specdec
    from specdec.drafters.draft_vocabulary import TokenCounts, make_vocabulary

    with output.status(f"loading {model}"):
        lm = specdec.load(config=config)
    counts = TokenCounts(lm.info.vocab_size)
    make_vocabulary(counts, lm.tokenizer, lm.info, size, {})  # a size that cannot be had should not take an hour
    made: dict[str, Any]
    if texts:
        _count_texts(lm, sources, counts)
        made = {"text": [pathlib.Path(name).name for name in texts], "tokens": counts.total}
    else:
        _count_outputs(lm, asked, tokens, counts, chat=chat)
        made = {"generated_from": f"{len(asked)} prompts", "chat": chat, "tokens": counts.total}
    vocabulary = make_vocabulary(counts, lm.tokenizer, lm.info, size, made)
    vocabulary.write(file)
    if as_json:
        output.print_json({
            "file": str(file), "size": len(vocabulary.tokens), "vocab_size": vocabulary.vocab_size, "made": made,
            "seen": int((counts.counted > 0).sum()), "held_out": int(counts.held_out.sum()),
            "coverage": {str(n): share for n, share in vocabulary.coverage.items()},
        })  # fmt: skip
    else:
        _show(vocabulary, counts, file)


def _read(name: str) -> str:
    try:
        return pathlib.Path(name).read_bytes().decode()
    except OSError as error:
        raise PromptError(f"cannot read {name!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from error


def _prompts(name: str) -> list[str]:
    found = []
    for number, line in enumerate(_read(name).splitlines(), start=1):
        if line.startswith('"'):
            try:
                line = json.loads(line)
            except ValueError as error:
                raise PromptError(
                    f"{name!r}, line {number}, begins with a double quote and is no JSON string: {error}"
                ) from error
        if line.strip():
            found.append(line)
    if not found:
        raise PromptError(f"{name!r} has no prompts", try_="one prompt a line")
    return found


def _count_texts(lm: LanguageModel, sources: list[tuple[str, str]], counts: TokenCounts) -> None:
    with _progress("counting", sum(len(text) for _, text in sources)) as advance:
        for name, text in sources:
            if not text.strip():
                raise PromptError(f"{name!r} has no text")
            for part in _parts(text):
                counts.add(lm.tokenizer.encode(part, add_special=False))
                advance(len(part))


def _parts(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at + PART) + 1 or len(text)
        yield text[at:end]
        at = end


def _count_outputs(
    lm: LanguageModel, prompts: list[str], tokens: int, counts: TokenCounts, *, chat: bool
) -> None:  # fmt: skip
    share = -(-tokens // len(prompts))
    with _progress("generating", tokens) as advance:
        for prompt in prompts:
            result = lm.generate(prompt, chat=chat, max_new_tokens=min(share, tokens - counts.total), temperature=0.0)
            counts.add(result.tokens)
            advance(len(result.tokens))
            if counts.total >= tokens:
                return


@contextlib.contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; nothing when that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.progress import Progress

    with Progress(console=output.console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)


def _show(vocabulary: DraftVocabulary, counts: TokenCounts, file: pathlib.Path) -> None:
    console = output.console()
    seen = int((counts.counted > 0).sum())
    console.print(
        output.facts([
            ("file", str(file)),
            ("ids", f"{len(vocabulary.tokens)} of {vocabulary.vocab_size}"),
            ("counted", f"{output.count(counts.total, 'token')}, {output.count(seen, 'different id')}"),
            ("held out", output.count(int(counts.held_out.sum()), "token")),
        ])
    )  # fmt: skip
    if not vocabulary.coverage:
        click.echo("too little text to hold any out: the coverage is unknown", err=True)
        return
    table = output.table("ids", "coverage", right=("ids", "coverage"))
    for size, share in vocabulary.coverage.items():
        table.add_row(f"{size}", f"{share:.2%}{' *' if size == len(vocabulary.tokens) else ''}")
    console.print()
    console.print(table)
