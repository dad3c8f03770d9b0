"""From a folder to a target: locate, read, audit, build, probe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from specdec.backends.choice import make_backend
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
from specdec.config import RunConfig
from specdec.contract import ForwardPass, ModelInfo, ModelSpec, Parity
from specdec.errors import CheckpointError
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
    backend, said = make_backend(asked.backend, asked.backend_options, asked.source)
    with_notices += said
    dtype, dtype_reason = backend.choose_dtype(asked.dtype, _stored_dtype(checkpoint))
    decoded: torch.dtype = getattr(torch, dtype, torch.bfloat16)
    source = _audited(checkpoint, spec.tensors(family), asked.decoded_cache, decoded, with_notices)
    ops = backend.ops(dtype)
    offers = ops.capabilities
    weights = Weights(source, canonical_names(source.names), dtype=decoded, keeps=offers.packed_formats)
    model: DecoderModel = spec.build(family, weights, ops)
    info = ModelInfo(
        family=spec.name,
        vocab_size=family.vocab_size,
        hidden_size=family.hidden_size,
        max_positions=family.max_positions,
        mtp_layers=family.mtp_layers,
        max_rows=offers.max_rows,
        parity=offers.parity,
        parity_reason=offers.parity_reason,
        backend=backend.name,
        device=backend.device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        kernels=offers.kernels,
        fingerprint=fingerprint(checkpoint),
    )
    target = CausalLM(info, model)
    if offers.slow:
        with_notices.append(f"slow kernels: {offers.kernels}")
    if info.parity is Parity.BITWISE and offers.parity_needs_probe:
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
