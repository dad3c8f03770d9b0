"""Checks of model families: clauses M1 to M7.

No checkpoint is needed: ``parse`` gets a small ``config.json``, and ``build`` random weights, also from a file.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specdec.checkpoints import Checkpoint, StoredWeights, text_config
from specdec.contract import FamilyConfig, ForwardPass, Needs
from specdec.errors import CheckpointError
from specdec.models.loading import build_target, checked_head
from specdec.models.read_keys import ReadKeys
from specdec.models.weights import Weights, dry_run
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, not_applicable, own_generators
from specdec.testing.clauses.ops.operations import REFERENCE
from specdec.testing.random_weights import SMALL, WIDTHS, RandomWeights, random_target
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import ModelFamilySubject, PluginSubject, Subject
from specdec.testing.target_under_test import Play, TargetUnderTest

LARGE = 10_000_000  # values of weights, from which no random ones are made
_NUMBERS = ("vocab_size", "hidden_size", "layers", "max_positions", "mtp_layers", "tied", "expert_share")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "max_positions": ("max_position_embeddings", "n_positions"),
}
"""The keys under which checkpoints have a size."""
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_UNHEARD_OF = "function-of-no-family"


class _Family:
    """A family, a config.json that it takes, and what it reads of that."""

    def __init__(self, subject: ModelFamilySubject) -> None:
        self.spec, self.parse = subject.spec, subject.spec.parse
        self.raw = dict(SMALL if subject.config is None else subject.config)
        self.raw.setdefault("model_type", self.spec.model_types[0])
        self.config = self._accepted(subject.config is not None)
        watched = ReadKeys(self.raw)
        self.parse(watched)
        self.read = {key for key in self.raw if watched.was_read(key)}

    def _accepted(self, given: bool) -> FamilyConfig:
        """Parse; without a config of its own, do without the keys that the family refuses."""
        while True:
            try:
                made: FamilyConfig = self.parse(dict(self.raw))
            except CheckpointError as error:
                refused = [key for key in re.findall(r"'(\w+)'", error.message) if key in self.raw and key in SMALL]
                if given or not refused:
                    not_applicable(
                        f"it does not take the kit's config.json ({error.message}); "
                        "try ModelFamilySubject(spec=..., config=...)"
                    )
                del self.raw[refused[0]]
            else:
                return made

    def sizes(self) -> dict[str, str]:
        """The attributes of the config, and the keys of config.json that they come from."""
        found: dict[str, str] = {}
        for name, keys in _KEYS.items():
            for key in keys:
                if key in self.read and self.raw[key] == getattr(self.config, name):
                    found.setdefault(name, key)
        return found

    def target(self, seed: int = 0, dtype: str = "float32") -> ForwardPass:
        """The model over random weights."""
        weights = dry_run(self.spec, self.config).tensors
        if sum(math.prod(tensor.shape) for tensor in weights.values()) > LARGE:
            not_applicable(f"the config.json describes a model of more than {LARGE:,} weights")
        return random_target(self.spec, self.config, seed, dtype)


def _facts(config: FamilyConfig) -> dict[str, Any]:
    """What specdec reads from a config."""
    facts: dict[str, Any] = {name: getattr(config, name) for name in _NUMBERS}
    return facts | {f"state_bytes({width})": config.state_bytes(width) for width in WIDTHS.values()}


@check("M1")
def parse_only_reads(subject: ModelFamilySubject, run: Run) -> None:
    """``parse`` only reads: it takes any mapping, leaves it unchanged, and the same mapping gives the same config."""
    family = _Family(subject)
    wanted = _facts(family.config)
    with own_generators(3):
        for kind in (dict, MappingProxyType, ReadKeys):
            raw = copy.deepcopy(family.raw)
            got = family.parse(raw if kind is dict else kind(raw))
            expect_equal(raw, family.raw, "the mapping was changed", mapping=kind.__name__)
            expect_equal(_facts(got), wanted, "the same mapping gives another config", mapping=kind.__name__)
            for key in family.sizes().values():
                with contextlib.suppress(CheckpointError):
                    family.parse(family.raw | {key: 2 * family.raw[key]})  # other checkpoints change nothing
    expect_equal(_facts(family.config), wanted, "a config was changed after it was returned")


@check("M2")
def config_has_the_sizes(subject: ModelFamilySubject, run: Run) -> None:
    """The config has what ``FamilyConfig`` lists, as plain numbers, and its sizes follow those of config.json."""
    family = _Family(subject)
    for name in _NUMBERS:
        value: object = getattr(family.config, name, None)
        kind = {"tied": bool, "expert_share": float}.get(name, int)
        expect(type(value) is kind, f"{name} is no plain {kind.__name__}", got=f"{value!r} of {type(value).__name__}")
        assert isinstance(value, int | float)
        low, high = (1, math.inf) if name in _KEYS else (0, 1 if name == "expert_share" else math.inf)
        expect(low <= value <= high, f"{name} is out of range", got=value)
    expect(family.config.expert_share > 0, "expert_share is 0", got=0)
    for name, key in family.sizes().items():
        raw = family.raw | {key: 2 * family.raw[key]}
        with contextlib.suppress(CheckpointError):  # a size may have to fit others
            got = getattr(family.parse(raw), name)
            expect_equal(got, raw[key], f"{name} does not follow {key!r} of config.json")


@check("M3")
def state_bytes_are_those_of_a_state(subject: ModelFamilySubject, run: Run) -> None:
    """``state_bytes`` are the bytes of a state: per token, the MTP head's with ``mtp``, and per sequence."""
    family = _Family(subject)
    heads = (False, True) if family.config.mtp_layers else (False,)
    for (dtype, width), mtp in itertools.product(WIDTHS.items(), heads):
        target, both = family.target(dtype=dtype), family.config.state_bytes(width, mtp=mtp)
        plain = type(both) is tuple and [type(one) for one in both] == [int, int] and min(both) >= 0
        expect(plain, "state_bytes gives no pair of plain ints of 0 or more", got=both)
        short, long = (target.new_state(tokens, Needs(mtp=mtp)).nbytes() for tokens in (100, 300))
        per_token, fixed = both
        case = {"mtp": mtp, "bytes_of_an_activation": width}
        taken = (long - short) / 200
        what = "the bytes per token are not those of a state of the built model"
        expect(0.9 * taken <= per_token <= 1.1 * taken + 1e-9, what, got=per_token, expected=taken, **case)
        rest = short - 100 * taken
        what = "the bytes per sequence are not those of a state of the built model"
        if not mtp:  # the head's cache has a few rows more
            expect(0.2 * rest <= fixed <= 5 * rest, what, got=fixed, expected=f"about {rest:.0f}", **case)


