"""The process of ``specdec`` and ``python -m specdec``: its streams, and Ctrl-C while modules are imported."""

import gc
import sys

_OBJECTS = 50_000  # new ones before the collector looks for cycles; at 700 it runs again and again during imports


def run() -> None:
    """Run the command line, and exit with its status."""
    gc.set_threshold(_OBJECTS)
    try:
        from specdec.files.streams import prepare

        prepare()
        from specdec.cli import main

        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)


if __name__ == "__main__":
    run()
