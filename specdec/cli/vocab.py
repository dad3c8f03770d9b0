"""``specdec vocab MODEL``: choose the token ids of a pruned draft head, from text or from the model's own outputs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.cli.measuring import check_writable, progress
from specdec.cli.run_options import interruptible
from specdec.config import Override, load_config
from specdec.errors import PromptError

if TYPE_CHECKING:
    from specdec.decoding.stream import Stream
    from specdec.drafters.draft_vocabulary import DraftVocabulary, TokenCounts
    from specdec.pipeline import LanguageModel

PART = 1 << 18  # characters tokenised at a time; a part ends with a line


@click.command()
@click.argument("model")
@click.option("--text", "texts", metavar="FILE", multiple=True, help="Count the ids of a UTF-8 file; may be repeated.")
@click.option(
    "--generate",
    "prompts",
    metavar="FILE",
    help='Count the ids of greedy outputs: a prompt a line; a line in double quotes is a JSON string ("a\\nb").',
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    metavar="N",
    default=100_000,
    show_default=True,
    help="With --generate: tokens in all, shared equally by the prompts.",
)
@click.option("--chat", is_flag=True, help="With --generate: put prompts into the checkpoint's chat template.")
@click.option("--size", type=click.IntRange(1), metavar="N", default=16_384, show_default=True, help="Ids to keep.")
@click.option("-o", "--output", "file", metavar="OUT", required=True, type=click.Path(path_type=pathlib.Path))
@click.option(
    "-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: target.dtype=float32."
)
@output.json_option
@click.pass_context
def vocab(
    ctx: click.Context,
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

    Ctrl-C ends --generate; the file then is of the tokens so far, and the exit status is 130.
    """
    if bool(texts) == bool(prompts):
        raise click.UsageError("Give either --text or --generate.")
    if chat and not prompts:
        raise click.UsageError("--chat goes with --generate.")
    config = load_config(None, [*map(Override.parse, settings), Override(("target", "model"), model, "MODEL")])
    sources = [(name, _read(name)) for name in texts]
    asked = _prompts(prompts) if prompts else []
    check_writable(file)

    import specdec
    from specdec.drafters.draft_vocabulary import TokenCounts, make_vocabulary

    with output.status(f"loading {model}"):
        lm = specdec.load(config=config)
    counts = TokenCounts(lm.info.vocab_size)
    make_vocabulary(counts, lm.tokenizer, lm.info, size, {})  # a size that cannot be had should not take an hour
    made: dict[str, Any]
    interrupted = False
    if texts:
        _count_texts(lm, sources, counts)
        made = {"text": [pathlib.Path(name).name for name in texts], "tokens": counts.total}
    else:
        outputs = _Outputs(lm, asked, tokens, counts, chat=chat)
        with interruptible(outputs):
            outputs.count()
        interrupted = outputs.stopping
        if interrupted and not counts.total:
            click.echo("interrupted: nothing was generated, so no file was written", err=True)
            ctx.exit(output.INTERRUPTED)
        made = {"generated_from": f"{len(asked)} prompts", "chat": chat, "tokens": counts.total}
    vocabulary = make_vocabulary(counts, lm.tokenizer, lm.info, size, made)
    vocabulary.write(file)
    if as_json:
        output.print_json(
            {
                "file": str(file),
                "size": len(vocabulary.tokens),
                "vocab_size": vocabulary.vocab_size,
                "made": made,
                "seen": int((counts.counted > 0).sum()),
                "held_out": int(counts.held_out.sum()),
                "coverage": {str(n): share for n, share in vocabulary.coverage.items()},
            }
        )
    else:
        _show(vocabulary, counts, file)
    if interrupted:
        click.echo(f"interrupted: this is of {counts.total} of {tokens} tokens", err=True)
        ctx.exit(output.INTERRUPTED)


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
    done, planned = 0, sum(len(text) for _, text in sources)
    with progress("counting", then="counting") as advance:
        for name, text in sources:
            if not text.strip():
                raise PromptError(f"{name!r} has no text")
            for part in _parts(text):
                counts.add(lm.tokenizer.encode(part, add_special=False))
                done += len(part)
                if advance is not None:
                    advance(done, planned)


def _parts(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at + PART) + 1 or len(text)
        yield text[at:end]
        at = end


class _Outputs:
    """Greedy outputs of a model under way, counted prompt by prompt; ``stop`` ends it and keeps what was counted."""

    def __init__(self, lm: LanguageModel, prompts: list[str], tokens: int, counts: TokenCounts, *, chat: bool) -> None:
        self._lm, self._prompts, self._tokens, self._counts, self._chat = lm, prompts, tokens, counts, chat
        self._stream: Stream | None = None
        self.stopping = False

    def stop(self) -> None:
        """End after the present cycle; safe from a signal handler."""
        self.stopping = True
        if self._stream is not None:
            self._stream.stop()

    def count(self) -> None:
        """Generate from each prompt its share of the tokens."""
        counts, tokens = self._counts, self._tokens
        share = -(-tokens // len(self._prompts))
        with progress("generating") as advance:
            for prompt in self._prompts:
                if self.stopping or counts.total >= tokens:
                    return
                length = min(share, tokens - counts.total)
                self._stream = self._lm.stream(prompt, chat=self._chat, max_new_tokens=length, temperature=0.0)
                if self.stopping:  # the signal came before there was a stream to stop
                    self._stream.stop()
                counts.add(self._stream.result.tokens)
                if advance is not None:
                    advance(counts.total, tokens)


def _show(vocabulary: DraftVocabulary, counts: TokenCounts, file: pathlib.Path) -> None:
    console = output.console()
    seen = int((counts.counted > 0).sum())
    console.print(
        output.facts(
            [
                ("file", str(file)),
                ("ids", f"{len(vocabulary.tokens)} of {vocabulary.vocab_size}"),
                ("counted", f"{output.count(counts.total, 'token')}, {output.count(seen, 'different id')}"),
                ("held out", output.count(int(counts.held_out.sum()), "token")),
            ]
        )
    )
    if not vocabulary.coverage:
        click.echo("too little text to hold any out: the coverage is unknown", err=True)
        return
    table = output.table("ids", "coverage", right=("ids", "coverage"))
    for size, share in vocabulary.coverage.items():
        table.add_row(f"{size}", f"{share:.2%}{' *' if size == len(vocabulary.tokens) else ''}")
    console.print()
    console.print(table)