@check("M4")
def refuses_by_key(subject: ModelFamilySubject, run: Run) -> None:
    """What a family cannot read or does not compute is a CheckpointError that names the key, never another error."""
    family = _Family(subject)

    def refused(key: str, raw: Mapping[str, Any]) -> bool:
        try:
            family.parse(raw)
        except CheckpointError as error:
            expect(key in error.message, "the refusal does not name the key", got=error.message, expected=key)
            return True
        except Exception as error:
            raise Broken.by(error, {"key": key, "value": raw.get(key, "(none)")}) from error
        return False

    sizes = family.sizes().values()
    for key in sizes:
        refused(key, {name: value for name, value in family.raw.items() if name != key})
        for wrong in (0, -3, 2.5, "64", [64], True):
            what = f"{key!r} = {wrong!r} is taken for a size"
            expect(refused(key, family.raw | {key: wrong}), what, got=wrong, expected="a CheckpointError")
    for key in sorted(family.read - {*sizes, "model_type"}):
        strange: Any
        for strange in ("many", -1, [], {}, [[1]], math.nan):
            refused(key, family.raw | {key: strange})
    answers = {}
    for key in _ACTIVATIONS:
        watched = ReadKeys(family.raw | {key: _UNHEARD_OF})
        refusal = refused(key, watched)
        if watched.was_read(key):
            answers[key] = refusal
    what = "an activation function that no family has is taken"
    expect(any(answers.values()) or not answers, what, got=dict.fromkeys(answers, _UNHEARD_OF))


def _logits(target: ForwardPass) -> Any:
    state = target.new_state(8)
    target.prefill(state, [1, 2, 3, 4])
    return target.decode(state, [5]).need_logits().rows().copy()


@check("M5")
def build_keeps_nothing(subject: ModelFamilySubject, run: Run) -> None:
    """``build`` takes the same weights whenever it is called, reads none of them in a dry run, and every model has its
    own."""
    family = _Family(subject)
    spec, config = family.spec, family.config
    wanted = dry_run(spec, config).tensors
    expect_equal(dry_run(spec, config).tensors, wanted, "another dry run takes other weights")
    first = family.target(seed=1)
    before = _logits(first)
    expect_equal(before.shape, (1, config.vocab_size), "the logits do not have the config's vocabulary")
    expect(bool(np.isfinite(before).all()), "a logit is not finite", got=before)
    expect_equal(first.info.layers, config.layers, "the model does not have the config's layers")
    other = _logits(family.target(seed=2))
    expect(not np.array_equal(other, before), "other weights give the same logits")
    expect_equal(_logits(first), before, "a model that was built later changed this one")
    expect_equal(_logits(family.target(seed=1)), before, "the same weights give other logits")
    expect_equal(dry_run(spec, config).tensors, wanted, "after real builds a dry run takes other weights")


@check("M7")
def loads_a_checkpoint(subject: ModelFamilySubject, run: Run) -> None:
    """A checkpoint of the tensors that ``build`` asks for loads, under names that begin with ``model.``, and gives the
    logits of those weights."""
    family = _Family(subject)
    spec, built = family.spec, family.target()
    weights = RandomWeights(REFERENCE, None)
    tensors = {
        f"model.{name.removeprefix('model.')}": weights.tensor(name, wanted.shape).contiguous()
        for name, wanted in dry_run(spec, family.config).tensors.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(family.raw), encoding="utf-8")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        checkpoint = Checkpoint.open(path)
        config = family.parse(ReadKeys(text_config(checkpoint.config)))
        _, weight_check = checked_head(checkpoint, spec, config)
        for error in (*weight_check.errors, *weight_check.head_errors):
            raise error
        stored = StoredWeights(checkpoint, dtype=torch.float32)
        loaded = build_target(spec, config, Weights(REFERENCE, stored), backend="cpu", device="cpu", dtype="float32")
        got, truth = _logits(loaded), _logits(built)
        # torch's bits depend on the addresses of weights
        close = float(np.abs(got - truth).max()) <= 1e-4 * float(np.abs(truth).max())
        expect(close, "the loaded model gives other logits than its weights", got=got, expected=truth)


@check("M6")
def models_are_targets(subject: ModelFamilySubject, run: Run) -> None:
    """The model is a target: over any weights, every row of every pass has the logits of plain decoding, also after
    rewinds and copies."""
    model = _Family(subject).target(seed=run.seed % 2**32)
    target = TargetUnderTest(PluginSubject(kind=Subject.FORWARD_PASS, make=lambda: model))

    def body(length: int, seed: int) -> None:
        kinds = ("prefill", "decode", "rewind", "restore", "decode")
        Play(target).run(kinds, seed, length)

    run.explore(body, examples=5, length=lengths(30), seed=seeds)
