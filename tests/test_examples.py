"""Properties of the examples of the tutorials. ``test_docs.py`` runs the tutorials, and the kit on each."""

import importlib
import pathlib

import pytest

from specdec.config import load_config, structure_options
from specdec.contract import Context
from specdec.errors import ConfigError
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.testing import check_plugin

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = (
    "first_drafter",
    "first_verifier",
    "first_depth_policy",
    "first_logits_processor",
    "first_observer",
    "first_backend",
    "first_target",
)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The built-in plugins and the examples, as if they were installed; put in place of the process's own."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    made = Registry(BUILT_INS, entry_points=(), strict=True)
    for name in EXAMPLES:
        module = importlib.import_module(name)
        made.register(module.CycleLog() if name == "first_observer" else module, name)
    former = use_registry(made)
    yield made
    use_registry(former)


def test_the_drafter_repeats_what_it_saw():
    from first_drafter import EchoConfig, EchoDrafter

    drafter = EchoDrafter(EchoConfig(), None)
    assert drafter.propose(Context([7, 8, 9]), 5).tokens == (8, 9, 8, 9, 8)
    assert drafter.propose(Context([7]), 3).tokens == (7, 7, 7)
    assert drafter.propose(Context([7, 8]), 0).tokens == ()


def test_the_backend_generates_what_the_cpu_backend_does():
    """With drafts and without."""
    import specdec

    settings = {"max_new_tokens": 16, "ignore_eos": True}
    lms = [
        specdec.load("demo", backend=backend, dtype="float32", drafter=drafter, depth=2)
        for backend, drafter in (("numpy", "mtp"), ("numpy", "none"), ("cpu", "none"))
    ]
    drafted, *others = (lm.generate("0, 0, 0, 0,", **settings) for lm in lms)
    assert drafted.guarantee == "exact"
    assert sum(drafted.stats.accepted) > 0
    assert all(other.tokens == drafted.tokens for other in others)


def test_the_target_needs_no_checkpoint(tmp_path):
    """By configuration and from Python, with any text as the model; drafts change nothing; a session goes through a
    file; the kit finds it by its name."""
    import specdec

    settings = {"max_new_tokens": 40, "temperature": 0.7, "seed": 3}
    plain = specdec.load("any text", backend="markov", drafter="none", depth=0)
    (tmp_path / "run.toml").write_text('[target]\nmodel = "not a folder"\nbackend = "markov"\n')
    drafted = specdec.load(config=load_config(tmp_path / "run.toml"), drafter="ngram", depth=4)
    wanted, got = (lm.generate("the dog ", **settings) for lm in (plain, drafted))
    assert (got.text, got.guarantee, got.notices) == (wanted.text, "exact", [])
    assert len(got.text) == 40
    assert sum(got.stats.accepted) > 0
    session, later = drafted.session(), drafted.session()
    session.generate("the cat ", max_new_tokens=5)
    session.save(tmp_path / "turn.safetensors")
    later.load(tmp_path / "turn.safetensors")
    assert later.generate(max_new_tokens=20).text == session.generate(max_new_tokens=20).text
    assert check_plugin("markov", effort="sample").raise_for_failures().outcomes


@pytest.mark.parametrize(("table", "option"), [("drafter", "period"), ("verifier", "k"), ("depth", "deepest")])
def test_a_wrong_option_is_refused_with_its_key(table, option, registry):
    name = {"drafter": "echo", "verifier": "top", "depth": "streak"}[table]
    choice = getattr(load_config(None, [f"{table}.name={name}", f"{table}.{option}=0"]), table)
    with pytest.raises(ConfigError, match=rf"{table}\.{option}"):
        structure_options(
            choice.options, getattr(registry, {"depth": "depth_policy"}.get(table, table))(name).config, table
        )
