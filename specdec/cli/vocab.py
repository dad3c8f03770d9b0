"""``specdec vocab MODEL``: choose the token ids of a pruned draft head, from text or the model's own outputs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.cli.measuring import check_writable
from specdec.cli.options import (
    FILE,
    PATH,
    are_messages,
    chat_option,
    integer,
    interruptible,
    load_model,
    read_text,
    settings_option,
)
from specdec.config import Override, load_config
from specdec.errors import PromptError

if TYPE_CHECKING:
    from specdec.drafters.draft_vocabulary import DraftVocabulary
    from specdec.drafters.token_counts import TokenCounts
    from specdec.measuring.prompts import Prompt
    from specdec.pipeline import LanguageModel

PART = 1 << 18  # characters tokenised per step; parts end at line ends


@click.command()
@click.argument("model", type=FILE)
@click.option(
    "--text", "texts", metavar="FILE", type=FILE, multiple=True, help="Count ids in a UTF-8 file; may be repeated."
)
@click.option(
    "--generate",
    "prompts",
    metavar="FILE",
    type=FILE,
    help="Count ids in greedy outputs for the prompts in a file, as for accept.",
)
@integer("--tokens", "With --generate: total tokens, split equally between prompts", 100_000, high=None)
@chat_option
@integer("--size", "Ids to keep", 16_384)
@click.option("-o", "--output", "file", metavar="OUT", required=True, type=PATH)
@settings_option("target.dtype=float32")
@output.json_option
@click.pass_context
def vocab(
    ctx: click.Context,
    model: str,
    texts: tuple[str, ...],
    prompts: str | None,
    tokens: int,
    chat: bool | None,
    size: int,
    file: pathlib.Path,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Choose the token ids of a pruned draft head.

    Ranks ids by frequency, equal counts by id. Special tokens and single bytes are always kept; ids that never
    occurred fill the rest, lowest first. The model's own outputs (--generate) are more representative than other text.
    Every tenth block of 256 tokens is held out: the share of its tokens among the first n ids is the coverage. Use the
    file with -s drafter.name=mtp -s drafter.vocabulary=OUT.

    Ctrl-C ends --generate; the file then covers the tokens so far, and the exit status is 130.
    """
    from specdec.measuring.prompts import load_prompts

    if bool(texts) == bool(prompts):
        raise click.UsageError("Give either --text or --generate.")
    if chat is not None and not prompts:
        raise click.UsageError("--chat and --raw go with --generate.")
    config = load_config(None, [*map(Override.parse, settings), Override(("target", "model"), model, "MODEL")])
    sources = {name: read_text(name) for name in texts}
    if prompts is not None:
        load_prompts(prompts)  # a mistake in it comes before the load
    check_writable(file)

    from specdec.drafters.token_counts import TokenCounts, make_vocabulary

    lm = load_model(config)
    counts = TokenCounts(lm.info.vocab_size)
    make_vocabulary(counts, lm.tokenizer, lm.info, size, {})  # reject an impossible size before an hour of work
    origin: dict[str, Any] = {"text": [pathlib.Path(name).name for name in texts]}
    interrupted = False
    if prompts is None:
        _count_texts(lm, sources, counts)
    else:
        chat = are_messages(lm, chat)
        chosen = [prompt for group in load_prompts(prompts, chat=chat).values() for prompt in group]
        origin = {"generated_from": f"{len(chosen)} prompts", "chat": chat}
        interrupted = _count_outputs(lm, chosen, tokens, counts)
        if interrupted and not counts.total:
            output.interrupted(ctx, "nothing was generated, so no file was written")
    origin["tokens"] = counts.total
    vocabulary = make_vocabulary(counts, lm.tokenizer, lm.info, size, origin)
    vocabulary.write(file)
    if as_json:
        output.print_json(
            {
                "file": str(file),
                "size": len(vocabulary.tokens),
                "vocab_size": vocabulary.vocab_size,
                "made": origin,
                "seen": _seen(counts),
                "held_out": int(counts.held_out.sum()),
                "coverage": {str(n): share for n, share in vocabulary.coverage.items()},
            }
        )
    else:
        _show(vocabulary, counts, file)
    if interrupted:
        output.interrupted(ctx, f"this covers {counts.total} of {tokens} tokens")


def _count_texts(lm: LanguageModel, sources: Mapping[str, str], counts: TokenCounts) -> None:
    done, planned = 0, sum(map(len, sources.values()))
    with output.progress("counting", then="counting") as advance:
        for name, text in sources.items():
            if not text.strip():
                raise PromptError(f"{name!r} has no text", try_="a file such as the model will write")
            for part in _parts(text):
                counts.add(lm.tokenizer.encode(part, add_special=False))
                done += len(part)
                advance(done, planned)


def _parts(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at + PART) + 1 or len(text)
        yield text[at:end]
        at = end


def _count_outputs(lm: LanguageModel, prompts: list[Prompt], tokens: int, counts: TokenCounts) -> bool:
    """Count greedy outputs, an equal share of the tokens from each prompt; returns whether it was interrupted.

    An interrupted generation's tokens count too.
    """
    from specdec.measuring.runs import Generations

    share = -(-tokens // len(prompts))
    outputs = Generations()
    with interruptible(outputs), output.progress("generating") as advance:
        for prompt in prompts:
            length = min(share, tokens - counts.total)
            if outputs.stopping or length <= 0:
                break
            stream = lm.stream(prompt.encode(lm.tokenizer), max_new_tokens=length, temperature=0.0)
            outputs.started(stream)
            counts.add(stream.result.tokens)
            advance(counts.total, tokens)
    return outputs.stopping


def _show(vocabulary: DraftVocabulary, counts: TokenCounts, file: pathlib.Path) -> None:
    console = output.console()
    rows = [
        ("file", str(file)),
        ("ids", f"{len(vocabulary.tokens)} of {vocabulary.vocab_size}"),
        ("counted", f"{output.count(counts.total, 'token')}, {output.count(_seen(counts), 'different id')}"),
        ("held out", output.count(int(counts.held_out.sum()), "token")),
    ]
    console.print(output.facts(rows))
    if not vocabulary.coverage:
        click.echo("too little text to hold any out; the coverage is unknown", err=True)
        return
    shares = [
        (str(size), f"{share:.2%}{' *' if size == len(vocabulary.tokens) else ''}")
        for size, share in vocabulary.coverage.items()
    ]
    console.print()
    console.print(output.table(("ids", "coverage"), shares, left=()))


def _seen(counts: TokenCounts) -> int:
    return int((counts.counted > 0).sum())
