"""The vLLM command of a configuration: every key is translated or refused by name."""

import json
import shlex

import pytest
from click.testing import CliRunner

from specdec.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["serve", "--engine", "vllm", *map(str, arguments)])


def words(done):
    assert done.exit_code == 0, done.stderr
    return shlex.split(done.stdout)


def after(command, option):
    return command[command.index(option) + 1]


@pytest.mark.parametrize(
    ("options", "speculative"),
    [
        ([], {"method": "mtp", "num_speculative_tokens": 2}),
        (["--depth", 5], {"method": "mtp", "num_speculative_tokens": 5}),
        (
            ["--drafter", "ngram", "-s", "drafter.max_order=3", "--depth", 4],
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
        ),
        *(
            (
                ["--drafter", name, "-s", "drafter.model=a/b", "--depth", 3],
                {"method": name, "num_speculative_tokens": 3, "model": "a/b"},
            )
            for name in ("draft_model", "eagle3", "dflash", "dspark")
        ),
        (["-s", "drafter.model=a/b"], {"method": "draft_model", "num_speculative_tokens": 2, "model": "a/b"}),
        (["--depth", 0], None),
    ],
)
def test_the_command_names_the_same_drafter(options, speculative):
    command = words(run("-t", 0.5, "--seed", 9, *options))
    assert command[:2] == ["vllm", "serve"]
    assert after(command, "--served-model-name") == "demo"
    assert after(command, "--seed") == "9"
    assert json.loads(after(command, "--override-generation-config"))["temperature"] == 0.5
    if speculative is None:
        assert "--speculative-config" not in command
    else:
        assert json.loads(after(command, "--speculative-config")) == speculative


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-s", "target.threads=2"], "no option for target.threads"),
        (["-s", "generation.banned=[1]"], "no option for generation.banned"),
        (["--verifier", "margin"], "no option for verifier.name = 'margin'"),
        (["--drafter", "eagle3"], "no method for the drafter 'eagle3'"),
        (["--drafter", "suffix"], "the plugin specdec-vllm runs drafters"),
        (["-s", "drafter={name='mtp', max_miss=0.2}"], "no option for drafter.max_miss"),
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--parallel", "4"], "--parallel: with --engine vllm it has no effect"),
    ],
)
def test_what_vllm_has_no_option_for_is_refused_by_name(options, message):
    done = run(*options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_it_is_started_only_if_asked_and_installed(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    done = run("--run")
    assert done.exit_code == 2
    assert "vLLM cannot be started" in done.stderr
    assert CliRunner().invoke(main, ["serve", "--run"]).exit_code == 2
