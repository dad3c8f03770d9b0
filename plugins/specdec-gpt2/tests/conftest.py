"""Random checkpoints, and the plugins, found by their entry points or registered here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import random_gpt2
import specdec_suffix
import torch
from specdec.registry import registry

import specdec_gpt2

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _plugins():
    installed = {entry.module for entry in importlib.metadata.entry_points(group="specdec")}
    for plugin in (specdec_gpt2, specdec_suffix):
        if plugin.__name__ not in installed:
            registry().register(plugin)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """``checkpoint(**config)``: the folder of a random model, written once."""
    known: dict[object, Path] = {}

    def folder(**config) -> Path:
        key = tuple(sorted(config.items()))
        if key not in known:
            known[key] = random_gpt2.write(tmp_path_factory.mktemp("gpt2"), **config)
        return known[key]

    return folder
