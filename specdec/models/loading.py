"""Load a target: locate the folder, read the files, check the weights, build the model, probe its parity."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

from specdec.backends.batching import batching
from specdec.backends.choice import make_backend
from specdec.backends.ops import Ops
from specdec.checkpoints import (
    Checkpoint,
    StoredWeights,
    WeightCheck,
    check_weights,
    fingerprint,
    join_head,
    locate,
    naming_keys,
    open_checkpoint,
    text_config,
    unlisted_head,
)
from specdec.checkpoints.locate import listed
from specdec.checkpoints.quantised import ROUNDED_BITS, DecodedCache, formats_of, rounds
from specdec.config import RunConfig, TargetConfig
from specdec.contract import FamilyConfig, ForwardPass, ModelInfo, ModelSpec, Parity
from specdec.errors import CheckpointError, ConfigError, ContractError, UnsupportedError
from specdec.logs import get_logger
from specdec.models.causal_lm import CausalLM, DecoderModel
from specdec.models.parity import probe_rows
from specdec.models.read_keys import ReadKeys
from specdec.models.weights import DryRun, Weights, dry_run
from specdec.records.store import weights_folder
from specdec.registry import Kind, calling, registry
from specdec.text import Tokenizer
from specdec.text.tokenizer import check_named_tokens

log = get_logger(__name__)

KEPT = 10**9  # bytes of a checkpoint whose rounded weights are kept by default


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
    foreign = foreign_target(asked)
    if foreign is not None:
        for name in (*_own_options(asked), *(["weights"] if asked.weights != "auto" else [])):
            raise ConfigError(f"target.{name} is for our own kernels; {asked.backend!r} has other options")
        return foreign

    started = perf_counter()

    def phase(name: str, **facts: Any) -> None:
        log.info(name, **facts, elapsed_s=round(perf_counter() - started, 3))

    # 1 locate
    folder = locate(asked.model, revision=asked.revision)
    if asked.backend != "auto":  # report a wrong name before the model_type, which the backend may read itself
        registry().backend(asked.backend, asked_by="target.backend")
    with naming_keys(folder), _no_collection():
        return _loaded(folder, asked, phase)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would look through torch and a whole vocabulary for cycles, again and
    again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _loaded(folder: Path, asked: TargetConfig, phase: Callable[..., None]) -> LoadedTarget:
    """The other steps of ``load_target``."""
    # 2 read
    checkpoint = open_checkpoint(folder)
    gguf = checkpoint.derived.get("gguf")
    spec, family = family_of(text_config(checkpoint.config), folder)
    checkpoint, family, refused_head = with_head(checkpoint, spec, family, asked.mtp)
    tokenizer = Tokenizer.from_checkpoint(folder, gguf)
    tokenizer.check_fits(family.vocab_size)
    backend, said = make_backend(asked.backend, {**asked.backend_options, **_own_options(asked)}, asked.sources)
    notices = list(said)
    with calling((Kind.BACKEND, backend.name), "choose_dtype"):
        dtype, dtype_reason = backend.choose_dtype(asked.dtype, _stored_dtype(checkpoint))
    decoded: torch.dtype = getattr(torch, dtype, torch.bfloat16)

    @functools.cache
    def made_ops() -> Ops:
        with calling((Kind.BACKEND, backend.name), "ops"):
            return backend.ops(dtype)

    # 3 check
    phase("checkpoint_read", folder=str(folder), family=spec.name, backend=backend.name, dtype=dtype)
    source, headless = _checked(checkpoint, spec, family, asked, decoded, notices, refused_head, made_ops)
    phase("weights_checked", tensors=len(source.tensors))

    # 4 build
    ops = made_ops()
    notices += [notice for notice in backend.notices if notice not in said]  # what loading its kernels has shown
    stored = StoredWeights(source, dtype=decoded, keeps=ops.capabilities.packed_formats, weights=asked.weights)
    target = build_target(
        spec,
        family,
        Weights(ops, stored, headless=headless),
        mtp_reason=headless or ("" if source.head.path is None else f"from {source.head.path}"),
        mtp_residual=_mtp_residual(asked.mtp_states, source),
        backend=backend.name,
        device=backend.device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        fingerprint=_fingerprint(checkpoint, asked),
    )
    how = ""
    if asked.weights in ROUNDED_BITS:
        if any(found.quantised for found in formats_of(checkpoint).values()):
            notices.append(f"weights = {asked.weights!r} leaves quantised weights as they are stored")
        else:
            how = f"; rounded to {asked.weights} when loaded"
    made = target.info.fingerprint
    if ops.int8_matrices:
        how += f"; int8 activations ({ops.int8_matrices} matrices)"
        made += "-int8-activations"
    elif asked.activations == "int8":
        how += "; float activations: none is of packed integers"
    target.info = attrs.evolve(target.info, weights=stored.summary() + how, fingerprint=made)
    if asked.mtp_states != "auto" and not target.info.mtp_layers:
        raise ConfigError(f"target.mtp_states is {asked.mtp_states!r}, and {asked.model} has no MTP head")
    if asked.weights != "decoded":
        notices += [
            f"{count} weights stored as {format} are decoded to {dtype}: the {backend.name} backend's kernels do not "
            "compute with them as they are stored"
            for (format, was_decoded), count in stored.used.items()
            if was_decoded and count
        ]
    if ops.capabilities.slow:
        notices.append(f"slow kernels: {ops.capabilities.kernels}")

    # 5 probe
    phase("target_built", kernels=target.info.kernels, mtp_layers=target.info.mtp_layers)
    _probe(target, notices)
    phase("parity_probed", parity=target.info.parity.value, reason=target.info.parity_reason)
    for opened in (checkpoint, source):
        opened.close()
    return LoadedTarget(target=target, tokenizer=tokenizer, notices=tuple(notices))


def _own_options(asked: TargetConfig) -> dict[str, Any]:
    """The keys of ``[target]`` that are options of the backend."""
    options = {"threads": asked.threads, "instruction_set": asked.instruction_set, "activations": asked.activations}
    return {name: value for name, value in options.items() if value not in (None, "auto")}


def foreign_target(asked: TargetConfig) -> LoadedTarget | None:
    """Another engine's model for this target (the hook ``specdec_forward_pass``), or None.

    Raises: PluginError as the hook; ContractError for a tokenizer with more tokens than the target; CheckpointError if
    the target has no tokenizer and ``asked.model`` is no checkpoint either.
    """
    target = registry().forward_pass(asked)
    if target is None:
        return None
    tokenizer = target.tokenizer
    if tokenizer is None:
        tokenizer = Tokenizer.from_checkpoint(locate(asked.model, revision=asked.revision))
    known, room = tokenizer.vocab_size, target.info.vocab_size
    if known > room:
        raise ContractError(f"the target {type(target).__name__} has {room} tokens, its tokenizer {known}")
    return LoadedTarget(target=target, tokenizer=tokenizer, notices=tuple(target.notices))


def _mtp_residual(states: str, checkpoint: Checkpoint) -> bool:
    return checkpoint.head.residual if states == "auto" else states == "residual"


def build_target(
    spec: ModelSpec, family: FamilyConfig, weights: Weights, *, mtp_residual: bool = False, **facts: Any
) -> CausalLM:
    """Build a family's model over the ops of ``weights``; ``facts`` are further fields of ``ModelInfo``.

    ``mtp_residual``: its MTP head reads the hidden states before the final norm.
    """
    offers = weights.ops.capabilities
    weights = attrs.evolve(weights, ops=batching(weights.ops))
    info = ModelInfo(
        family=spec.name,
        vocab_size=family.vocab_size,
        hidden_size=family.hidden_size,
        max_positions=family.max_positions,
        mtp_layers=family.mtp_layers,
        max_rows=offers.max_rows,
        batch_rows=offers.batch_rows,
        warms_by_rows=offers.warms_by_rows,
        parity=offers.parity,
        parity_reason=offers.parity_reason,
        kernels=offers.kernels,
        **facts,
    )
    model = _built(spec, family, weights)
    return CausalLM(info, attrs.evolve(model, mtp_residual=True) if mtp_residual else model)


def _built(spec: ModelSpec, family: FamilyConfig, weights: Weights) -> DecoderModel:
    """Build a family's model. Raises: ContractError for anything else."""
    with calling(spec, "build"):
        model = spec.build(family, weights)
    if not isinstance(model, DecoderModel):
        raise ContractError(
            f"the family {spec.name!r} builds {type(model).__name__}", takes="a specdec.models.DecoderModel"
        )
    return model


