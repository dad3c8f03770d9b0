"""The ``config.json`` of released models, written from their published values, and the parameters they imply.

Nothing is downloaded: a dry run of ``build`` must give the published counts. They catch a tensor too many or too
few, and a size read from the wrong key, at the real scale.
"""

import functools
import json
import math
import pathlib

import pytest

from specdec.checkpoints import text_config
from specdec.errors import CheckpointError
from specdec.models.loading import family_of
from specdec.models.weights import dry_run
from specdec.registry import registry

CONFIGS = json.loads(pathlib.Path(__file__).with_name("public_configs.json").read_text(encoding="utf-8"))


def qwen3_5(layers, hidden, heads, kv_heads, value_heads, *, tied, **mlp):
    """The vision-language layout in which the family is released; the vision tower is left out."""
    moe, base = "_moe" * ("num_experts" in mlp), CONFIGS["QWEN3_5"]
    sizes = {
        "hidden_size": hidden,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_num_value_heads": value_heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
    }
    text = {key: value for key, value in base["text_config"].items() if key != "intermediate_size"}
    text |= {"model_type": f"qwen3_5{moe}_text", **sizes, **mlp}
    return base | {"model_type": f"qwen3_5{moe}", "text_config": text, "tie_word_embeddings": tied}


def moe(inner, experts, top_k):
    return {
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
    }


