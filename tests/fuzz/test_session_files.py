"""Mutated session files: each is refused by one ``SessionFileError``, or goes on as the file that it was made from.

Half of the mutants get a new checksum, as a forger would write it, so that the checks behind the checksum are tested
too. A forger can also change what no check can know: token ids, and finite numbers of a state. Such a file is loaded,
and must then generate or raise an error of specdec's, nothing else.
"""

import collections
import functools
import json
import random
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch

import specdec
from specdec.decoding.session_file import _checksum
from specdec.errors import SessionFileError, SpecdecError
from tests import tiny_families
from tests.drafters import composed
from tests.fuzz.campaign import blocks
from tests.fuzz.mutations import Mutant, SafetensorsFile, mutate_json, mutate_safetensors

DESCRIPTION, CHECKSUM = "specdec.session", "specdec.checksum"
PROMPT = list(range(40, 52))
MORE = 5  # tokens that a loaded session generates
LONGEST = 2_000  # characters of a message
SETTINGS = ({}, {"temperature": 0.9, "seed": 3})
KINDS = (
    "hybrid, mtp",
    "hybrid, draft model",
    "hybrid, chain",
    "llama, ngram",
    "llama, draft model",
    "latent, mtp",
    "hybrid",
)


@attrs.frozen
class Subject:
    """A language model, the file of one of its sessions, and how that session goes on."""

    lm: Any
    data: bytes
    other: bytes  # the file of a longer session
    tokens: tuple[int, ...]
    truth: tuple[tuple[int, ...], ...]  # for each of SETTINGS

    @classmethod
    def of(cls, lm, folder):
        """A session in the middle of a text, with counters and extra data."""
        session, longer, file = lm.session(), lm.session(), folder / "file"
        session.extra = {"title": "a talk", "turns": [1, {"end": None}], "share": 0.5}
        session.generate(PROMPT, max_new_tokens=9, ignore_eos=True)
        longer.generate(PROMPT, max_new_tokens=17, ignore_eos=True)
        longer.save(file)
        other = file.read_bytes()
        session.save(file)
        data, truth = file.read_bytes(), []
        for settings in SETTINGS:
            resumed = lm.session()
            resumed.load(file)
            truth.append(resumed.generate(max_new_tokens=MORE, ignore_eos=True, **settings).tokens)
        return cls(lm, data, other, session.tokens, tuple(truth))


@pytest.fixture(scope="session")
def subjects(tmp_path_factory):
    """``subjects("llama, ngram")``: made once, and only if a seed asks for it."""
    folder = tmp_path_factory.mktemp("fuzzed")
    folders = functools.cache(lambda: composed.write_folders(folder))

    def load(kind):
        family, _, drafter = kind.partition(", ")
        model = folders().llama if family == "llama" else folders().target
        if family == "latent":
            model = str(tiny_families.write_deepseek_v3(folder / "latent"))
        table = {"name": drafter.replace(" ", "_") or "none"}
        if drafter == "draft model":
            table["model"] = folders().blurred if family == "hybrid" else folders().target
        if drafter == "chain":
            second = {"name": "draft_model", "model": folders().llama, "min_margin": 1.0}
            table = {"name": "first_of", "drafters": [second, {"name": "mtp"}]}
        return specdec.load(model, dtype="float32", depth=2, drafter=table)

    return functools.cache(lambda kind: Subject.of(load(kind), folder))


def mutated(rng, subject):
    """One mutant of a subject's file; the description is mutated as often as the rest together."""
    if rng.random() < 0.5:
        made = mutate_safetensors(rng, subject.data, subject.other)
    else:
        file = SafetensorsFile.parse(subject.data)
        inner = mutate_json(rng, json.loads(file.header["__metadata__"][DESCRIPTION]))
        file.header["__metadata__"][DESCRIPTION] = inner.data.decode()
        made = Mutant(f"description {inner.what}", file.pack())
    return attrs.evolve(made, what=f"{made.what}, sealed", data=sealed(made.data)) if rng.random() < 0.5 else made


def sealed(data):
    """The file with the checksum of its contents, if it can be read at all."""
    try:
        tensors = safetensors.torch.load(data)
        file = SafetensorsFile.parse(data)
        metadata = file.header["__metadata__"]
        metadata[CHECKSUM] = _checksum(metadata[DESCRIPTION], tensors)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError):
        return data
    return file.pack()


def outcome(rng, subject, mutant, file):
    """What loading a mutant led to: "refused", "equal" or, for what no check can know, "forged"."""
    file.write_bytes(mutant.data)
    session = subject.lm.session()
    session.feed([60, 61, 62])
    if message := raised(lambda: session.load(file), SessionFileError):
        assert (session.tokens, session.extra) == ((60, 61, 62), {})
        assert str(file) in message
        return "refused"
    settings, truth = rng.choice(list(zip(SETTINGS, subject.truth, strict=True)))
    if mutant.what.endswith("sealed") and contents(mutant.data) != contents(subject.data):
        raised(lambda: session.generate(max_new_tokens=MORE, ignore_eos=True, **settings))
        raised(lambda: session.fork().save(file))
        return "forged"
    assert session.tokens == subject.tokens
    assert session.generate(max_new_tokens=MORE, ignore_eos=True, **settings).tokens == truth
    return "equal"


def raised(call, kind=SpecdecError):
    """The message of an error of this kind, or "". Other errors are not caught."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        return ""
    assert 0 < len(message) <= LONGEST
    return message


def contents(data):
    """The numbers in the arrays of a file that was loaded."""
    arrays = safetensors.torch.load(data)
    return {
        name: (array.dtype, array.shape, array.reshape(-1).view(torch.uint8).tolist()) for name, array in arrays.items()
    }


@pytest.mark.parametrize("seeds", blocks())
def test_a_mutated_file_is_refused_or_goes_on_equally(seeds, subjects, tmp_path):
    found = collections.Counter()
    for seed in seeds:
        rng = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        subject = subjects(kind)
        mutant = mutated(rng, subject)
        try:
            found[outcome(rng, subject, mutant, tmp_path / "mutant")] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed} ({kind}): {mutant.what}") from error
    assert found["refused"] > len(seeds) // 4
