"""Describe a checkpoint: the object that ``specdec info`` prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specdec.checkpoints import Checkpoint, TensorSpec, WeightCheck
from specdec.checkpoints.quantised import ROUNDED_BITS, ROUNDED_GROUP, TensorFormat, formats_of, rounds
from specdec.contract import FamilyConfig, ModelSpec

_BLOCK = re.compile(r"\.experts\.|\.switch_mlp\.")
_NO_SETTINGS = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")  # of generation_config.json
_PARTS = {"embed_tokens": "embedding", "lm_head": "head"}  # by the first word of a name
_OWN_HEAD = ("lm_head.weight", "shared_head.head.weight")
_MODULES = (  # the first match in a name wins
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("shared_head.head", "head"),
    (".self_attn.", "attention"),
    (".linear_attn.", "linear attention"),
    (".mlp.experts.", "experts"),
    (".mlp.switch_mlp.", "experts"),
    (".mlp.shared_expert", "shared expert"),
    (".mlp.gate.", "router"),
    (".mlp.", "MLP"),
)


@attrs.frozen(kw_only=True)
class ModuleFormat:
    """Weights of one kind of module, stored in one format."""

    module: str  # "attention", "experts", "mtp MLP", ...; "vectors" are norms, biases and the like
    format: str  # "bf16", "fp8-block 128x128", "nvfp4", "int4 g128", ...
    weights: int
    parameters: int
    stored_bytes: int


@attrs.frozen(kw_only=True)
class StepBytes:
    """Bytes that a pass of one row reads. Of routed experts, only the chosen ones count.

    ``weights`` counts decoded weights, ``width`` bytes per parameter. ``stored`` counts weights as the files hold them,
    for backends that keep them packed, as the CPU backend does; it is 0 without weight files. ``rounded`` counts them
    as each value of ``target.weights`` that quantises holds them.
    """

    width: int
    weights: int
    stored: int
    state: int  # recurrent and convolution state, read and written
    per_context_token: int  # keys and values
    mtp_weights: int  # one MTP draft step, with the output head; 0 without a head
    rounded: dict[str, int] = attrs.field(factory=dict)  # by "int8", "int4"; empty for quantised weights


@attrs.frozen(kw_only=True)
class CheckpointReport:
    """Facts read from the files. Computes nothing with the weights."""

    path: str
    family: str  # "" if no family reads the checkpoint
    model_type: str
    taken_by: str = ""  # what runs a checkpoint that no family reads
    config: dict[str, Any] = attrs.field(factory=dict)  # the fields that the family reads
    weights_present: bool = True  # False: counts come from config.json alone
    parameters: dict[str, int] = attrs.field(factory=dict)  # by part: "embedding", "layers", "head", "mtp"
    formats: list[ModuleFormat] = attrs.field(factory=list)
    dtypes: dict[str, int] = attrs.field(factory=dict)  # dtype in the files -> elements stored in it
    mtp: str = ""
    tied: bool = False
    missing: list[str] = attrs.field(factory=list)
    unused: list[str] = attrs.field(factory=list)
    misshaped: list[str] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)  # all-zero or non-finite tensors, weights that cannot be decoded
    generation_config_ignored: dict[str, Any] = attrs.field(factory=dict)  # settings in generation_config.json
    size_bytes: int = 0
    decode_step: StepBytes | None = None
    state_bytes_per_token: int = 0  # bfloat16 keys and values, with the MTP head's
    fixed_state_bytes: int = 0  # recurrent and convolution state, for any length

    @property
    def total_parameters(self) -> int:
        """All parameters except the MTP head's; a tied embedding counts once."""
        return sum(count for part, count in self.parameters.items() if part != "mtp")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``info --json`` prints."""
        return {**attrs.asdict(self), "total_parameters": self.total_parameters}


def describe(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    family: FamilyConfig,
    expected: Mapping[str, TensorSpec],
    found: WeightCheck,
    headless: str = "",
) -> CheckpointReport:
    """Describe a checkpoint; ``expected`` and ``headless`` come from a dry run."""
    formats = formats_of(checkpoint)
    return attrs.evolve(
        describe_config(str(checkpoint.path), checkpoint.config, spec, family, expected),
        weights_present=True,
        formats=_by_module(formats, expected),
        dtypes=_dtypes(checkpoint),
        mtp=_mtp(
            [name for name, tensor in expected.items() if tensor.group == "mtp" and name in formats],
            family,
            checkpoint.head.path,
            headless,
        ),
        missing=list(found.missing),
        unused=list(found.unused),
        misshaped=[f"{name}: {got}, expected {wanted}" for name, got, wanted in found.misshaped],
        problems=[f"{name}: all zero" for name in found.all_zero]
        + [f"{name}: not finite" for name in found.non_finite]
        + [reason for _, _, reason in found.unreadable]
        + found.contradictions,
        generation_config_ignored={
            key: value
            for key, value in checkpoint.generation_config.items()
            if value is not None and key not in _NO_SETTINGS and not key.startswith("_")
        },
        size_bytes=checkpoint.size_bytes,
        decode_step=_step(family, expected, formats),
    )


def describe_config(
    path: str, config: Mapping[str, Any], spec: ModelSpec, family: FamilyConfig, expected: Mapping[str, TensorSpec]
) -> CheckpointReport:
    """Describe a model from ``config.json`` alone; ``expected`` comes from a dry run."""
    parameters: Counter[str] = Counter()
    for name, tensor in expected.items():
        part = _PARTS.get(name.split(".", 1)[0], "layers")
        parameters[part if tensor.group == "model" else tensor.group] += math.prod(tensor.shape)
    per_token, fixed = family.state_bytes(2, mtp=any(tensor.group == "mtp" for tensor in expected.values()))
    fields: Any = family
    return CheckpointReport(
        path=path,
        family=spec.name,
        model_type=str(config.get("model_type")),
        config=attrs.asdict(fields, filter=lambda _, value: value is not None)
        if attrs.has(type(fields))
        else vars(fields),
        weights_present=False,
        parameters=dict(parameters),
        mtp=_mtp([name for name, tensor in expected.items() if tensor.group == "mtp"], family),
        tied=family.tied,
        decode_step=_step(family, expected, {}),
        state_bytes_per_token=per_token,
        fixed_state_bytes=fixed,
    )


def describe_foreign(
    path: str, config: Mapping[str, Any], taken_by: str, checkpoint: Checkpoint | None
) -> CheckpointReport:
    """Describe a model that no family reads; ``checkpoint`` is None if only its config exists."""
    report = CheckpointReport(
        path=path, family="", model_type=str(config.get("model_type")), taken_by=taken_by, weights_present=False
    )
    if checkpoint is None:
        return report
    return attrs.evolve(
        report,
        weights_present=True,
        formats=_by_module(formats_of(checkpoint), {}),
        dtypes=_dtypes(checkpoint),
        size_bytes=checkpoint.size_bytes,
    )


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        dtypes[tensor.dtype.lower()] += math.prod(tensor.shape)
    return dict(dtypes)


def _by_module(formats: Mapping[str, TensorFormat], expected: Mapping[str, TensorSpec]) -> list[ModuleFormat]:
    """Count weights by kind of module and format, in file order."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, stored in formats.items():
        tensor = expected.get(name)
        mtp = tensor.group == "mtp" if tensor is not None else name.startswith("mtp.")
        module = ("mtp " if mtp else "") + _module(name, stored.shape)
        counts = found.setdefault((module, stored.format), [0, 0, 0])
        counts[0] += 1
        counts[1] += math.prod(stored.shape)
        counts[2] += stored.stored_bytes
    return [
        ModuleFormat(module=module, format=format, weights=weights, parameters=parameters, stored_bytes=size)
        for (module, format), (weights, parameters, size) in found.items()
    ]