def family_of(model_config: Mapping[str, Any], folder: Path) -> tuple[ModelSpec, FamilyConfig]:
    """Find the family for this ``model_type`` and parse its config.

    Raises: CheckpointError for a config.json without a ``model_type``, one that the family refuses, or one that changes
    the computation by a key that the family does not read; UnknownNameError if there is no such family.
    """
    model_type = model_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'", file=folder / "config.json")
    spec = registry().model(model_type, asked_by=str(folder / "config.json"))
    read = ReadKeys(model_config)
    with calling(spec, "parse"):
        family = spec.parse(read)
    read.refuse_the_rest(spec.name, folder / "config.json")
    return spec, family


def with_head(
    checkpoint: Checkpoint, spec: ModelSpec, family: FamilyConfig, asked: str | None
) -> tuple[Checkpoint, FamilyConfig, str]:
    """Add the MTP head of ``target.mtp``, or of an unlisted ``mtp.safetensors``, to an open checkpoint.

    Returns: the checkpoint, the family's config (with a head that config.json may not count), and why an unlisted head
    is not used. Raises: CheckpointError if ``asked`` holds no head for this model.
    """
    path = unlisted_head(checkpoint) if asked is None else Path(os.path.expanduser(asked))
    if path is None:
        return checkpoint, family, ""
    counted: Any = family
    if not family.mtp_layers and attrs.has(type(counted)):
        counted = attrs.evolve(counted, mtp_layers=1)
    wanted = dry_run(spec, counted)
    try:
        if not wanted.head_prefixes:
            raise CheckpointError(f"{path} is not used: the family {spec.name!r} has no MTP head", try_="no target.mtp")
        if asked is None and any(name.startswith(wanted.head_prefixes) for name in formats_of(checkpoint)):
            raise CheckpointError(f"{path} is not used: the weights hold an MTP head already", try_="target.mtp")
        joined = join_head(checkpoint, path, wanted.head_prefixes, spec.model_types)
    except CheckpointError as error:
        if asked is not None:
            raise
        return checkpoint, family, error.message
    return joined, counted, ""


