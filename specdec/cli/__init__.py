"""The command line: one file per command; plugins add their own through ``specdec_commands(cli)``.

Only this package prints and configures logging. Output goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os

import click

from specdec._version import __version__
from specdec.cli import output
from specdec.cli.accept import accept
from specdec.cli.audit import audit
from specdec.cli.bench import bench
from specdec.cli.chat import chat
from specdec.cli.check import check
from specdec.cli.doctor import doctor
from specdec.cli.generate import generate
from specdec.cli.info import info
from specdec.cli.plugins import plugins
from specdec.cli.vocab import vocab

# OpenMP reads this when torch is first imported. Idle threads spin for milliseconds by default, which starves working
# threads on a busy machine; this makes them spin for about ten microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")


@click.group(cls=output.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specdec")
@click.option("-v", "--verbose", count=True, help="Log more to stderr: -v for events, -vv for details.")
def main(verbose: int) -> None:
    """Speculative decoding: the same output, faster, or a reason why not."""
    output.configure(verbose)


for command in (accept, audit, bench, chat, check, doctor, generate, info, plugins, vocab):
    main.add_command(command)
