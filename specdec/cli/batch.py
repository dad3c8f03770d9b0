"""``specdec batch FILE``: answer or continue many prompts at once, into JSON lines."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import sys

import click

from specdec.cli import output
from specdec.cli.measuring import check_writable
from specdec.cli.options import (
    FILE,
    PATH,
    are_messages,
    chat_option,
    configured,
    ignore_eos,
    integer,
    interruptible,
    load_model,
)
from specdec.config import RunConfig
from specdec.errors import SpecdecError, UnsupportedError


@click.command()
@click.option("--prompts", "prompts_file", metavar="FILE", type=FILE, required=True, help="Prompts; see below.")
@configured()
@ignore_eos
@integer("--max-batch", "Generations that run at once", 8, high=256)
@chat_option
@click.option("-o", "--output", "file", metavar="OUT", type=PATH, help="Write the results there, not to stdout.")
@click.pass_context
def batch(
    ctx: click.Context,
    config: RunConfig,
    prompts_file: str,
    max_batch: int,
    chat: bool | None,
    file: pathlib.Path | None,
) -> None:
    """Answer or continue many prompts at once.

    FILE has a prompt per line, or JSON lines such as {"class": "mail", "prompt": "Dear all,"}. Each result is a JSON
    line that names the line of its prompt ("source"), written when it ends. Each has the text that it has alone: the
    generations share the passes of the model, and nothing else. Where memory runs short, fewer run at once. A prompt
    that fails gives a line with its "error", and the exit status is 2. Ctrl-C ends those that run and writes what they
    have; a second Ctrl-C aborts.
    """
    from specdec.decoding.batch import Batch
    from specdec.measuring.prompts import load_prompts

    check_writable(file)
    if file is not None and file.exists() and file.samefile(prompts_file):
        raise UnsupportedError("the results would replace the prompts", file=file, try_="another file for -o")
    load_prompts(prompts_file)  # a mistake in it comes before the load
    lm = load_model(config)
    messages = are_messages(lm, chat)
    prompts = [prompt for group in load_prompts(prompts_file, chat=messages).values() for prompt in group]
    encoded = [prompt.encode(lm.tokenizer) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):  # before the file is opened
        with prompt.named():
            lm.check_fits(len(tokens))
    done = unfinished = 0
    failures: list[SpecdecError] = []
    running = Batch()
    begin = [functools.partial(lm.stream, tokens) for tokens in encoded]
    with (
        output.os_errors("the results cannot be written", file=file or "standard output"),
        contextlib.nullcontext(sys.stdout) if file is None else file.open("w", encoding="utf-8") as out,
        output.progress("reading prompts", silent=file is None, then="prompts") as advance,
        interruptible(running),
    ):
        for number, result in running.run(begin, max_batch):
            if isinstance(result, SpecdecError):
                failures.append(result)
                data = output.described(result)
            elif isinstance(result, Exception):  # a bug
                raise result
            else:
                unfinished += result.finish_reason == "interrupted"
                data = result.to_dict()
            out.write(json.dumps({"source": prompts[number].name, **data}) + "\n")
            out.flush()
            done += 1
            advance(done, len(prompts))
    if unfinished or done < len(prompts):
        finished = done - unfinished - len(failures)
        output.interrupted(ctx, f"{finished} of {len(prompts)} are finished, {unfinished} cut short")
    if failures:
        click.echo(f"{len(failures)} of {output.count(len(prompts), 'prompt')} failed, the first with:", err=True)
        raise failures[0]
