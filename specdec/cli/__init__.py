"""The command line: one file per command; plugins add theirs through ``specdec_commands(cli)``.

The only part of specdec that prints and that configures logging. Output goes to stdout, all else to stderr.
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

# Read by OpenMP when torch is first imported. Idle threads spin for some milliseconds by default, which takes the cores
# from the threads that work as soon as anything else runs on the machine; this is some ten microseconds.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")


@click.group(cls=output.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specdec")
@click.option("-v", "--verbose", count=True, help="Log more to stderr: -v for events, -vv for details.")
def main(verbose: int) -> None:
    """Speculative decoding: the same output, faster, or a reason why not."""
    output.configure(verbose)


for command in (accept, audit, bench, chat, check, doctor, generate, info, plugins, vocab):
    main.add_command(command)
