"""The result of a generation."""

from __future__ import annotations

from typing import Any

import attrs

from specdec.config import GenerationConfig, RunConfig
from specdec.contract import Deviation
from specdec.decoding.notebook import html_table
from specdec.decoding.statistics import RunStats
from specdec.errors import shown


@attrs.frozen
class TokenLogprobs:
    """Log-probabilities of one generated token, from the target row that decided it.

    They are at temperature 1, before bias, penalties, bans and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


@attrs.frozen(kw_only=True)
class Result:
    """The output of a generation and its counters."""

    tokens: list[int]
    text: str
    finish_reason: str  # "stop", "stop_string", "length", "context" or "interrupted"
    prompt_tokens: int
    guarantee: str  # of the verifier: "exact", "distribution", "bounded" or "heuristic"
    parity: str  # of the backend: "bitwise" or "numeric"
    deviation: Deviation
    stats: RunStats
    notices: list[str]
    logprobs: list[TokenLogprobs] | None = None  # one per token of ``tokens``, if requested
    prompt: list[int] = attrs.field(factory=list)  # all token ids before ``tokens``, earlier turns included
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)  # the settings in force
    fingerprint: str = ""  # of the model
    device: str = ""  # what it ran on, such as "cpu (x86_64, avx2, 2 threads)"
    weights: str = ""  # formats that its matrices are computed in

    def _facts(self) -> list[tuple[str, str]]:
        made = len(self.tokens)
        return [
            ("tokens", f"{made} after a prompt of {self.prompt_tokens}, ended by {self.finish_reason!r}"),
            ("guarantee", f"{self.guarantee}, with {self.parity} parity"),
            *self.stats.facts(),
            *(("notice", notice) for notice in self.notices),
        ]

    def __repr__(self) -> str:
        return f"<Result {shown(self.text, 60)}, {', '.join(f'{label}: {value}' for label, value in self._facts())}>"

    def _repr_html_(self) -> str:
        return html_table(self._facts(), self.text)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``generate --json`` prints."""
        return {
            "tokens": list(self.tokens),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "guarantee": self.guarantee,
            "parity": self.parity,
            "deviation": attrs.asdict(self.deviation),
            "stats": self.stats.to_dict(),
            "notices": list(self.notices),
            "prompt": list(self.prompt),
            "generation": RunConfig(generation=self.generation).to_dict()["generation"],
            "fingerprint": self.fingerprint,
            "device": self.device,
            "weights": self.weights,
            "logprobs": None if self.logprobs is None else [attrs.asdict(entry) for entry in self.logprobs],
        }
