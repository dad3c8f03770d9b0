"""llama.cpp's side of our comparisons: writes the 0.8B shape as GGUF, and times what it is asked for.

    llama_cpp_peer.py CONTEXT THREADS [FOLDER CONFIG]

It runs in a process and an environment of its own, which needs llama-cpp-python, gguf and numpy only. Each line of its
input is a request and gets a line of JSON. ``["decode", "Q8_0", 16]`` decodes 16 tokens one at a time after what was
decoded before, and ``["prompt", "BF16", 512]`` runs a prompt in an empty context, with the shape of CONFIG, written
into FOLDER; the answer is the seconds it took. ``["generate", "FILE.gguf", 16, [1, 2]]`` continues the prompt by the
best 16 tokens, end tokens included; the answer has ``tokens``, ``seconds`` without the prompt's, and ``load_seconds``
from loading to a first token. ``["logits", "FILE.gguf", 0, [1, 2], "FILE.npy"]`` writes the logits of the tokens,
float32 ``[2, V]``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import llama_cpp
import numpy as np

FORMATS = {"BF16": None, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
BYTE_TOKENS = 200  # as in benchmarks.common


def write(path: Path, config: dict[str, Any]) -> None:
    """A Qwen3.5 with random BF16 matrices and no tokenizer, of the shape in ``config`` (``config.json``)."""
    file = gguf.GGUFWriter(path, "qwen35")
    head = config["head_dim"]
    file.add_tokenizer_model("no_vocab")
    file.add_vocab_size(config["vocab_size"])
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_dimension_count(head // 4)
    file.add_rope_dimension_sections([head // 16, head // 16, 0, 0])
    file.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    file.add_full_attention_interval(config["full_attention_interval"])
    file.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    file.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    file.add_ssm_state_size(config["linear_value_head_dim"])
    file.add_ssm_time_step_rank(config["linear_num_value_heads"])
    file.add_ssm_group_count(config["linear_num_key_heads"])
    rng = np.random.default_rng(0)
    for name, shape in _tensors(config):
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02 if len(shape) > 1 else 0.1)
        if len(shape) == 1 or "conv1d" in name:  # llama.cpp keeps norms, biases and the convolution in float32
            file.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
        else:
            upper = (values.view(np.uint32) >> 16).astype(np.uint16)  # truncated: the values do not matter
            file.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    states = config["linear_num_value_heads"]
    values = states * config["linear_value_head_dim"]
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        attends = (layer + 1) % config["full_attention_interval"] == 0
        attention = {
            "attn_q": (2 * queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "attn_q_norm": (config["head_dim"],),
            "attn_k_norm": (config["head_dim"],),
        }
        recurrence = {
            "attn_qkv": (mixed, width),
            "attn_gate": (values, width),
            "ssm_conv1d": (mixed, config["linear_conv_kernel_dim"]),
            "ssm_beta": (states, width),
            "ssm_alpha": (states, width),
            "ssm_norm": (config["linear_value_head_dim"],),
            "ssm_out": (width, values),
        }
        if not attends:
            yield f"blk.{layer}.ssm_dt.bias", (states,)
            yield f"blk.{layer}.ssm_a", (states,)
        shapes = {
            **(attention if attends else recurrence),
            "attn_norm": (width,),
            "post_attention_norm": (width,),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape


def in_format(folder: Path, config: dict[str, Any], form: str) -> Path:
    """The file of the shape in one of ``FORMATS``, written if it is not there."""
    source, path = folder / "BF16.gguf", folder / f"{form}.gguf"
    if not source.exists():
        write(source, config)
    if not path.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = FORMATS[form]
        if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), settings):
            raise SystemExit(f"llama.cpp did not write {path}")
    return path


class Model:
    """A GGUF file with an open context."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        started = perf_counter()
        model = llama_cpp.llama_model_default_params()
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = context, threads, threads
        settings.n_batch = 2048
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise SystemExit(f"llama.cpp did not load {path}")
        self.feed([0])
        self.load_seconds = perf_counter() - started

    def empty(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        self.empty()
        self.feed(prompt[:-1])
        tokens, token, started = [], prompt[-1], perf_counter()
        for _ in range(count):
            token = int(self.logits(token).argmax())
            tokens.append(token)
        return {"seconds": perf_counter() - started, "tokens": tokens, "load_seconds": self.load_seconds}

    def logits(self, token: int) -> Any:
        """Append a token; its logits, which the next one overwrites."""
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(self.feed([token]), (size,))

    def feed(self, tokens: list[int]) -> Any:
        """Append tokens; the logits of the last one."""
        for at in range(0, len(tokens), 2048):
            part = tokens[at : at + 2048]
            ids = (llama_cpp.llama_token * len(part))(*part)
            status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, len(part)))
            if status:
                raise SystemExit(f"llama_decode returned {status}")
        return llama_cpp.llama_get_logits_ith(self._context, -1) if tokens else None


def main() -> None:
    context, threads = int(sys.argv[1]), int(sys.argv[2])
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    models: dict[str, Model] = {}
    for line in sys.stdin:
        what, form, count, *prompt = json.loads(line)
        if form not in models:
            path = (
                Path(form)
                if what in ("generate", "logits")
                else in_format(Path(sys.argv[3]), json.loads(sys.argv[4]), form)
            )
            models[form] = Model(path, context, threads)
        model = models[form]
        if what == "generate":
            print(json.dumps(model.generate(prompt[0], count)), flush=True)
            continue
        if what == "logits":
            model.empty()
            np.save(prompt[1], np.stack([model.logits(token).copy() for token in prompt[0]]))
            print("null", flush=True)
            continue
        tokens = [(37 * i) % BYTE_TOKENS for i in range(count)]
        if what == "prompt":
            model.empty()
        started = perf_counter()
        for part in [tokens] if what == "prompt" else [[token] for token in tokens]:
            model.feed(part)
        print(perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
