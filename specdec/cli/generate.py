"""``specdec generate``: stream a continuation and report its speed and acceptance."""

from __future__ import annotations

import click

from specdec.cli import output
from specdec.cli.options import SAMPLE_PROMPT, PromptOptions, configured, ignore_eos, interruptible, prompted
from specdec.cli.run_report import report
from specdec.config import RunConfig
from specdec.errors import UnsupportedError


@click.command()
@prompted
@configured()
@click.option("--stop", multiple=True, metavar="S", help="End before this string; repeatable.")
@ignore_eos
@click.option("--strict-speculation", is_flag=True, help="Fail if no draft was verified.")
@output.json_option
@click.pass_context
def generate(
    ctx: click.Context, asked: PromptOptions, config: RunConfig, strict_speculation: bool, as_json: bool
) -> None:
    """Continue a prompt and report the speed.

    The text goes to stdout, the report to stderr. Without CONFIG and prompt, the embedded model continues a sample.
    The report counts accepted tokens by lookahead position; 0 is the next token. Ctrl-C ends the generation and keeps
    its output so far; a second Ctrl-C aborts.
    """
    prompt = asked.read(config)
    if prompt is SAMPLE_PROMPT:
        click.echo(prompt, err=True)

    import specdec

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    stream = lm.stream(prompt, chat=asked.chat)
    with interruptible(stream):
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
        result = stream.result
    data = result.to_dict()
    if as_json:
        output.print_json(data)
    else:
        click.echo()
        report(data)
    speculation = data["stats"]["speculation"]
    if strict_speculation and not speculation["active"]:
        raise UnsupportedError(
            "the generation ran without speculation",
            drafter=speculation["drafter"],
            reason=speculation["reason"],
            try_="another drafter (specdec plugins lists them), or leave out --strict-speculation",
        )
    if data["finish_reason"] == "interrupted":
        ctx.exit(output.INTERRUPTED)
