"""The built-in families: which model types each one reads, and what parses its config and builds its model."""

from __future__ import annotations

from collections.abc import Callable

from specdec.contract import FamilyConfig, ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models import deepseek_v3, gemma3, gemma4, gpt_oss, llama, qwen3_5, qwen3_next
from specdec.models.causal_lm import DecoderModel
from specdec.models.family import build_decoder

_FAMILIES: dict[str, tuple[Callable[..., FamilyConfig], Callable[..., DecoderModel], str]] = {
    "qwen3_5": (
        qwen3_5.parse_dense,
        qwen3_5.build,
        "Qwen3.5 / 3.6 / 3.8 dense: Gated DeltaNet, gated attention, MTP head",
    ),
    "qwen3_5_moe": (qwen3_5.parse_moe, qwen3_5.build, "Qwen3.5 / 3.6 / 3.8 mixture of experts, MTP head"),
    "qwen3_next": (
        qwen3_next.parse,
        qwen3_next.build,
        "Qwen3-Next: Gated DeltaNet, gated attention, mixture of experts, MTP head",
    ),
    "granite": (llama.parse_granite, build_decoder, "Granite 3 dense: factors on embeddings, layers, scores, logits"),
    "llama": (llama.parse_llama, build_decoder, "Llama 3 dense: grouped-query attention, Llama 3 rotary scaling"),
    "ministral3": (llama.parse_ministral3, build_decoder, "Ministral 3 dense, text: queries grow with the position"),
    "mistral": (llama.parse_mistral, build_decoder, "Mistral dense: grouped-query attention, with a window if any"),
    "olmo2": (llama.parse_olmo2, llama.build_olmo2, "OLMo 2 dense: norms behind attention and MLP"),
    "phi3": (llama.parse_phi3, build_decoder, "Phi-3 and Phi-4 dense: fused projections; LongRoPE's short context"),
    "qwen2": (llama.parse_qwen2, build_decoder, "Qwen2.5 dense: grouped-query attention with biases"),
    "qwen3": (llama.parse_qwen3, build_decoder, "Qwen3 dense: grouped-query attention"),
    "qwen3_moe": (llama.parse_qwen3_moe, build_decoder, "Qwen3 mixture of experts"),
    "smollm3": (llama.parse_smollm3, build_decoder, "SmolLM3 dense: every fourth layer without a rotary embedding"),
    "gemma3": (gemma3.parse, gemma3.build, "Gemma 3, text: sliding windows, norms on both sides of a layer's parts"),
    "gemma4": (
        gemma4.parse,
        gemma4.build,
        "Gemma 4, dense, text: heads of two sizes, shared keys and values, an embedding for every layer",
    ),
    "gpt_oss": (gpt_oss.parse, build_decoder, "gpt-oss, mixture of experts in MXFP4: sliding windows, attention sinks"),
    "glm4_moe": (
        deepseek_v3.parse_glm4_moe,
        deepseek_v3.build,
        "GLM-4.5 / 4.6 mixture of experts: grouped-query attention, MTP head",
    ),
    "deepseek_v3": (
        deepseek_v3.parse,
        deepseek_v3.build,
        "DeepSeek-V3 / R1: latent attention, grouped experts, MTP head",
    ),
}
_TYPES = {  # of those that have other names than the family's alone
    "qwen3_5": ("qwen3_5_text", "qwen3_5"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
    "gemma3": ("gemma3_text", "gemma3"),
    "gemma4": ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
}


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(name=name, model_types=_TYPES.get(name, (name,)), parse=parse, build=build, help=text)
        for name, (parse, build, text) in _FAMILIES.items()
    ]
