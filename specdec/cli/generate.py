"""``specdec generate``: stream a continuation, then say how fast it was and what was accepted."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from specdec.cli import output
from specdec.cli.run_options import SAMPLE_PROMPT, flag_overrides, interruptible, prompt_of
from specdec.cli.run_report import report
from specdec.config import load_config
from specdec.errors import UnsupportedError


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=pathlib.Path))
@click.option("-p", "--prompt", help="Text to continue.")
@click.option("--prompt-file", metavar="FILE", help="A UTF-8 file with the text to continue; - for stdin.")
@click.option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template.")
@click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...')
@click.option("-n", "--max-new-tokens", type=int, metavar="N", help="How many tokens at most.")
@click.option("-t", "--temperature", type=float, metavar="X", help="0 is greedy.")
@click.option("--seed", type=int, metavar="S", help="One seed, one output.")
@click.option("--stop", multiple=True, metavar="S", help="End before this string; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: depth.depth=4.")
@click.option("--strict-speculation", is_flag=True, help="Fail when no draft was verified.")
@output.json_option
@click.pass_context
def generate(
    ctx: click.Context,
    config_file: pathlib.Path | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_tokens: str | None,
    chat: bool,
    model: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    settings: tuple[str, ...],
    strict_speculation: bool,
    as_json: bool,
) -> None:
    """Continue a prompt and report the speed.

    The text goes to stdout, the report to stderr. Without CONFIG and prompt, the embedded model continues a sample.
    The report counts accepted tokens by lookahead position; 0 is the next token. Ctrl-C ends the generation and keeps
    what there is; a second Ctrl-C aborts.
    """
    flags: dict[str, Any] = {
        "target.model": model,
        "generation.max_new_tokens": max_new_tokens,
        "generation.temperature": temperature,
        "generation.seed": seed,
        "generation.stop": list(stop) or None,
        "generation.ignore_eos": ignore_eos or None,
    }
    config = load_config(config_file, [*settings, *flag_overrides(flags)])
    given = prompt_of(prompt, prompt_file, prompt_tokens, config)
    if chat and not isinstance(given, str):
        raise click.UsageError("--chat takes text, not --prompt-tokens.")
    if given is SAMPLE_PROMPT:
        click.echo(f"no prompt given: continuing a sample\n{SAMPLE_PROMPT}", err=True)

    import specdec

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    stream = lm.stream(given, chat=chat)
    with interruptible(stream):
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
        result = stream.result
    told = result.to_dict()
    if as_json:
        output.print_json(told)
    else:
        click.echo()
        report(told)
    speculation = told["stats"]["speculation"]
    if strict_speculation and not speculation["active"]:
        raise UnsupportedError(
            "the generation ran without speculation",
            drafter=speculation["drafter"],
            reason=speculation["reason"],
            **{"try": "another drafter (specdec plugins lists them), or leave out --strict-speculation"},
        )
    if told["finish_reason"] == "interrupted":
        ctx.exit(output.INTERRUPTED)
