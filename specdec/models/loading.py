"""From a folder to a target: locate, read, audit, build, probe."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from specdec.backends import Backend
from specdec.backends.cuda.device import nvidia_here
from specdec.checkpoints import (
    Checkpoint,
    TensorSpec,
    Weights,
    audit,
    canonical_names,
    fingerprint,
    locate,
    text_config,
)
from specdec.checkpoints.quantised import DecodedCache, formats_of
from specdec.config import RunConfig, structure_options
from specdec.contract import ForwardPass, ModelInfo, ModelSpec, Parity
from specdec.errors import CheckpointError, UnsupportedError
from specdec.models.causal_lm import CausalLM, DecoderModel
from specdec.models.parity import probe_rows
from specdec.records.probes import unproved
from specdec.registry import registry
from specdec.text import Tokenizer

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class LoadedTarget:
    """A target and what was learnt while it was loaded."""

    target: ForwardPass
    tokenizer: Tokenizer
    notices: tuple[str, ...]


def load_target(config: RunConfig) -> LoadedTarget:
    """Open the checkpoint, audit it, and put its weights on a backend."""
    asked = config.target
    foreign = registry().forward_pass(asked)
    folder = locate(asked.model, revision=asked.revision)
    if foreign is not None:
        return LoadedTarget(target=foreign, tokenizer=Tokenizer.from_folder(folder), notices=tuple(foreign.notices))
    if asked.backend != "auto":  # a wrong name is said before the model_type is: the backend may read it itself
        registry().backend(asked.backend, asked_by="target.backend")
    with_notices: list[str] = []
    checkpoint = Checkpoint.open(folder)
    model_config = text_config(checkpoint.config)
    spec = family_of(model_config, checkpoint.path)
    family = spec.parse(model_config)
    tokenizer = Tokenizer.from_folder(folder)
    backend = _backend(asked.backend, with_notices, asked.backend_options, asked.source)
    dtype, dtype_reason = backend.choose_dtype(asked.dtype, _stored_dtype(checkpoint))
    decoded: torch.dtype = getattr(torch, dtype, torch.bfloat16)
    source = _audited(checkpoint, spec.tensors(family), asked.decoded_cache, decoded, with_notices)
    ops = backend.ops(dtype)
    keeps: frozenset[str] = getattr(ops, "keeps", frozenset())
    weights = Weights(source, canonical_names(source.names), dtype=decoded, keeps=keeps)
    model: DecoderModel = spec.build(family, weights, ops)
    info = ModelInfo(
        family=spec.name,
        vocab_size=family.vocab_size,
        hidden_size=family.hidden_size,
        max_positions=family.max_positions,
        mtp_layers=family.mtp_layers,
        max_rows=ops.max_rows,
        parity=ops.parity,
        parity_reason=ops.parity_reason,
        backend=backend.name,
        device=backend.device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        kernels=ops.kernels,
        fingerprint=fingerprint(checkpoint),
    )
    target = CausalLM(info, model)
    if ops.kernels.startswith("torch reference"):
        with_notices.append(f"slow kernels: {ops.kernels}")
    if info.parity is Parity.BITWISE and getattr(ops, "exact_needs_probe", False):
        missing = unproved(target.info, asked.model)
        if missing is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=missing)
            with_notices.append(f"parity is numeric: {missing}")
    if target.info.parity is Parity.BITWISE:
        broken = probe_rows(target)
        if broken is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=broken)
            with_notices.append(f"parity downgraded from bitwise to numeric: {broken}")
            log.warning("parity_downgraded", reason=broken)
    if tokenizer.vocab_size > info.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, the model only {info.vocab_size}", folder=folder
        )
    return LoadedTarget(target=target, tokenizer=tokenizer, notices=tuple(with_notices))


def _audited(
    checkpoint: Checkpoint,
    expected: Mapping[str, TensorSpec],
    cache_folder: str | None,
    dtype: torch.dtype,
    notices: list[str],
) -> Checkpoint:
    """What the weights are taken from, audited: the checkpoint, or its decoded form in the cache that was asked for."""
    cache, cached = None, None
    if cache_folder is not None:
        if any(found.quantised for found in formats_of(checkpoint).values()):
            cache = DecodedCache(cache_folder, checkpoint, dtype)
            cached, told = cache.find()
            notices += told
        else:
            notices.append("target.decoded_cache is not used: the checkpoint has no quantised weights")
    report = audit(checkpoint if cached is None else cached, expected)
    report.raise_for_errors()
    notices += [notice for notice in report.notices if notice not in notices]  # the cache keeps those of its source
    if cache is None or cached is not None:
        return checkpoint if cached is None else cached
    written = cache.write(report.notices)
    notices.append(f"weights decoded into the cache {cache.path}")
    return written


def family_of(model_config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """The family that reads this ``model_type``. Raises: CheckpointError when config.json has none."""
    model_type = model_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'", file=folder / "config.json")
    return registry().model(model_type, asked_by=str(folder / "config.json"))


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights are stored in; quantised ones count as the one that they stand for."""
    sizes: dict[str, int] = {}
    for found in formats_of(checkpoint).values():
        if found.error is None:
            plain = str(checkpoint.dtype(found.tensors[0])).removeprefix("torch.")
            dtype = plain if found.coding is None else found.coding.stands_for
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(found.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")


def _backend(name: str, notices: list[str], options: Mapping[str, Any] | None = None, source: str = "") -> Backend:
    """The backend of that name, or the one that ``auto`` means here; what it has to say joins ``notices``."""
    spec = registry().backend(_auto_backend(notices) if name == "auto" else name, asked_by="target.backend")
    reason = spec.available()
    if reason is not None:
        raise UnsupportedError(f"the {spec.name} backend cannot run here: {reason}", try_='target.backend = "cpu"')
    config: Any = structure_options(options or {}, spec.config, "target.backend_options", source)
    backend: Backend = registry().build(spec, lambda: spec.factory(config))
    notices += getattr(backend, "notices", ())
    return backend


def _auto_backend(notices: list[str]) -> str:
    """``metal`` on Apple silicon and ``cuda`` where there is an NVIDIA device, if they can run; else ``cpu``.

    A device that is there and cannot be used is a notice, with the reason; a machine without one is none.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        name = "metal"
    elif nvidia_here():
        name = "cuda"
    else:
        return "cpu"
    reason = registry().backend(name, asked_by="target.backend = auto").available()
    if reason is None:
        return name
    notices.append(f'target.backend = "auto" runs on the cpu: the {name} backend cannot run here: {reason}')
    return "cpu"
