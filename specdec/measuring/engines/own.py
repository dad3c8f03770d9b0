"""specdec's own engine, as one that can be audited."""

from __future__ import annotations

from specdec._version import __version__
from specdec.measuring.engines.engine import TOP, Answer, Asked, Step
from specdec.measuring.runs import plain
from specdec.pipeline import LanguageModel


class OwnEngine:
    """A language model of specdec."""

    def __init__(self, lm: LanguageModel, part: str) -> None:
        self._lm = lm
        self.name = f"specdec {__version__}, {part}"
        self.dtype = lm.info.dtype

    @classmethod
    def pair(cls, lm: LanguageModel) -> tuple[OwnEngine, OwnEngine]:
        """Plain decoding with the same parts, and ``lm`` itself."""
        parts = f"drafter {lm.drafter.spec.name}, depth {lm.depth.spec.name}, verifier {lm.config.verifier.name}"
        return cls(plain(lm), "plain"), cls(lm, parts)

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """See ``Engine``."""
        result = self._lm.generate(
            prompt,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            ignore_eos=asked.ignore_eos,
            logprobs=TOP,
        )
        assert result.logprobs is not None
        steps = tuple(Step(one.token, one.logprob, dict(one.top)) for one in result.logprobs)
        return Answer(steps, result.text, result.finish_reason != "length", sum(result.stats.offered))
