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


# Keys that any config may carry and that change nothing that a model or a head computes.
HARMLESS = frozenset(
    """name_or_path architectures auto_map attn_implementation attention_dropout attn_pdrop aux_loss_alpha
    audio_token_id begin_suppress_tokens bad_words_ids boa_token_id boi_token_id boi_token_index bos_token_id
    chunk_size_feed_forward classifier_dropout compression_config cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop embed_requires_grad eoa_token_id eoa_token_index
    eoi_token_id eoi_token_index encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing has_no_defaults_at_init
    hidden_dropout id2label image_token_id image_token_index initializer_range is_llama_config label2id length_penalty
    mamba_ssm_dtype max_length max_position_embeddings max_sequence_length max_window_layers min_length
    mm_tokens_per_image model_max_length model_type multimodal_projector_bias n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type projector_hidden_act pruned_heads qk_head_dim quantization
    quantization_config remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id seq_aux spatial_merge_size speculators_version summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache video_token_id
    vision_feature_layer vision_end_token_id vision_soft_tokens_per_image vision_start_token_id
    vocab_size_per_layer_input""".split()
)
# Sizes that some families have no use for: DeepSeek's keys and values are latent, and a model may have experts only.
_UNUSED_SIZES = ("head_dim", "intermediate_size", "num_key_value_heads")
# Keys of which 0 or 1 may change the computation too, or other values change nothing. Null never does.
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
    "use_sliding_window": _of(False),
    "causal": _of(True),
    "is_causal": _of(True),
    "hidden_activation": _named("silu", "swish"),
    "layer_types": _each("full_attention"),
    "no_rope_layer_interval": _of(0),
    "no_rope_layers": _each(1),  # 1: the layer has a rotary embedding
    "norm_type": _named("rmsnorm", "rms"),
    "position_embedding_type": _named("rope", "rotary"),
}


def _says_nothing(value: Any) -> bool:
    """Whether a value switches nothing on: null, false, 0, 1, or nothing at all."""
    return value is not True and value in (None, False, 0, 1, "", [], {})


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
        """Raises: CheckpointError for a key that nobody read, unless it changes nothing that a model computes."""
        for key in self.unread:
            value = self._config[key]
            if (
                key in HARMLESS
                or key in _UNUSED_SIZES
                or key.startswith("_")
                or _NEUTRAL.get(key, _says_nothing)(value)
            ):
                continue
            if key == "sliding_window" and self._config.get("use_sliding_window", key) is False:
                continue  # "use_sliding_window" says whether the number means anything
            raise CheckpointError(
                f"config.json: {key!r} = {shown(value)} may change what the model computes, and the family {family!r} "
                "does not read it",
                file=file,
                try_="config.json without the key if the weights were trained without it; else a family that reads it",
            )
