"""The examples of the tutorials run, and the tutorials include them and name them right."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import load_config, structure_choice
from specdec.contract import Context, DrafterEnv, Guarantee, NoConfig, Sampling
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.statistics import RunStats
from specdec.drafters.none import NoDrafter
from specdec.errors import ConfigError, UnsupportedError
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.testing import TableModel, parametrize_checks
from specdec.verifiers.strict import StrictVerifier
from tests.processes import run_python

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "specdec" / "demo" / "config.json"
EXAMPLES = ("first_drafter", "first_verifier", "first_observer", "first_backend")
LENGTH = 40


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


def generate(registry, *, drafter=None, verifier=None, depth=4, temperature=0.0, seed=0):
    """Tokens and counters of a generation on a toy target; every cycle is shown to the observers."""
    target = TableModel.random(5, order=2, seed=seed, peak=0.3)
    tokens, state, stats = [1, 2], target.new_state(LENGTH + 32), RunStats()
    target.prefill(state, tokens[:-1])
    env = DrafterEnv(target=target, state=state)
    sequence = LiveSequence(
        target=target,
        state=state,
        drafter=NoDrafter(NoConfig(), env) if drafter is None else drafter(env),
        verifier=verifier or StrictVerifier(),
        tokens=tokens,
        context=Context(tokens, Sampling(temperature=temperature, seed=seed), generated_from=2),
    )
    loop = DecodingLoop(sequence, len, stats, stop_tokens=(), ahead=False)
    while len(tokens) < LENGTH:
        registry.notify_cycle(loop.step(depth, LENGTH + 32 - len(tokens)))
    loop.close()
    assert sequence.failure == ""
    assert stats.faults == {}
    return tokens[:LENGTH], stats


def echo(env):
    from first_drafter import EchoConfig, EchoDrafter

    return EchoDrafter(EchoConfig(), env)


def top(k):
    from first_verifier import TopConfig, TopVerifier

    return TopVerifier(TopConfig(k=k))


def test_the_drafter_repeats_what_it_saw():
    drafter = echo(None)
    assert drafter.propose(Context([7, 8, 9]), 5).tokens == (8, 9, 8, 9, 8)
    assert drafter.propose(Context([7]), 3).tokens == (7, 7, 7)
    assert drafter.propose(Context([7, 8]), 0).tokens == ()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(6))
def test_the_drafter_changes_no_output(registry, seed, temperature):
    plain, _ = generate(registry, seed=seed, temperature=temperature)
    assert generate(registry, drafter=echo, seed=seed, temperature=temperature)[0] == plain


@given(seed=st.integers(0, 50))
def test_the_verifier_keeps_the_k_best_and_counts_what_deviates(seed):
    registry = Registry((), entry_points=())
    target = TableModel.random(5, order=2, seed=seed, peak=0.3)
    plain, _ = generate(registry, seed=seed)
    assert generate(registry, drafter=echo, verifier=top(1), seed=seed)[0] == plain  # rank 1 is plain greedy decoding
    tokens, stats = generate(registry, drafter=echo, verifier=top(2), seed=seed)
    ranks = [int((target.logits(tokens[:i]) > target.logits(tokens[:i])[tokens[i]]).sum()) for i in range(2, LENGTH)]
    assert max(ranks) <= 1
    assert stats.deviation.count >= sum(ranks)  # the last block may go beyond LENGTH
    assert (stats.deviation.count > 0) == (stats.deviation.largest_gap > 0)


def test_the_backend_generates_what_the_cpu_backend_does(tmp_path, monkeypatch):
    """With drafts and without, through every block of its tutorial, and after a session went through a file."""
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
    monkeypatch.chdir(tmp_path)
    namespace = {}
    text = (ROOT / "docs" / "tutorials" / "first-backend.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block.replace("registry().register(first_backend)\n", ""), namespace)  # it is registered already
    assert (tmp_path / "turn.safetensors").exists()


def test_the_backend_lacks_what_families_with_experts_need():
    from first_backend import NumpyOps

    with pytest.raises(UnsupportedError, match="NumpyOps has no moe"):
        NumpyOps().moe(None, None, None, None)


def test_the_verifier_claims_no_more_than_it_keeps():
    assert top(2).guarantee is Guarantee.HEURISTIC


def test_the_observer_writes_a_line_per_cycle(registry, tmp_path, monkeypatch):
    generate(registry, drafter=echo)  # nothing is written before somebody says where
    monkeypatch.setenv("SPECDEC_CYCLE_LOG", str(tmp_path / "cycles.jsonl"))
    _, stats = generate(registry, drafter=echo)
    lines = [json.loads(line) for line in (tmp_path / "cycles.jsonl").read_text().splitlines()]
    assert len(lines) == stats.cycles
    assert sum(line["accepted"] for line in lines) == sum(stats.accepted)
    assert [line["emitted"] for line in lines] == [line["accepted"] + 1 for line in lines]
    assert lines[0]["position"] == 2


@pytest.mark.skipif(not DEMO.exists(), reason="the embedded model is not there: specdec/demo/config.json")
def test_all_work_on_the_embedded_model(tmp_path, monkeypatch):
    import specdec

    monkeypatch.setenv("SPECDEC_CYCLE_LOG", str(tmp_path / "cycles.jsonl"))
    settings = {"max_new_tokens": 16, "ignore_eos": True}
    plain = specdec.load("demo", drafter="none", depth=0).generate("0, 0, 0, 0,", **settings)
    drafted = specdec.load("demo", drafter={"name": "echo", "period": 3}, depth=3).generate("0, 0, 0, 0,", **settings)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.offered
    loose = specdec.load("demo", drafter="echo", verifier={"name": "top", "k": 3}, depth=3)
    assert loose.generate("0, 0, 0, 0,", **settings).guarantee == "heuristic"
    assert (tmp_path / "cycles.jsonl").read_text().count("\n") >= plain.stats.cycles + drafted.stats.cycles


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.exists(), reason="the embedded model is not there: specdec/demo/config.json")
@pytest.mark.parametrize("example", EXAMPLES)
def test_each_runs_as_a_script(example, tmp_path):
    run_python(ROOT / "examples" / f"{example}.py", cwd=tmp_path)
    assert (tmp_path / "cycles.jsonl").exists() == (example == "first_observer")


# --- the tutorials themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_tutorial_includes_its_example_and_names_it_right(example, registry, tmp_path):
    page = ROOT / "docs" / "tutorials" / f"{example.replace('_', '-')}.md"
    text = page.read_text()
    included = re.findall(r"```\{literalinclude\} (\S+)", text)
    assert [(page.parent / path).resolve() for path in included] == [ROOT / "examples" / f"{example}.py"]
    for block in re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL):
        data = tomllib.loads(block)
        for value in data.get("project", {}).get("entry-points", {}).get("specdec", {}).values():
            module, _, attribute = value.partition(":")
            assert module == example
            assert not attribute or hasattr(importlib.import_module(module), attribute)
        if "project" not in data:
            (tmp_path / "run.toml").write_text(block)
            config = load_config(tmp_path / "run.toml")
            for table, find in (("drafter", registry.drafter), ("verifier", registry.verifier)):
                if table in data:
                    choice = getattr(config, table)
                    assert structure_choice(choice, find(choice.name).config, table)


@pytest.mark.parametrize(("table", "option"), [("drafter", "period"), ("verifier", "k")])
def test_a_wrong_option_is_refused_with_its_key(table, option, registry):
    name = {"drafter": "echo", "verifier": "top"}[table]
    choice = getattr(load_config(None, [f"{table}.name={name}", f"{table}.{option}=0"]), table)
    with pytest.raises(ConfigError, match=rf"{table}\.{option}"):
        structure_choice(choice, getattr(registry, table)(name).config, table)


# --- what the tutorials say about the kit -----------------------------------------------------------------------------


def numpy_ops():
    from first_backend import NumpyOps

    return NumpyOps()


@parametrize_checks(drafter=lambda env: echo(env), verifier=lambda: top(2), ops=numpy_ops, effort=0.3)
def test_contract(check):
    check()
