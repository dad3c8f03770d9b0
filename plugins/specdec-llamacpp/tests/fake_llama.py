"""A ``Llama`` in a few lines: it verifies drafts as llama-cpp-python does, and dies of what would kill that.

Its target is the made-up one of ``simulated.py``, so that plain decoding is known.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from simulated import VOCAB, HostDied, chosen


class Memory:
    """What the host holds of a text; a recurrent one drops at most ``snapshots`` tokens."""

    def __init__(self, snapshots: int | None) -> None:
        self.ctx = self
        self.snapshots = snapshots
        self.tokens: list[int] = []

    def kv_cache_seq_rm(self, sequence: int, start: int, end: int) -> bool:
        if self.snapshots is not None and 0 < start < len(self.tokens) - self.snapshots:
            return False
        del self.tokens[start:]
        return True


class FakeLlama:
    def __init__(
        self,
        model_path: str = "fake.gguf",
        *,
        draft_model: Any = None,
        n_ctx: int = 160,
        n_batch: int = 32,
        logits_all: bool = False,
        recurrent: bool = False,
        rolls_back: bool = True,
        **_: Any,
    ) -> None:
        from llama_cpp import llama_cpp as bindings

        self.model_path, self.draft_model, self._n_ctx = model_path, draft_model, n_ctx
        self._is_recurrent, self._is_hybrid = recurrent, False
        self.snapshots = bindings.llama_context_default_params().n_rs_seq
        self._ctx = Memory(self.snapshots if rolls_back else 0) if recurrent else Memory(None)
        self.scores = np.zeros((n_ctx if logits_all else n_batch, VOCAB), np.single)
        self.input_ids = np.full(n_ctx, 7, np.intc)
        self.n_tokens = 0

    def n_vocab(self) -> int:
        return VOCAB

    def n_ctx(self) -> int:
        return self._n_ctx

    def eval(self, tokens: Sequence[int]) -> None:
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        if self._ctx.tokens != self.input_ids[: self.n_tokens].tolist():
            raise HostDied("llama_decode returned -1")
        for token in tokens:
            if not 0 <= token < VOCAB:
                raise HostDied(f"token {token}")
            self.scores[self.n_tokens, :] = 0  # past its end, the host ends
            self.input_ids[self.n_tokens] = token
            self._ctx.tokens.append(int(token))
            self.n_tokens += 1

    def generate(self, prompt: Sequence[int]) -> Iterator[int]:
        self._ctx.tokens.clear()
        self.n_tokens, pending = 0, list(prompt)
        at = len(pending) - 1
        while True:
            self.eval(pending)
            while at < self.n_tokens:
                token = chosen(self.input_ids[: at + 1].tolist())
                at += 1
                yield token
                if at < self.n_tokens and token != self.input_ids[at]:
                    self.n_tokens = at
                    break
            pending = [token]
            if self.draft_model is not None:
                length = self.n_tokens + 1
                self.input_ids[self.n_tokens] = token
                draft = self.draft_model(self.input_ids[:length])
                pending += draft.astype(int)[: self._n_ctx - length].tolist()

    def take(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first ``count`` tokens of a generation."""
        with contextlib.closing(self.generate(prompt)) as tokens:
            return [next(tokens) for _ in range(min(count, self._n_ctx - len(prompt)))]

    def __call__(self, prompt: str, max_tokens: int = 16, **_: Any) -> dict[str, Any]:
        tokens = self.take([byte % VOCAB for byte in prompt.encode()], max_tokens)
        return {"choices": [{"text": " ".join(map(str, tokens))}]}


def modules() -> dict[str, types.ModuleType]:
    """The modules that the adapter and its README import from the host, by name."""
    package, bindings = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_cpp")
    bindings.llama_context_default_params = lambda: types.SimpleNamespace(n_rs_seq=0)  # type: ignore[attr-defined]
    bindings.llama_n_rs_seq = lambda ctx: ctx.snapshots  # type: ignore[attr-defined]
    package.llama_cpp, package.Llama = bindings, FakeLlama  # type: ignore[attr-defined]
    return {"llama_cpp": package, "llama_cpp.llama_cpp": bindings}
