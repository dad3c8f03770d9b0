"""What an audit needs of an engine: prompts become tokens with their most likely alternatives."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from specdec.errors import UnsupportedError

TOP = 5  # alternatives that an engine is asked for at every position; the most that OpenAI's completions give


@attrs.frozen(kw_only=True)
class Asked:
    """How an answer is generated. A seed matters above temperature 0 only."""

    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@attrs.frozen
class Step:
    """A token of an answer, and the row of log-probabilities that it was chosen from.

    Attributes:
        token: its id, or its text where the engine gives no ids.
        logprob: its log-probability.
        top: the most likely tokens of the row with their log-probabilities; empty if the engine has none here.
    """

    token: int | str
    logprob: float
    top: Mapping[int | str, float]

    @property
    def known(self) -> Mapping[int | str, float]:
        """All tokens of the row whose log-probability is known."""
        return {self.token: self.logprob, **self.top}


@attrs.frozen
class Answer:
    """What an engine generated.

    Attributes:
        steps: one for each token.
        text: all of it.
        ended: whether the engine ended it before the limit.
        drafted: tokens that were drafted on the way; None if the engine does not say.
    """

    steps: tuple[Step, ...]
    text: str
    ended: bool
    drafted: int | None = None


class Engine(Protocol):
    """Anything that continues a text.

    Attributes:
        name: what it is, with its version, for reports.
        dtype: of its activations, such as ``float32``; empty if that is not known.
    """

    name: str
    dtype: str

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """Continue ``prompt``, with the ``TOP`` best log-probabilities of every token.

        Log-probabilities are the model's at temperature 1, before filters. Raises: SpecdecError.
        """
        ...


def adapter(module: str, host: str) -> Any:
    """The plugin that runs specdec's drafters in ``host``. Raises: UnsupportedError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{host} gets specdec's drafters by a plugin, which is not installed",
            try_=f"{module.replace('_', '-')} (plugins/ in specdec's repository), or no drafter for {host}'s own one",
        ) from error
