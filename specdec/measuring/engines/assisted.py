"""transformers in this process, as an engine: plain ``generate``, and assisted generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specdec.checkpoints import locate
from specdec.config import RunConfig
from specdec.errors import UnsupportedError, described
from specdec.hosting import supported
from specdec.measuring.engines.engine import TOP, Answer, Asked, Step, adapter
from specdec.text import Tokenizer

FIRST, END = "5.20", "6"  # versions of transformers whose assisted generation gives logits as it is read here
DEPTH = 5  # tokens drafted per pass if the configuration names no number

Drafting = Callable[[], contextlib.AbstractContextManager[Any]]


class TransformersEngine:
    """A causal language model of transformers, on the CPU.

    Args:
        model, tokenizer: as ``pair`` loads them.
        name: for reports.
        options: further arguments of ``generate``.
        drafting: what ``generate`` runs within.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        name: str,
        options: dict[str, Any] | None = None,
        drafting: Drafting = contextlib.nullcontext,
    ) -> None:
        self._model, self._tokenizer, self._options, self._drafting = model, tokenizer, options or {}, drafting
        self.name = name
        self.dtype = str(model.dtype).removeprefix("torch.")

    @classmethod
    def pair(cls, config: RunConfig) -> tuple[TransformersEngine, TransformersEngine]:
        """Plain and assisted generation of ``config``'s model, with its depth.

        The drafter ``auto`` is transformers' own prompt lookup; another one needs the plugin specdec-transformers.

        Raises: UnsupportedError if a package is missing or of another version, or the model is not supported.
        """
        version = f"transformers {supported(['transformers'], FIRST, END, 'its assisted generation is another one')}"
        from transformers import AutoModelForCausalLM

        folder = locate(config.target.model, revision=config.target.revision)
        tokenizer = Tokenizer.from_folder(folder)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=config.target.dtype)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise UnsupportedError(f"transformers cannot load the model: {described(error)}", model=folder) from error
        model.eval()
        depth = int(config.depth.options.get("depth", DEPTH))
        plain = cls(model, tokenizer, f"{version}, plain")
        if config.drafter.name == "auto":
            lookup = {"prompt_lookup_num_tokens": depth}
            return plain, cls(model, tokenizer, f"{version}, prompt lookup of {depth} tokens", lookup)
        candidates = adapter("specdec_transformers", "transformers").candidates
        chosen = candidates(config.drafter.name, depth=depth, tokenizer=folder, **config.drafter.options)
        name = f"{version}, specdec's {config.drafter.name} of {depth} tokens"
        return plain, cls(model, tokenizer, name, drafting=lambda: chosen.on(model))

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """See ``Engine``."""
        ids = torch.tensor([self._tokenizer.encode(prompt)])
        if not ids.numel():
            raise UnsupportedError("the tokenizer makes no token of a prompt", prompt=prompt[:40])
        settings: dict[str, Any] = {"do_sample": asked.temperature > 0, "max_new_tokens": asked.max_new_tokens}
        if asked.temperature > 0:
            settings |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        try:
            with torch.random.fork_rng(devices=()), self._ending(asked), self._drafting():
                torch.manual_seed(asked.seed)
                made = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **settings,
                    **self._options,
                )
        except (ValueError, NotImplementedError, IndexError) as error:
            raise UnsupportedError(f"transformers refuses: {described(error)}", engine=self.name) from error
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        steps = []
        for token, row in zip(tokens, made.logits, strict=True):
            logprobs = row[0].float().log_softmax(-1)
            values, best = logprobs.topk(min(TOP, len(logprobs)))
            top = dict(zip(best.tolist(), values.tolist(), strict=True))
            steps.append(Step(token, float(logprobs[token]), top))
        return Answer(tuple(steps), self._tokenizer.decode(tokens), len(tokens) < asked.max_new_tokens)

    @contextlib.contextmanager
    def _ending(self, asked: Asked) -> Iterator[None]:
        """Within the block, no token ends an answer that must not end."""
        settings = self._model.generation_config
        before = settings.eos_token_id
        settings.eos_token_id = None if asked.ignore_eos else before
        try:
            yield
        finally:
            settings.eos_token_id = before
