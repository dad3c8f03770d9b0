"""Notice which keys of ``config.json`` a family reads, and refuse the others that change what a model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError, shown


def _of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _each(*values: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(one in values for one in value)


def _named(*words: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower().replace("_", "") in words


# Keys that change what a decoder of this kind computes, and the values that change nothing. Null never does.
_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "attention_chunk_size",
            "attention_multiplier",  # the scale of attention scores itself
            "attn_logit_softcapping",
            "clip_qkv",
            "dim_model_base",
            "final_logit_softcapping",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
            "scale_depth",
            "sliding_window",
            "sliding_window_pattern",
            "swiglu_limit",
        ),
        _of(),
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "logit_scale",
            "logits_scaling",
            "residual_multiplier",
            "scale_emb",
        ),
        _of(1),
    ),
    **dict.fromkeys(
        (
            "add_cross_attention",
            "alibi",
            "attn_temperature_tuning",
            "is_encoder_decoder",
            "lm_head_bias",
            "mlp_bias",
            "parallel_attn",
            "qk_layernorm",
            "rope_interleave",
            "rope_interleaved",
            "scale_embedding",
            "use_bias",
            "use_bidirectional_attention",
            "use_parallel_residual",
            "use_qk_norm",
            "use_sliding_window",
        ),
        _of(False),
    ),
    "attn_output_gate": _of(False),
    "causal": _of(True),
    "is_causal": _of(True),
    "hidden_activation": _named("silu", "swish"),
    "layer_types": _each("full_attention"),
    "no_rope_layer_interval": _of(0),
    "no_rope_layers": _each(1),  # 1: the layer has a rotary embedding
    "norm_type": _named("rmsnorm", "rms"),
    "position_embedding_type": _named("rope", "rotary"),
}


class ReadKeys(Mapping[str, Any]):
    """A config that notices which of its keys are read; a copy of it (``{**config}``) reads all."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def __or__(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **changes}

    def __ror__(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **self}

    @property
    def unread(self) -> list[str]:
        """The keys that nobody read and that are not null."""
        return [key for key, value in self._config.items() if key not in self._read and value is not None]

    def was_read(self, key: str) -> bool:
        """Whether the value of ``key`` was asked for."""
        return key in self._read

    def refuse_the_rest(self, family: str, file: Path) -> None:
        """Raises: CheckpointError for a key that nobody read, and that changes what a model computes."""
        for key, neutral in _NEUTRAL.items():
            value = self._config.get(key)
            if value is None or self.was_read(key) or neutral(value):
                continue
            if key == "sliding_window" and self._config.get("use_sliding_window", key) is False:
                continue  # "use_sliding_window" says whether the number means anything
            raise CheckpointError(
                f"config.json: {key!r} = {shown(value)} changes what a model computes, and the family {family!r} does "
                "not read it",
                file=file,
                try_="config.json without the key if the weights were trained without it; else a family that reads it",
            )
