"""llama.cpp in this process, through llama-cpp-python, as an engine: plain, and with a draft model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from specdec.config import RunConfig
from specdec.errors import UnsupportedError, described
from specdec.hosting import supported
from specdec.measuring.engines.engine import TOP, Answer, Asked, Step, adapter

FIRST, END = "0.3.36", "0.4"  # versions of llama-cpp-python whose generation is as it is read here
CAPACITY = 2048  # tokens of a text, at most, if the configuration says nothing: the logits of all of them are kept
DEPTH = 10  # tokens drafted per pass if the configuration names no number, as in llama-cpp-python


class LlamaCppEngine:
    """A GGUF file in llama.cpp.

    Args:
        llm: a ``Llama`` with ``logits_all=True``; two engines may share it.
        name: for reports.
        draft: its draft model; None for plain decoding.
    """

    dtype = "float16"  # its cache's, by default; what the weights' format is, rows of a pass share

    def __init__(self, llm: Any, name: str, draft: Any = None) -> None:
        self._llm, self._draft, self.name = llm, draft, name
        self._is_end = importlib.import_module("llama_cpp").llama_vocab_is_eog

    @classmethod
    def pair(cls, config: RunConfig) -> tuple[LlamaCppEngine, LlamaCppEngine]:
        """Plain decoding of ``config``'s model, a GGUF file, and the same with drafts, with its depth.

        The drafter ``auto`` is llama-cpp-python's own prompt lookup; another one needs the plugin specdec-llamacpp.

        Raises: UnsupportedError if a package is missing or of another version, or the file cannot be loaded.
        """
        why = "its generation loop is another one"
        version = f"llama-cpp-python {supported(['llama-cpp-python'], FIRST, END, why)}"
        file = Path(config.target.model)
        if not file.is_file():
            raise UnsupportedError("llama.cpp reads GGUF files", model=file, try_="--engine llamacpp FILE.gguf")
        host = importlib.import_module("llama_cpp")
        depth = int(config.depth.options.get("depth", DEPTH))
        if config.drafter.name == "auto":
            lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
            draft, drafted = lookup(num_pred_tokens=depth), f"prompt lookup of {depth} tokens"
        else:
            made = adapter("specdec_llamacpp", "llama-cpp-python").SpecdecDraft
            draft = made(config.drafter.name, depth=depth, **config.drafter.options)
            drafted = f"specdec's {config.drafter.name} of {depth} tokens"
        try:
            llm = host.Llama(str(file), n_ctx=config.target.capacity or CAPACITY, logits_all=True, verbose=False)
        except (ValueError, OSError) as error:
            raise UnsupportedError(f"llama.cpp cannot load the model: {described(error)}", model=file) from error
        return cls(llm, f"{version}, plain"), cls(llm, f"{version}, {drafted}", draft)

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """See ``Engine``."""
        llm = self._llm
        ids = llm.tokenize(prompt.encode())
        if not ids or len(ids) + asked.max_new_tokens > llm.n_ctx():
            wanted = f"{len(ids)} tokens and {asked.max_new_tokens} new ones"
            raise UnsupportedError(f"a text takes 1 to {llm.n_ctx()} tokens, got {wanted}", engine=self.name)
        llm.reset()  # no answer continues the passes of another one
        llm.set_seed(asked.seed)
        llm.draft_model = self._draft
        steps: list[Step] = []
        ended = False
        settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        try:
            for token in llm.generate(ids, temp=asked.temperature, **settings):
                steps.append(_step(token, llm.scores[len(ids) - 1 + len(steps)]))
                ended = not asked.ignore_eos and self._is_end(llm._model.vocab, token)
                if ended or len(steps) == asked.max_new_tokens:
                    break
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedError(f"llama.cpp refuses: {described(error)}", engine=self.name) from error
        text = llm.detokenize([step.token for step in steps]).decode(errors="replace")
        return Answer(tuple(steps), text, ended)


def _step(token: int, logits: Any) -> Step:
    row = np.asarray(logits, np.float64)
    row = row - row.max()
    row -= np.log(np.exp(row).sum())
    best = np.argsort(-row, kind="stable")[:TOP]
    return Step(token, float(row[token]), {int(one): float(row[one]) for one in best})
