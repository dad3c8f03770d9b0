"""Loads a checkpoint folder as a ForwardPass: refuses unusable ones, checks the loaded weights, and runs the probe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specdec.checkpoints import Checkpoint, fingerprint
from specdec.checkpoints.quantised import TensorFormat, formats_of
from specdec.contract import ModelInfo, Parity
from specdec.errors import CheckpointError, SpecdecError, UnsupportedError

from specdec_transformers.choice import BACKEND, encoder_decoder
from specdec_transformers.forward_pass import MAX_ROWS, TransformersPass
from specdec_transformers.model import Model, Rollback, one_line
from specdec_transformers.mtp import head_pattern, layers_named, load_head
from specdec_transformers.probe import prove

if TYPE_CHECKING:
    from specdec.config import TargetConfig

DEVICE_VARIABLE = "SPECDEC_TRANSFORMERS_DEVICE"
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_NO_LIMIT = 2**31 - 1  # a config without a limit: recurrent models, ALiBi
_LISTED = 8  # tensors that a message names


def load(folder: Path, target: TargetConfig) -> TransformersPass:
    """The model in ``folder`` as a target.

    Raises: UnsupportedError for a model that specdec cannot run, CheckpointError for broken files or missing tensors.
    """
    with Checkpoint.open(folder) as checkpoint:
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedError(
                "the folder holds an adapter (adapter_config.json), which would be merged silently",
                folder=folder,
                try_="merge it into its base model and save that",
            )
        device = _device()
        dtype, dtype_reason = _dtype(target.dtype, checkpoint, device)
        with _quiet():
            config = _read_config(folder, checkpoint.config)
            coded = _coded(checkpoint)
            if coded and not _has_decoder(config):
                raise _codes_as_values(folder, coded, "config.json names no quantisation that transformers decodes")
            network, notices = _read_weights(folder, config, coded, dtype, device)
            model = Model(network)
            template, dearer = prove(model)
            head, no_head = load_head(model, tuple(checkpoint.tensors), folder)
        marks = fingerprint(checkpoint)
    if model.rollback not in (Rollback.CUT, Rollback.REPLAY):
        notices.append(f"slow: {model.rollback.value} ({dearer or 'it takes no cache'})")
    if target.decoded_cache is not None:
        notices.append("target.decoded_cache is not used: transformers reads the weights itself")
    if target.mtp is not None:
        notices.append("target.mtp is not used: transformers reads the weights itself")
    if no_head and (names_mtp_layers(checkpoint.config) or "no tensor" not in no_head):
        notices.append(no_head)
    info = model_info(model, mtp_layers=0 if head is None else 1, dtype_reason=dtype_reason, fingerprint=marks)
    return TransformersPass(info, model, template, head, notices)


def model_info(model: Model, *, mtp_layers: int = 0, dtype_reason: str = "", fingerprint: str = "") -> ModelInfo:
    """Facts about a model whose rollback is chosen."""
    import transformers

    config = model.network.config
    return ModelInfo(
        family=str(config.model_type),
        vocab_size=model.vocab_size,
        hidden_size=int(config.get_text_config(decoder=True).hidden_size),
        max_positions=max_positions(config),
        mtp_layers=mtp_layers,
        layers=model.layers,
        max_rows=MAX_ROWS,
        parity=Parity.NUMERIC,
        parity_reason=(
            "transformers chooses kernels by the number of rows, so the bits of a row depend on it; "
            f"a draft is taken back this way: {model.rollback.value}"
        ),
        backend=BACKEND,
        device=str(model.device),
        dtype=str(model.network.dtype).removeprefix("torch."),
        dtype_reason=dtype_reason,
        kernels=f"transformers {transformers.__version__}, {config._attn_implementation} attention",
        fingerprint=fingerprint,
    )


def names_mtp_layers(config: Mapping[str, Any]) -> bool:
    """Whether config.json itself names MTP layers; some config classes add one by default."""
    text = config.get("text_config", config)
    names = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    return isinstance(text, Mapping) and any(text.get(name) for name in names)


def _read_config(folder: Path, stored: Mapping[str, Any]) -> Any:
    """The config as transformers reads it. Raises: UnsupportedError if transformers has no causal model for it."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = stored.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'", file=folder / "config.json")
    version = f"transformers {transformers.__version__}"
    if model_type not in transformers.CONFIG_MAPPING:
        own = bool(stored.get("auto_map"))
        raise UnsupportedError(
            f"{version} knows no model_type {model_type!r}"
            + (", and the code that comes with the checkpoint is never run" if own else ""),
            file=folder / "config.json",
            try_="a newer transformers, or a checkpoint converted to an architecture that it has",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a config class may raise anything
        raise CheckpointError(
            f"transformers cannot read config.json: {one_line(error)}", file=folder / "config.json"
        ) from error
    if config.is_encoder_decoder:
        raise encoder_decoder(model_type)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(
            f"{version} has no causal language model for model_type {model_type!r}",
            file=folder / "config.json",
            try_="a decoder-only language model",
        )
    return config


def _coded(checkpoint: Checkpoint) -> dict[str, TensorFormat]:
    """Weights stored as codes and scales, or in an unknown format, by their first tensor's name."""
    try:
        formats = formats_of(checkpoint)
    except CheckpointError:  # two names that a family of specdec would merge; here they are separate
        return {}
    return {found.tensors[0]: found for found in formats.values() if found.quantised or found.error is not None}


_INSTEAD = (
    "the checkpoint in bfloat16 that it was made from; for a family that specdec reads, "
    'target.backend = "cpu", which decodes it'
)


def _has_decoder(config: Any) -> bool:
    """Whether transformers will decode the weights; it ignores an unknown method with a warning."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    sections = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config(decoder=True)))
    section = next((section for section in sections if section is not None), None)
    if not isinstance(section, Mapping):
        return section is not None
    loads = section.get("load_in_8bit") or section.get("load_in_4bit")
    return bool(loads) or section.get("quant_method") in AUTO_QUANTIZATION_CONFIG_MAPPING


def _codes_as_values(folder: Path, coded: Mapping[str, TensorFormat], why: str) -> UnsupportedError:
    name, found = next(iter(coded.items()))
    more = f" (and {len(coded) - 1} more)" if len(coded) > 1 else ""
    return UnsupportedError(
        f"the weight {name}{more} is stored as {found.format}, and transformers would take its codes for values: {why}",
        folder=folder,
        try_=_INSTEAD,
    )


def _read_weights(
    folder: Path, config: Any, coded: Mapping[str, TensorFormat], dtype: str, device: torch.device
) -> tuple[Any, list[str]]:
    """The model with every weight from the checkpoint, and notices.

    Raises: CheckpointError that names missing tensors or those of the wrong shape; UnsupportedError for codes whose
    scales were left over.
    """
    from transformers import AutoModelForCausalLM

    def read(attention: str) -> tuple[Any, dict[str, Any]]:
        made: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            # set here, because a config may name an implementation that is fetched from the hub
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are listed, and refused below by name
            output_loading_info=True,
        )
        network, told = made
        return network, told

    try:
        try:
            network, told = read("sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            network, told = read("eager")
    except SpecdecError:
        raise
    except Exception as error:  # missing quantisation libraries, wrong shapes, ...
        raise CheckpointError(
            f"transformers cannot load this checkpoint: {one_line(error)}",
            folder=folder,
            try_=f"what the message asks for, or {_INSTEAD}" if coded else None,
        ) from error
    unexpected = set(told.get("unexpected_keys") or ())
    left_over = {name: found for name, found in coded.items() if not unexpected.isdisjoint(found.tensors[1:])}
    if left_over:
        raise _codes_as_values(folder, left_over, "it did not read all of its scales")
    for label, why in (
        ("missing_keys", "lacks tensors that the model needs, and transformers would have filled them with noise"),
        ("mismatched_keys", "has tensors of another shape than the config says"),
        ("error_msgs", "could not be converted"),
    ):
        wrong = sorted(map(_told, told.get(label) or ()))
        if wrong:
            raise CheckpointError(
                f"the checkpoint {why}: {_names(wrong)}", folder=folder, try_="the files of a single model"
            )
    head = head_pattern(config) if layers_named(config) else None
    unused = sorted(name for name in unexpected if head is None or not head.search(name))
    notices = [f"{len(unused)} tensors of the checkpoint are not part of the model: {_names(unused)}"] if unused else []
    network.eval().requires_grad_(False)
    return network.to(device), notices


def _told(entry: Any) -> str:
    """An entry of transformers' load report: a name, or a name with the shapes of the file and of the model."""
    if isinstance(entry, str):
        return entry
    name, stored, wanted = entry
    return f"{name} {list(stored)} instead of {list(wanted)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _device() -> torch.device:
    asked = os.environ.get(DEVICE_VARIABLE, "").strip()
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(f"{DEVICE_VARIABLE}={asked!r} cannot be used: {one_line(error)}", try_="cpu") from error
    return device


def _dtype(asked: str, checkpoint: Checkpoint, device: torch.device) -> tuple[str, str]:
    """The dtype of the weights, and why. "auto" is the stored one, except float32 for float16 on a CPU."""
    if asked != "auto":
        return asked, "asked for"
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + int(torch.Size(tensor.shape).numel())
    most = max(sizes, key=lambda dtype: sizes[dtype])
    if most == "F32":
        return "float32", "auto: the checkpoint is stored in float32"
    if most == "F16":
        if device.type == "cpu":
            return "float32", "auto: the checkpoint is stored in float16, which processors do not multiply"
        return "float16", "auto: the checkpoint is stored in float16"
    if most == "BF16":
        return "bfloat16", "auto: the checkpoint is stored in bfloat16"
    return "bfloat16", f"auto: most of the checkpoint is stored as {most}"


def max_positions(config: Any) -> int:
    """Most tokens of a text, as the config says."""
    text = config.get_text_config(decoder=True)
    for name in _POSITIONS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return _NO_LIMIT


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and load reports; errors and notices cover them."""
    import transformers.utils.logging

    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
