"""The command line: one file per command; plugins add their own through ``specdec_commands(cli)``.

Only this package prints and configures logging. Output goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import click

from specdec._version import __version__
from specdec.cli import output
from specdec.cli.accept import accept
from specdec.cli.audit import audit
from specdec.cli.batch import batch
from specdec.cli.bench import bench
from specdec.cli.chat import chat
from specdec.cli.check import check
from specdec.cli.doctor import doctor
from specdec.cli.generate import generate
from specdec.cli.info import info
from specdec.cli.new import new
from specdec.cli.plugins import plugins
from specdec.cli.serve import serve
from specdec.cli.vocab import vocab


@click.group(cls=output.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specdec")
@click.option("-v", "--verbose", count=True, help="Log to stderr: -v choices and phases, -vv every cycle.")
def main(verbose: int) -> None:
    """Speculative decoding: the same output, faster, or a reason why not."""
    output.configure(verbose)


for command in (accept, audit, batch, bench, chat, check, doctor, generate, info, new, plugins, serve, vocab):
    main.add_command(command)
