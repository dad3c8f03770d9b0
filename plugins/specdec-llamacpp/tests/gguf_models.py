"""Tiny models with random weights as GGUF files: a Llama, and a hybrid of Qwen3.5's kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SPECIAL = ["<unk>", "<s>", "</s>", "\u2581"]  # the last one is a space
VOCAB = len(SPECIAL) + 256
WIDTH, HEADS, HEAD_SIZE, INNER = 64, 4, 16, 160
STATES, STATE_SIZE, CONVOLVED = 4, 32, 4  # of recurrent layers: heads, rows of a head's state, tokens

Weights = Iterator[tuple[str, tuple[int, ...]]]


def write(path: Path, architecture: str = "llama", *, vocab_size: int = VOCAB, seed: int = 0) -> Path:
    """A model of ``llama`` or ``qwen35``, whose tokens are the bytes, and spare ids beyond them."""
    file = gguf.GGUFWriter(path, architecture)
    layers, weights = {"llama": (2, _llama), "qwen35": (4, _qwen35)}[architecture]
    _facts(file, layers)
    _vocabulary(file, vocab_size)
    rng = np.random.default_rng(seed)
    for name, shape in _whole(vocab_size, layers, weights):
        values = np.ones(shape) if "norm" in name else rng.normal(0, 0.2, shape)
        if name.endswith(("attn_output.weight", "ssm_out.weight")):
            values *= 0.03  # the last token says most, so that texts come to repeat themselves
        if name.endswith("ssm_a"):
            values = -np.abs(values)  # a state decays
        file.add_tensor(name, values.astype(np.float32))
    file.add_rope_dimension_count(HEAD_SIZE if architecture == "llama" else HEAD_SIZE // 2)
    if architecture == "qwen35":
        file.add_rope_dimension_sections([2, 1, 1, 0])
        file.add_ssm_conv_kernel(CONVOLVED)
        file.add_ssm_inner_size(STATES * STATE_SIZE)
        file.add_ssm_state_size(STATE_SIZE)
        file.add_ssm_time_step_rank(STATES)
        file.add_ssm_group_count(STATES // 2)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _facts(file: Any, layers: int) -> None:
    file.add_context_length(1024)
    file.add_embedding_length(WIDTH)
    file.add_block_count(layers)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS // 2)
    file.add_key_length(HEAD_SIZE)
    file.add_value_length(HEAD_SIZE)
    file.add_layer_norm_rms_eps(1e-5)


def _vocabulary(file: Any, size: int) -> None:
    spare = size - VOCAB
    kinds = gguf.TokenType
    file.add_tokenizer_model("llama")
    file.add_token_list([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"<{at}>" for at in range(spare))])
    file.add_token_scores([0.0] * size)
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.NORMAL]
    file.add_token_types([*special, *[kinds.BYTE] * 256, *[kinds.UNUSED] * spare])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_add_space_prefix(False)


def _whole(vocab_size: int, layers: int, weights: Callable[[int], Weights]) -> Weights:
    yield "token_embd.weight", (vocab_size, WIDTH)
    for layer in range(layers):
        for name, shape in weights(layer):
            yield f"blk.{layer}.{name}", shape
        yield f"blk.{layer}.attn_norm.weight", (WIDTH,)
        yield f"blk.{layer}.ffn_gate.weight", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_up.weight", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_down.weight", (WIDTH, INNER)
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (vocab_size, WIDTH)


def _attention(gated: int) -> Weights:
    yield "attn_q.weight", (gated * HEADS * HEAD_SIZE, WIDTH)
    yield "attn_k.weight", (HEADS // 2 * HEAD_SIZE, WIDTH)
    yield "attn_v.weight", (HEADS // 2 * HEAD_SIZE, WIDTH)
    yield "attn_output.weight", (WIDTH, HEADS * HEAD_SIZE)


def _llama(layer: int) -> Weights:
    yield from _attention(1)
    yield "ffn_norm.weight", (WIDTH,)


def _qwen35(layer: int) -> Weights:
    """Every fourth layer attends; the others are gated delta nets."""
    yield "post_attention_norm.weight", (WIDTH,)
    if layer % 4 == 3:
        yield from _attention(2)
        yield "attn_q_norm.weight", (HEAD_SIZE,)
        yield "attn_k_norm.weight", (HEAD_SIZE,)
        return
    values, keys = STATES * STATE_SIZE, STATES // 2 * STATE_SIZE
    yield "attn_qkv.weight", (2 * keys + values, WIDTH)
    yield "attn_gate.weight", (values, WIDTH)
    yield "ssm_conv1d.weight", (2 * keys + values, CONVOLVED)
    yield "ssm_dt.bias", (STATES,)
    yield "ssm_a", (STATES,)
    yield "ssm_beta.weight", (STATES, WIDTH)
    yield "ssm_alpha.weight", (STATES, WIDTH)
    yield "ssm_norm.weight", (STATE_SIZE,)
    yield "ssm_out.weight", (WIDTH, values)
