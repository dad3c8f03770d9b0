"""llama.cpp's side of our comparisons: does with a GGUF file what it is asked for.

    llama_cpp_peer.py CONTEXT THREADS

It runs in a process and an environment of its own, which needs llama-cpp-python and numpy. Each line of its input is a
request and gets a line of JSON. ``["generate", "FILE.gguf", [1, 2], 16]`` continues the prompt by the best 16 tokens,
end tokens included; the answer has ``tokens``, ``seconds`` without the prompt's, ``first_seconds`` of the prompt and
the first token, and ``load_seconds`` from loading to a first token. ``["logits", "FILE.gguf", [1, 2], "FILE.npy"]``
writes the logits of the tokens, float32 ``[2, V]``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np


class Model:
    """A GGUF file with an open context."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        started = perf_counter()
        model = llama_cpp.llama_model_default_params()
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = context, threads, threads
        settings.n_batch = 2048
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise SystemExit(f"llama.cpp did not load {path}")
        self.feed([0])
        self.load_seconds = perf_counter() - started

    def empty(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        self.empty()
        began = perf_counter()
        self.feed(prompt[:-1])
        started = perf_counter()
        tokens = [int(self.append(prompt[-1]).argmax())]
        first = perf_counter() - began
        while len(tokens) < count:
            tokens.append(int(self.append(tokens[-1]).argmax()))
        times = {"seconds": perf_counter() - started, "first_seconds": first, "load_seconds": self.load_seconds}
        return {"tokens": tokens, **times}

    def logits(self, tokens: list[int], path: str) -> None:
        self.empty()
        np.save(path, np.stack([self.append(token).copy() for token in tokens]))

    def append(self, token: int) -> Any:
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
        what, path, tokens, argument = json.loads(line)
        if path not in models:
            models[path] = Model(path, context, threads)
        answer = getattr(models[path], what)(tokens, argument)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