def checked_head(
    checkpoint: Checkpoint, spec: ModelSpec, family: FamilyConfig, refused: str = "", *, asked: bool = False
) -> tuple[DryRun, WeightCheck]:
    """Check the weights; a head that cannot be used is left out, with the reason in ``DryRun.headless``.

    Args:
        checkpoint, spec, family: of the model.
        refused: why an unlisted head is not used.
        asked: ``target.mtp`` names the head.

    Raises: CheckpointError if the head that was ``asked`` for cannot be used, or an end token is not in the vocabulary.
    """
    check_named_tokens(checkpoint, family.vocab_size)
    wanted = dry_run(spec, family, StoredWeights(checkpoint))
    found = check_weights(checkpoint, wanted.tensors)
    reason = wanted.headless
    left = [name for name in found.unused if name.startswith(wanted.head_prefixes or "mtp.")]
    if checkpoint.head.residual and left:
        raise CheckpointError(
            f"the tensor {left[0]} is not used by the MTP head of this model",
            file=checkpoint.head.path,
            also=listed(left[1:]) or None,
        )
    if found.head_errors:
        if asked and not found.errors:
            raise copy(found.head_errors[0])  # as in raise_for_errors
        reason = f"the MTP head is not used: {found.head_errors[0].message}"
        wanted = dry_run(spec, family, StoredWeights(checkpoint), headless=reason)
    elif reason and asked:
        raise CheckpointError(reason, file=checkpoint.head.path, try_="the folder of the original checkpoint")
    reasons = [text for text in (refused, reason) if text]
    wanted = attrs.evolve(wanted, headless="; ".join(reasons) if reason else "")
    return wanted, attrs.evolve(found, notices=[*found.notices, *reasons])


