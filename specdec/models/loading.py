"""Load a target: locate the folder, read the files, check the weights, build the model, probe its parity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from specdec.backends.choice import make_backend
from specdec.checkpoints import Checkpoint, StoredWeights, check_weights, fingerprint, locate, text_config
from specdec.checkpoints.quantised import DecodedCache, formats_of
from specdec.config import RunConfig
from specdec.contract import FamilyConfig, ForwardPass, ModelInfo, ModelSpec, Parity
from specdec.errors import CheckpointError, ContractError
from specdec.models.causal_lm import CausalLM
from specdec.models.parity import probe_rows
from specdec.models.weights import Weights, dry_run
from specdec.records.probes import unproved
from specdec.registry import registry
from specdec.text import Tokenizer

log = structlog.get_logger(__name__)


@attrs.frozen(kw_only=True)
class LoadedTarget:
    """A target and what loading it found out."""

    target: ForwardPass
    tokenizer: Tokenizer
    notices: tuple[str, ...]


def load_target(config: RunConfig) -> LoadedTarget:
    """Load a target in five steps.

    Raises: CheckpointError, ConfigError, UnknownNameError or UnsupportedError, with suggestions.
    """
    asked = config.target
    foreign = registry().forward_pass(asked)

    # 1 locate
    folder = locate(asked.model, revision=asked.revision)
    if foreign is not None:
        return LoadedTarget(target=foreign, tokenizer=Tokenizer.from_folder(folder), notices=tuple(foreign.notices))
    if asked.backend != "auto":  # report a wrong name before the model_type, which the backend may read itself
        registry().backend(asked.backend, asked_by="target.backend")

    # 2 read
    checkpoint = Checkpoint.open(folder)
    spec, family = family_of(text_config(checkpoint.config), folder)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > family.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, the model only {family.vocab_size}", folder=folder
        )
    backend, said = make_backend(asked.backend, asked.backend_options, asked.source)
    notices = list(said)
    dtype, dtype_reason = backend.choose_dtype(asked.dtype, _stored_dtype(checkpoint))
    decoded: torch.dtype = getattr(torch, dtype, torch.bfloat16)

    # 3 check
    source = _checked(checkpoint, spec, family, asked.decoded_cache, decoded, notices)

    # 4 build
    ops = backend.ops(dtype)
    stored = StoredWeights(source, dtype=decoded, keeps=ops.capabilities.packed_formats)
    target = build_target(
        spec,
        family,
        Weights(ops, stored),
        backend=backend.name,
        device=backend.device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        fingerprint=fingerprint(checkpoint),
    )
    if ops.capabilities.slow:
        notices.append(f"slow kernels: {ops.capabilities.kernels}")

    # 5 probe
    _probe(target, asked.model, notices)
    return LoadedTarget(target=target, tokenizer=tokenizer, notices=tuple(notices))


def build_target(spec: ModelSpec, family: FamilyConfig, weights: Weights, **facts: Any) -> CausalLM:
    """Build a family's model over the ops of ``weights``; ``facts`` are further fields of ``ModelInfo``."""
    offers = weights.ops.capabilities
    info = ModelInfo(
        family=spec.name,
        vocab_size=family.vocab_size,
        hidden_size=family.hidden_size,
        max_positions=family.max_positions,
        mtp_layers=family.mtp_layers,
        max_rows=offers.max_rows,
        parity=offers.parity,
        parity_reason=offers.parity_reason,
        kernels=offers.kernels,
        **facts,
    )
    return CausalLM(info, spec.build(family, weights))


def family_of(model_config: Mapping[str, Any], folder: Path) -> tuple[ModelSpec, FamilyConfig]:
    """Find the family for this ``model_type`` and parse its config.

    Raises: CheckpointError for a config.json without a ``model_type``, or one that the family refuses; UnknownNameError
    if there is no such family; ContractError if the family's config lacks a field of ``FamilyConfig``.
    """
    model_type = model_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'", file=folder / "config.json")
    spec = registry().model(model_type, asked_by=str(folder / "config.json"))
    family = spec.parse(model_config)
    lacking = [name for name in vars(FamilyConfig) if not name.startswith("_") and not hasattr(family, name)]
    if lacking:
        raise ContractError(
            f"the family {spec.name!r} reads config.json as {type(family).__name__}, which lacks {', '.join(lacking)}",
            takes="what specdec.FamilyConfig lists",
        )
    return spec, family


def _checked(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    family: FamilyConfig,
    cache_folder: str | None,
    dtype: torch.dtype,
    notices: list[str],
) -> Checkpoint:
    """The checked checkpoint to take weights from: the given one, or its decoded form in the cache."""
    cache, cached = None, None
    if cache_folder is not None:
        if any(found.quantised for found in formats_of(checkpoint).values()):
            cache = DecodedCache(cache_folder, checkpoint, dtype)
            cached, reported = cache.find()
            notices += reported
        else:
            notices.append("target.decoded_cache is not used: the checkpoint has no quantised weights")
    source = cached or checkpoint
    wanted = dry_run(spec, family, StoredWeights(source))
    found = check_weights(source, wanted.tensors, wanted.headless)
    found.raise_for_errors()
    notices += [notice for notice in found.notices if notice not in notices]  # the cache keeps its source's notices
    if cache is None or cached is not None:
        return source
    source = cache.write(found.notices)
    notices.append(f"weights decoded into the cache {cache.path}")
    return source


def _probe(target: CausalLM, model: str, notices: list[str]) -> None:
    """Compare passes of many rows with single-row passes, and downgrade the parity if their bits differ."""
    if target.info.parity is Parity.BITWISE and target.ops.capabilities.parity_needs_probe:
        missing = unproved(target.info, model)
        if missing is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=missing)
            notices.append(f"parity is numeric: {missing}")
    if target.info.parity is Parity.BITWISE:
        broken = probe_rows(target)
        if broken is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=broken)
            notices.append(f"parity downgraded from bitwise to numeric: {broken}")
            log.warning("parity_downgraded", reason=broken)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights are stored in; quantised ones count with their original dtype."""
    sizes: dict[str, int] = {}
    for found in formats_of(checkpoint).values():
        if found.error is None:
            plain = str(checkpoint.dtype(found.tensors[0])).removeprefix("torch.")
            dtype = plain if found.coding is None else found.coding.stands_for
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(found.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")
