"""Put the output of a real ``specdec generate --stats`` into docs/getting-started.md. Run ``just sample-output``."""

from __future__ import annotations

import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "getting-started.md"
BEGIN, END = "<!-- output of `specdec generate`: begin -->\n", "<!-- output of `specdec generate`: end -->\n"


def output() -> str:
    """What a terminal shows, from the prompt on."""
    command = [sys.executable, "-m", "specdec", "generate", "--stats"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def main() -> None:
    """Replace the text between the two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}````text\n{output()}````\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
