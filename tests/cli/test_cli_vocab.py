"""``specdec vocab``: ids by count from text or outputs, the file it writes, and bad input told without a traceback."""

import collections
import json
import signal

import pytest

import specdec
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.drafters.token_counts import BLOCK, HELD_OUT, always_kept

TEXT = "".join(f"def area_{i}(width, height):\n    return width * height  # line {i}\n\n\n" for i in range(400))


@pytest.fixture
def lm(loaded_once):
    return specdec.load("demo")


@pytest.fixture
def run(invoke, loaded_once):
    return lambda *args: invoke("vocab", *args)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_from_text(run, lm, text, tmp_path):
    out = tmp_path / "v.json"
    done = run("demo", "--text", text, "--size", 600, "-o", out, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    made = DraftVocabulary.read(out)
    assert (told["size"], len(made.tokens), made.vocab_size) == (600, 600, lm.info.vocab_size)
    made.check(lm.info, lm.tokenizer, out)
    assert made.model == lm.info.fingerprint
    # the same counts, by hand
    ids = lm.tokenizer.encode(TEXT, add_special=False)
    blocks = [ids[at : at + BLOCK] for at in range(0, len(ids), BLOCK)]
    held = [token for i, block in enumerate(blocks) if i % HELD_OUT == HELD_OUT - 1 for token in block]
    counted = collections.Counter(ids)
    counted.subtract(held)
    always = set(always_kept(lm.tokenizer))
    wanted = sorted(range(lm.tokenizer.vocab_size), key=lambda t: (t not in always, -counted[t], t))
    assert list(made.tokens) == wanted[:600]
    inside = set(wanted[:600])
    assert told["coverage"]["600"] == pytest.approx(sum(t in inside for t in held) / len(held))
    assert told["held_out"] == len(held)
    assert told["made"] == {"text": ["text.txt"], "tokens": len(ids)}
    assert always >= {*lm.tokenizer.special_ids, *lm.tokenizer.eos_ids}


def test_the_table(run, text, tmp_path):
    done = run("demo", "--text", text, "--text", text, "--size", 512, "-o", tmp_path / "v.json")
    assert done.exit_code == 0, done.output
    assert "coverage" in done.stdout
    assert " *" in done.stdout
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    done = run("demo", "--text", short, "--size", 512, "-o", tmp_path / "v.json")
    assert done.exit_code == 0
    assert "the coverage is unknown" in done.stderr


def test_an_interruption_keeps_what_was_counted(run, lm, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "v.json"
    prompts.write_text("The first railway\nIn the year\nOnce upon\n")
    stream, streams = type(lm).stream, []

    def interrupted(self, *args, **kwargs):
        streams.append(args)
        if len(streams) == 2:
            signal.raise_signal(signal.SIGINT)
        return stream(self, *args, **kwargs)

    monkeypatch.setattr(type(lm), "stream", interrupted)
    done = run("demo", "--generate", prompts, "--tokens", 60, "--size", 600, "-o", out)
    assert done.exit_code == 130
    assert "interrupted: this covers 20 of 60 tokens" in done.stderr
    assert DraftVocabulary.read(out).made["tokens"] == 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    out.unlink()
    streams[:] = [()]  # the next one is the second again: interrupted at once, there is nothing to keep
    done = run("demo", "--generate", prompts, "--tokens", 60, "--size", 600, "-o", out)
    assert done.exit_code == 130
    assert "nothing was generated" in done.stderr
    assert not out.exists()
