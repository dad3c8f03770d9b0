"""``specdec serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
import pathlib
import shlex
from collections.abc import Sequence

import click

from specdec.cli import output
from specdec.cli.measuring import plain_milliseconds
from specdec.cli.options import NAME, SAMPLE_PROMPT, TEXT, Number, configured, integer, load_model, refuse
from specdec.config import RunConfig
from specdec.errors import ConfigError, import_extra
from specdec.serving import is_loopback

ANSWER_TOKENS = 1024
_OWN_SETTINGS = ("queue", "parallel", "most_tokens", "most_prompt", "keep", "answers", "grace")
NEEDED = ("pydantic", "starlette", "uvicorn", "prometheus_client")


def check_access(host: str, api_key: str | None) -> None:
    """Raises: ConfigError for an address that others can reach without a key, or a key that no header can carry."""
    if not is_loopback(host) and not api_key:
        raise ConfigError(
            f"--host {host!r} can be reached from other machines, and there is no API key",
            try_="SPECDEC_API_KEY=... in the environment, or the default host",
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.split() == [api_key]):
        raise ConfigError("the API key takes printable ASCII characters without spaces", try_="openssl rand -hex 16")


def _vllm(config: RunConfig, names: Sequence[str], host: str, port: int, start: bool) -> None:
    """Print vLLM's command, or become it; an API key goes by its own variable, which ``ps`` does not show."""
    from specdec.serving.vllm import vllm_command

    words, notes = vllm_command(config, names=names, host=host, port=port)
    key = click.get_current_context().params["api_key"]
    if key and not start:
        notes.append("the command has no API key: put it into VLLM_API_KEY before you run it")
    output.lines(output.console(stderr=True), "note", notes)
    if not start:
        click.echo(shlex.join(words))
        return
    with output.os_errors("vLLM cannot be started", try_="pip install vllm"):
        os.execvpe(words[0], words, {**os.environ, **({"VLLM_API_KEY": key} if key else {})})


def served_name(model: str) -> str:
    """The name of a model in requests: of a folder or file, its last part, because a path is nobody else's business."""
    return pathlib.Path(model).resolve().name if model != "demo" and pathlib.Path(model).exists() else model


@click.command()
@configured("Tokens per response if the request names no number", new_tokens=ANSWER_TOKENS)
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="NAME",
    type=TEXT,
    help="Address to listen on; other than loopback needs --api-key.",
)
@integer("--port", "Port; 0 picks a free one", 8000, low=0, high=65535)
@click.option(
    "--api-key",
    envvar="SPECDEC_API_KEY",
    metavar="KEY",
    type=TEXT,
    help="Key that requests must carry. Better as SPECDEC_API_KEY: other users see the command line.",
)
@click.option(
    "--served-model-name",
    "names",
    metavar="NAME",
    type=NAME,
    multiple=True,
    help="The model's name in requests (default: its own), repeatable.",
)
@integer("--queue", "Maximum waiting requests", 16, low=0, high=10_000)
@integer(
    "--parallel",
    "Requests generated at once, each with the text that it has alone (default: by the cost table, 4 to 16)",
    high=256,
)
@integer("--most-tokens", "Maximum tokens per response", 4096)
@integer("--most-prompt", "Maximum tokens per prompt")
@integer("--keep", "MiB of memory for idle sessions", 1024, low=0)
@integer(
    "--answers",
    "Draft from the last N tokens of finished answers too. Clients can tell from the time what others were answered: "
    "only for clients that trust each other",
    0,
    low=0,
    high=1_000_000,
)
@click.option("--engine", type=click.Choice(["specdec", "vllm"]), default="specdec", help="vllm: print its command.")
@click.option("--run", "start", is_flag=True, help="With --engine vllm: replace this process with it.")
@click.option(
    "--grace",
    default=30.0,
    type=Number(min=0.0, max=3600.0),
    metavar="S",
    help="Seconds to finish running requests on shutdown (default 30).",
)
def serve(
    config: RunConfig,
    host: str,
    port: int,
    api_key: str | None,
    names: tuple[str, ...],
    queue: int,
    parallel: int | None,
    most_tokens: int,
    most_prompt: int | None,
    keep: int,
    answers: int,
    engine: str,
    start: bool,
    grace: float,
) -> None:
    """Serve a model to OpenAI's clients.

    The address goes to stdout as soon as the server answers: /v1/chat/completions, /v1/completions, /v1/models,
    /tokenize, /detokenize, /health, /metrics, and a page for a browser at /. Requests begin in the order of their
    arrival, and up to --parallel of them share the passes of the model. The first Ctrl-C lets running answers end.
    """
    if start and engine != "vllm":
        raise click.UsageError("--run is for --engine vllm.")
    check_access(host, api_key)
    names = names or (served_name(config.target.model),)
    if engine == "vllm":
        refuse(_OWN_SETTINGS, "with --engine vllm it has no effect.")
        _vllm(config, names, host, port, start)
        return
    for module in NEEDED:
        import_extra(module, "serve")
    from specdec.decoding.cycle_timing import sequences_that_pay
    from specdec.serving.app import Service
    from specdec.serving.engine import Engine
    from specdec.serving.metrics import Metrics
    from specdec.serving.server import listening_socket, share_memory
    from specdec.serving.server import serve as run

    share_memory()
    with listening_socket(host, port) as listening:
        lm = load_model(config)
        plain_ms = plain_milliseconds(lm)
        parallel = parallel or sequences_that_pay(lm)
        metrics = Metrics()
        service = Service(
            lm=lm,
            names=names,
            engine=Engine(
                lm, metrics, most_waiting=queue, parallel=parallel, kept_bytes=keep * 2**20, answer_tokens=answers
            ),
            metrics=metrics,
            most_prompt=most_prompt,
            most_tokens=most_tokens,
            api_key=api_key or "",
            local=is_loopback(host),
            plain_ms=plain_ms,
            prompt=SAMPLE_PROMPT,
        )
        output.lines(output.console(stderr=True), "note", lm.notices)
        address, used = listening.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{used}"

        def ready() -> None:
            click.echo(f"a page that shows how each token came to be: {url}/", err=True)
            click.echo(f"{url}/v1")

        run(service, listening, grace=grace, ready=ready, say=lambda text: click.echo(text, err=True))
