"""The conformance kit on a random model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import random_gpt2
import specdec
from specdec.testing import parametrize_checks

import specdec_gpt2


@functools.cache
def target(dtype: str):
    return specdec.load(str(random_gpt2.write(Path(tempfile.mkdtemp()), dtype=dtype)), drafter="none", depth=0).target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fixture_has_a_target(dtype):
    assert target(dtype).info.dtype == dtype


@parametrize_checks(model_family=specdec_gpt2.specdec_models()[0], effort="sample")
def test_contract_of_the_family(check):
    check()


@parametrize_checks(forward_pass=lambda: target("float32"), effort="sample")
def test_contract_in_float32(check):
    check()


@parametrize_checks(forward_pass=lambda: target("bfloat16"), effort="sample")
def test_contract_in_bfloat16(check):
    check()