def _checked(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    family: FamilyConfig,
    asked: TargetConfig,
    dtype: torch.dtype,
    notices: list[str],
    refused_head: str,
    made_ops: Callable[[], Ops],
) -> tuple[Checkpoint, str]:
    """The checked checkpoint to take weights from (the given one, or its decoded or rounded form in the cache), and why
    the MTP head is left out."""
    cache, cached, folder = None, None, _cache_folder(asked, checkpoint)
    if folder is not None:
        formats = formats_of(checkpoint)
        reason, names = "", [name for name, found in formats.items() if found.quantised]
        if asked.weights in ROUNDED_BITS:
            reason = f"target.weights = {asked.weights!r} leaves quantised weights as they are stored" if names else ""
            expected = dry_run(spec, family, StoredWeights(checkpoint)).tensors
            names = [
                name for name in expected if expected[name].rounds and name in formats and rounds(formats[name].shape)
            ]
        elif not names:
            reason = "the checkpoint has no quantised weights"
        elif asked.weights == "auto":
            keeps = made_ops().capabilities.packed_formats
            kept = all(found.coding is None or found.coding.kept_as in keeps for found in formats.values())
            reason = "the weights stay packed, as they are stored" if kept else ""
        if reason:
            notices += [f"target.decoded_cache is not used: {reason}"] * (asked.decoded_cache is not None)
        else:
            cache = DecodedCache(folder, checkpoint, dtype, weights=asked.weights, rounds=names)
            cached, reported = cache.find()
            notices += [text for text in reported if asked.decoded_cache is not None or cached is None]
    source = cached or checkpoint
    source.head = checkpoint.head
    wanted, found = checked_head(source, spec, family, refused_head, asked=asked.mtp is not None)
    found.raise_for_errors()
    notices += [notice for notice in found.notices if notice not in notices]  # the cache keeps its source's notices
    if cache is None or cached is not None:
        return source, wanted.headless
    try:
        source = cache.write(found.notices)
    except CheckpointError as error:
        if asked.decoded_cache is not None:
            raise
        notices.append(f"weights are rounded at every load: {error.message}")
        return source, wanted.headless
    source.head = checkpoint.head
    done = "rounded" if asked.weights in ROUNDED_BITS else "decoded"
    notices.append(f"weights {done} into the cache {cache.path}, {source.size_bytes / 1e9:.1f} GB")
    return source, wanted.headless


def _cache_folder(asked: TargetConfig, checkpoint: Checkpoint) -> Path | str | None:
    """Where decoded or rounded weights are kept: in ``decoded_cache``, or rounded ones of large checkpoints by
    default."""
    if asked.decoded_cache == "off":
        return None
    if asked.decoded_cache is None and asked.weights in ROUNDED_BITS and checkpoint.size_bytes >= KEPT:
        with contextlib.suppress(UnsupportedError):  # no home
            return weights_folder()
    return asked.decoded_cache


def _probe(target: CausalLM, notices: list[str]) -> None:
    """Compare passes of many rows with single-row passes, and downgrade the parity if their bits differ."""
    if target.info.parity is not Parity.BITWISE:
        return
    broken = probe_rows(target)
    if broken is not None:
        target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=broken)
        notices.append(f"parity downgraded from bitwise to numeric: {broken}")
        log.warning("parity_downgraded", reason=broken)


def _fingerprint(checkpoint: Checkpoint, asked: TargetConfig) -> str:
    """The checkpoint's, and what ``target.weights`` and ``target.mtp_states`` make of it: a saved state fits only those
    weights, and an MTP head's cache only the states that it was made of."""
    plain = not any(found.quantised for found in formats_of(checkpoint).values())
    parts = [fingerprint(checkpoint)]
    if asked.weights in ROUNDED_BITS or (asked.weights == "decoded" and not plain):
        parts.append(asked.weights)
    if _mtp_residual(asked.mtp_states, checkpoint) != checkpoint.head.residual:
        parts.append(asked.mtp_states)
    return "-".join(parts)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights are stored in; quantised ones count with their original dtype."""
    sizes: Counter[str] = Counter()
    for found in formats_of(checkpoint).values():
        if found.error is None:
            plain = str(checkpoint.dtype(found.tensors[0])).removeprefix("torch.")
            dtype = plain if found.coding is None else found.coding.stands_for
            sizes[dtype] += math.prod(found.shape)
    return max(sizes, key=sizes.__getitem__, default="bfloat16")
