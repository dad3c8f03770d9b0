"""Fixtures: checkpoints, written once per run, and the plugin, found by its entry point or registered here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from specdec.config import TargetConfig
from specdec.registry import registry

import specdec_transformers

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _plugin():
    installed = importlib.metadata.entry_points(group="specdec")
    if not any(entry.module == "specdec_transformers" for entry in installed):
        registry().register(specdec_transformers)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny model, by name; "deepseek_v3" has an MTP head."""
    known: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in known:
            known[name] = tiny_models.write(tmp_path_factory.mktemp("model") / name, name)
            if name == "deepseek_v3":
                tiny_models.add_head(known[name])
        return known[name]

    return folder


@pytest.fixture(scope="session")
def target(checkpoint):
    """The ForwardPass of a tiny model, by name, as the hook gives it."""
    known = {}

    def made(name: str):
        if name not in known:
            config = TargetConfig(model=str(checkpoint(name)), backend="transformers")
            known[name] = specdec_transformers.specdec_forward_pass(config)
        return known[name]

    return made
