"""Mutated checkpoints and configurations: each loads as any other does, or is refused by one message.

No traceback, no hang, no message of more than 2,000 characters, no memory beyond what the checkpoint itself takes. A
mutant that loads is another checkpoint (a weight or an id differs); its weights were checked like any other's.
``campaign.py`` says how many seeds are tried.
"""

import functools
import random
import shutil

import pytest

from tests.fuzz import checkpoint_mutants
from tests.fuzz.campaign import blocks
from tests.fuzz.loading_process import Loader

MEMORY = 96 * 2**20  # bytes: libraries' buffers, and the limit of what a text file may hold
SHARE = 20  # times the folder's bytes: packed weights become float32, headers Python objects


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """``subject("hybrid")``: the folder of a sound checkpoint, written once."""
    folder = tmp_path_factory.mktemp("subjects")
    return functools.cache(
        lambda name: checkpoint_mutants.SUBJECTS[name](folder / name.replace(", ", "-").replace(" ", "-"))
    )


@pytest.fixture(scope="module")
def loader(subject):
    loader = Loader(subject("hybrid"))
    yield loader
    loader.close()


def bytes_of(path):
    """What the files of a folder take on the disk; a sparse file takes little."""
    return sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoint_mutants.SUBJECTS)
def test_every_subject_is_sound(name, subject, loader):
    """Otherwise every mutant below could be refused for another reason."""
    assert loader.attempt(subject(name))["outcome"] == "loaded"


@pytest.mark.parametrize("seeds", blocks())
def test_a_mutated_checkpoint_or_configuration(seeds, subject, loader, tmp_path):
    found = []
    for seed in seeds:
        rng = random.Random(f"checkpoint {seed}")
        source = subject(rng.choice(list(checkpoint_mutants.SUBJECTS)))
        if rng.random() < 0.15:
            path = tmp_path / "run.toml"
            what = checkpoint_mutants.write_configuration(rng, path, source)
            size = bytes_of(source)
        else:
            path = checkpoint_mutants.copy(source, tmp_path / "mutant")
            what = checkpoint_mutants.mutate_folder(rng, path)
            size = bytes_of(path)
        report = loader.attempt(path)
        if report["outcome"].startswith("bug"):
            found.append(f"seed {seed}, {source.name}, {what}: {report['outcome']}")
        if report["grown"] > MEMORY + SHARE * size:
            found.append(f"seed {seed}, {source.name}, {what}: {report['grown']:,} bytes for {size:,}")
    shutil.rmtree(tmp_path / "mutant", ignore_errors=True)
    assert not found, "\n\n".join(found)
