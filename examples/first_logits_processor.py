"""A logits processor that forbids repetitions: no n tokens in a row occur twice."""

import sys

import attrs
import numpy as np

import specdec.registry
from specdec import LogitsProcessor, ProcessorEnv, ProcessorSpec, between, hookimpl


@attrs.frozen(kw_only=True)
class OnceConfig:
    """How many tokens in a row may not occur twice; a wrong value fails when the configuration is read."""

    size: int = attrs.field(default=4, validator=between(1, 64))  # tokens


class OnceProcessor(LogitsProcessor):
    """After ``... a b c ... a b`` it forbids ``c``."""

    def __init__(self, config: OnceConfig, env: ProcessorEnv) -> None:
        self._size = config.size
        self._vocab_size = env.vocab_size

    def process(self, logits, history):
        allowed = logits.copy()  # the array that was handed over is not ours
        allowed[list(self._forbidden(history))] = -np.inf
        return allowed if np.isfinite(allowed).any() else logits  # one token must remain

    def legal(self, draft, history):
        tokens = list(history)
        for count, token in enumerate(draft):
            if token in self._forbidden(tokens):
                return count  # so many may stay; the rest is not verified
            tokens.append(token)
        return len(draft)

    def _forbidden(self, history):
        """The tokens that would complete a run which the text has already."""
        history = list(history)
        before = self._size - 1
        last = history[len(history) - before :]
        starts = range(len(history) - before)
        found = {history[start + before] for start in starts if history[start : start + before] == last}
        return found if len(found) < self._vocab_size else set()


@hookimpl
def specdec_logits_processors() -> list[ProcessorSpec]:
    help = "no n tokens twice"
    return [ProcessorSpec(name="once", factory=OnceProcessor, config=OnceConfig, help=help)]


if __name__ == "__main__":  # without packaging: register this module, then ask for the processor by its name
    specdec.registry.registry().register(sys.modules[__name__])
    lm = specdec.load("demo", drafter="ngram", depth=4)
    for processors in ((), ({"name": "once", "size": 3},)):
        result = lm.generate("0, 0, 0, 0,", max_new_tokens=40, processors=processors)
        print(result.text, result.guarantee, result.stats.forbidden, sep="\n")
