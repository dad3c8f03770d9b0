"""The conformance kit on models with every kind of cache and every rollback method."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import tiny_models
from specdec.config import TargetConfig
from specdec.testing import parametrize_checks

from specdec_transformers import specdec_forward_pass
from specdec_transformers.model import Rollback

KINDS = {
    "llama": Rollback.CUT,
    "gpt2": Rollback.CUT,
    "mistral": Rollback.CUT,
    "gemma3_text": Rollback.CUT,
    "lfm2": Rollback.CUT,
    "deepseek_v3": Rollback.CUT,
    "qwen3_next": Rollback.REPLAY,
    "mamba": Rollback.STEP,
    "openai-gpt": Rollback.RECOMPUTE,
    "recurrent_gemma": Rollback.RECOMPUTE,
}


@functools.cache
def made(name: str):
    folder = tiny_models.write(Path(tempfile.mkdtemp()), name)
    if name == "deepseek_v3":
        tiny_models.add_head(folder)
    return specdec_forward_pass(TargetConfig(model=str(folder), backend="transformers"))


@pytest.mark.parametrize(("name", "rollback"), KINDS.items())
def test_the_way_back_is_the_cheapest_that_is_right(name, rollback):
    assert made(name).model.rollback is rollback


def _contract(name):
    @parametrize_checks(forward_pass=lambda: made(name), effort="sample")  # seven models
    def test(check):
        check()

    return test


test_contract_of_llama = _contract("llama")
test_contract_of_gpt2 = _contract("gpt2")
test_contract_of_mistral = _contract("mistral")
test_contract_of_deepseek_v3 = _contract("deepseek_v3")
test_contract_of_qwen3_next = _contract("qwen3_next")
test_contract_of_mamba = _contract("mamba")
test_contract_of_openai_gpt = _contract("openai-gpt")