def gemma4(layers, interval, **sizes):
    kinds = ["full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(layers)]
    small = {"attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "sliding_window": 512}
    heads = {"num_attention_heads": 8, "num_hidden_layers": layers, "layer_types": kinds}
    tokens = {"eoa_token_id": 258883, "eoa_token_index": 258883, "vision_soft_tokens_per_image": 280}
    towers = {"vision_config": {"hidden_size": 768}, "audio_config": {"hidden_size": 1024}}
    return {"model_type": "gemma4", "text_config": CONFIGS["GEMMA_4_31B"] | small | heads | sizes, **towers, **tokens}


# name: config, billions of parameters without MTP as published (three decimals), millions of the MTP head
PUBLISHED = {
    "Qwen3.5-0.8B": (qwen3_5(24, 1024, 8, 2, 16, tied=True, intermediate_size=3584), 0.752, 20.5),
    "Qwen3.5-2B": (qwen3_5(24, 2048, 8, 2, 16, tied=True, intermediate_size=6144), 1.882, 60.8),
    "Qwen3.5-4B": (qwen3_5(32, 2560, 16, 4, 32, tied=True, intermediate_size=9216), 4.206, 120.6),
    "Qwen3.5-9B": (qwen3_5(32, 4096, 16, 4, 32, tied=False, intermediate_size=12288), 8.954, 243.3),
    "Qwen3.6-27B": (qwen3_5(64, 5120, 24, 4, 48, tied=False, intermediate_size=17408), 26.896, 424.7),
    "Qwen3.6-35B-A3B": (qwen3_5(40, 2048, 16, 2, 32, tied=False, **moe(512, 256, 8)), 34.661, 844.6),
    "Qwen3.5-122B-A10B": (qwen3_5(48, 3072, 32, 2, 64, tied=False, **moe(1024, 256, 8)), 122.112, 2523.7),
    "Qwen3.5-397B-A17B": (qwen3_5(60, 4096, 32, 2, 64, tied=False, **moe(1024, 512, 10)), 396.346, 6595.6),
    "Qwen3-Next-80B-A3B": (CONFIGS["QWEN3_NEXT"], 79.674, 1650.5),
    "DeepSeek-V3": (CONFIGS["DEEPSEEK_V3"], 671.026, None),  # "671B"
    "GLM-4.5-Air": (CONFIGS["GLM_4_5_AIR"], 106.852, None),  # "106B"
    "Llama-3.1-8B": (CONFIGS["LLAMA_3_1_8B"], 8.030, None),
    "Qwen2.5-7B": (CONFIGS["QWEN2_5_7B"], 7.616, None),  # "7.61B"
    "Qwen3-30B-A3B": (CONFIGS["QWEN3_30B_A3B"], 30.532, None),  # "30.5B"
    "Mistral-7B-v0.3": (CONFIGS["MISTRAL_7B"], 7.248, None),  # "7.25B"
    "SmolLM3-3B": (CONFIGS["SMOLLM3_3B"], 3.075, None),
    "Phi-3-mini-4k": (CONFIGS["PHI_3_MINI"], 3.821, None),  # "3.8B"
    "OLMo-2-1124-7B": (CONFIGS["OLMO_2_7B"], 7.299, None),  # "7.3B"
    "granite-3.3-2b": (CONFIGS["GRANITE_3_2B"], 2.534, None),  # "2.53B"
    "gemma-3-270m": (CONFIGS["GEMMA_3_270M"], 0.268, None),
    "gemma-3-1b": (CONFIGS["GEMMA_3_1B"], 1.0, None),
    "gemma-4-31B": (CONFIGS["GEMMA_4_31B"], 30.697, None),  # "30.7B", the vision tower left out
    "gemma-4-E4B": (  # "4.5B effective, 8B with embeddings", vision and audio towers included
        gemma4(42, 6, hidden_size=2560, intermediate_size=10240, num_key_value_heads=2, num_kv_shared_layers=18),
        7.463,
        None,
    ),
    "gemma-4-E2B": (  # "2.3B effective, 5.1B with embeddings", likewise
        gemma4(
            35,
            5,
            hidden_size=1536,
            intermediate_size=6144,
            num_key_value_heads=1,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        ),
        4.629,
        None,
    ),
    "gpt-oss-20b": (CONFIGS["GPT_OSS_20B"], 20.915, None),  # "20.91B"
    "Ministral-3-3B": (CONFIGS["MINISTRAL_3_3B"], 3.429, None),  # "3.4B", the vision tower left out
}


@functools.cache
def family(name):
    config = text_config(PUBLISHED[name][0])
    return registry().model(config["model_type"]).parse(config)


def parameters(tensors, group):
    return sum(math.prod(spec.shape) for spec in tensors.values() if spec.group == group)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    _, billions, mtp_millions = PUBLISHED[name]
    spec = registry().model(text_config(PUBLISHED[name][0])["model_type"])
    tensors = dry_run(spec, family(name)).tensors
    assert round(parameters(tensors, "model") / 1e9, 3) == billions
    if mtp_millions is not None:
        assert round(parameters(tensors, "mtp") / 1e6, 1) == mtp_millions
        assert family(name).mtp_layers == 1


def test_state_sizes_are_the_published_ones():
    """Bytes per token (the MTP layer's included) and per sequence, in bfloat16."""
    wanted = {
        "Qwen3.5-0.8B": (12288 + 2048, 18 * 2**20 + 18 * 36864),
        "Qwen3.6-35B-A3B": (20480 + 2048, 60 * 2**20 + 30 * 49152),
        "Qwen3-Next-80B-A3B": (24576 + 2048, 72 * 2**20 + 36 * 49152),
        "Qwen3.5-397B-A17B": (30720 + 2048, 180 * 2**20 + 45 * 73728),
        "DeepSeek-V3": (62 * 1152, 0),
        "GLM-4.5-Air": (47 * 2 * 8 * 128 * 2, 0),
        "gemma-4-E2B": (12 * 2 * 256 * 2 + 3 * 2 * 512 * 2, 0),
    }
    assert {name: family(name).state_bytes(2) for name in wanted} == wanted


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = CONFIGS["LLAMA_3_1_8B"]["rope_scaling"]
HALF = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Qwen3-Next-80B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen3-Next-80B-A3B", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Qwen3-Next-80B-A3B", {"num_experts_per_tok": 600}, "num_experts_per_tok"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepSeek-V3", {"num_nextn_predict_layers": 9}, "num_nextn_predict_layers"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group"),
        ("DeepSeek-V3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("DeepSeek-V3", {"rope_scaling": CONFIGS["DEEPSEEK_V3"]["rope_scaling"] | {"mscale": 0.7}}, "mscale"),
        ("GLM-4.5-Air", {"rope_scaling": YARN}, "attention_factor"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ("Llama-3.1-8B", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ("Phi-3-mini-4k", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 47}}, "short_factor"),
        ("Phi-3-mini-4k", {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": None}, "short_factor"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("gemma-3-270m", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("gemma-4-31B", {"enable_moe_block": True}, "enable_moe_block"),
        ("gemma-4-31B", {"num_kv_shared_layers": 60}, "'num_kv_shared_layers' takes a whole number from 0 to 59"),
        ("gemma-4-31B", {"num_kv_shared_layers": 55}, "a kind of layer only among the last 55"),
        ("gemma-4-E2B", {"layer_types": ["full_attention"] * 15 + ["sliding_attention"] * 20}, "among the last 20"),
        ("gemma-4-E2B", {"vocab_size_per_layer_input": 262143}, "vocab_size_per_layer_input"),
        ("gemma-4-E2B", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ("gemma-4-E2B", {"use_double_wide_mlp": 2}, "use_double_wide_mlp"),
        ("gemma-4-31B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma-4-31B", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma-4-31B", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("gemma-4-31B", {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ("gemma-4-31B", {"per_layer_config": {i: {"window": 1} for i in range(5, 60, 6)}}, "per_layer_config"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ("gpt-oss-20b", {"swiglu_limit": 0}, "swiglu_limit"),
        ("Ministral-3-3B", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        ("Ministral-3-3B", {"layer_types": ["sliding_attention"] * 26}, "layer_types"),
        ("GLM-4.5-Air", {"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        ("Qwen3.5-9B", {"use_qk_norm": False}, "use_qk_norm"),
        ("Llama-3.1-8B", HALF, "partial_rotary_factor"),
        ("DeepSeek-V3", {"rope_scaling": None, "rope_parameters": HALF, **HALF}, "partial_rotary_factor"),
    ],
)
def test_a_variant_that_is_not_implemented_is_refused_by_name(name, changes, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(text_config(PUBLISHED[name][0]) | changes, pathlib.Path("model"))
