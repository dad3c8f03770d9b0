"""Our own server under ``specdec audit`` answers every time as the first time."""

import json

import pytest

from tests.processes import run_specdec


def audited(plain, other, *options):
    done = run_specdec("audit", "--server", plain.url, "--server", other.url, "--ignore-eos", "--json", *options)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_server_agrees_with_itself(server):
    told = audited(server, server, "-n", "12", "-p", "def add(a, b):")
    assert (told["requests"], told["tokens"]) == (1, 12)
    assert (told["differ"]["count"], told["control"]["count"], told["logprobs_apart"]) == (0, 0, 0.0)