def _module(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return "vectors"
    return next((module for part, module in _MODULES if part in name), "other matrices")


def _step(family: FamilyConfig, expected: Mapping[str, TensorSpec], formats: Mapping[str, TensorFormat]) -> StepBytes:
    """What one row reads: every matrix once, one row of an untied embedding, and the chosen experts."""
    width = 2
    weights = stored = mtp = 0.0
    lighter = dict.fromkeys(ROUNDED_BITS, 0.0)
    head = 0
    for name, tensor in expected.items():
        size = math.prod(tensor.shape)
        if name == "lm_head.weight" or (family.tied and name == "embed_tokens.weight"):
            head = size
        share = family.expert_share if _BLOCK.search(name) else 1.0
        if "embed_tokens" in name and not (family.tied and tensor.group != "mtp"):
            share = 1.0 / tensor.shape[0]
        if tensor.group == "mtp":
            mtp += share * size
            continue
        weights += share * size
        for kind, bits in ROUNDED_BITS.items():
            per_value = bits / 8 + 2 / ROUNDED_GROUP if tensor.rounds and rounds(tensor.shape) else width
            lighter[kind] += share * size * per_value
        if name in formats:
            stored += share * formats[name].stored_bytes
    own_head = any(name.endswith(_OWN_HEAD) for name, tensor in expected.items() if tensor.group == "mtp")
    if mtp and not own_head:
        mtp += head
    per_token, fixed = family.state_bytes(width, mtp=False)
    return StepBytes(
        width=width,
        weights=round(weights * width),
        stored=round(stored),
        state=2 * fixed,
        per_context_token=per_token,
        mtp_weights=round(mtp * width),
        rounded={}
        if any(found.quantised for found in formats.values())
        else {kind: round(size) for kind, size in lighter.items()},
    )


def _mtp(present: list[str], family: FamilyConfig, path: Path | None = None, headless: str = "") -> str:
    if headless:
        return f"none: {headless}"
    if not family.mtp_layers or not present:
        return "none"
    embed = "own embedding, " if any("embed_tokens" in name for name in present) else ""
    own = any(name.endswith(_OWN_HEAD) for name in present) or (
        family.tied and getattr(family, "mtp_embeddings", False)
    )
    source = "" if path is None else f", from {path}"
    count = family.mtp_layers
    layers = f"{count} layers, chained" if count > 1 else "1 layer"
    return f"{layers}, {embed}{'own head' if own else 'shares the main head'}{source}"
