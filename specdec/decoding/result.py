"""Counters of a generation and the record that a result carries."""

from __future__ import annotations

from typing import Any

import attrs

from specdec.config import GenerationConfig, RunConfig
from specdec.contract import CycleRecord, Deviation, Stats

PHASES = ("prefill", "draft", "verify", "commit")


@attrs.define(kw_only=True)
class RunStats(Stats):
    """Everything counted during one generation.

    ``seconds`` by phase, wall-clock, those of ``whole_cycles`` all in ``verify``; ``depth`` is a histogram of the
    drafts' lengths by cycle; ``rows`` counts the target rows that verification read, so that
    ``rows == sum(offered) + cycles``.
    """

    rows: int = 0
    prefilled: int = 0  # prompt tokens that ran through the target now (the rest came from the session's state)
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(PHASES, 0.0))
    depth: dict[int, int] = attrs.field(factory=dict)
    whole_cycles: int = 0  # of ``cycles``, those whose phases nobody can tell apart
    deviation: Deviation = Deviation()
    decode_seconds: float = 0.0  # wall-clock of all cycles, bookkeeping included
    drafter: str = "none"
    inactive_reason: str = ""  # why there was no speculation, where the cause is known
    faults: dict[str, int] = attrs.field(factory=dict)  # what was wrong with drafts, and how often
    draft: dict[str, Any] = attrs.field(factory=dict)  # ``Drafter.report()`` at the end

    def add(self, cycle: CycleRecord, deviation: Deviation) -> None:
        """Count one cycle."""
        self.cycles += 1
        self.tokens += len(cycle.emitted)
        self.rows += cycle.offered + 1
        self.count(cycle.offered, cycle.accepted)
        self.depth[cycle.offered] = self.depth.get(cycle.offered, 0) + 1
        self.whole_cycles += cycle.on_device
        seconds = self.seconds
        seconds["draft"] += cycle.draft_seconds
        seconds["verify"] += cycle.verify_seconds
        seconds["commit"] += cycle.commit_seconds
        if deviation.count:
            gap = max(self.deviation.largest_gap, deviation.largest_gap)
            self.deviation = Deviation(self.deviation.count + deviation.count, gap)

    def fault(self, what: str) -> None:
        """Count something wrong with a draft that the engine had to cut."""
        self.faults[what] = self.faults.get(what, 0) + 1

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, prefill excluded; 0 when nothing was generated."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def speculation(self) -> dict[str, object]:
        """Whether any draft token was verified, and why not where none was."""
        if self.offered:
            return {"active": True, "drafter": self.drafter, "reason": self.inactive_reason}
        reason = self.inactive_reason or ("no cycle ran" if self.cycles == 0 else "the drafter made no draft")
        return {"active": False, "drafter": self.drafter, "reason": reason}

    def to_dict(self) -> dict[str, Any]:
        """The ``stats`` object of ``--json``."""
        return {
            "cycles": self.cycles,
            "tokens": self.tokens,
            "rows": self.rows,
            "prefilled": self.prefilled,
            "offered": list(self.offered),
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
            "whole_cycles": self.whole_cycles,
            "depth": {str(depth): count for depth, count in sorted(self.depth.items())},
            "speculation": self.speculation(),
            "faults": dict(self.faults),
            "draft": dict(self.draft),
        }


@attrs.frozen
class TokenLogprobs:
    """Log-probabilities of one generated token, from the target row that decided it.

    They are the model's own, at temperature 1 and before bias, penalties, bans and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


@attrs.frozen(kw_only=True)
class Result:
    """What a generation gave."""

    tokens: list[int]
    text: str
    finish_reason: str  # "stop", "stop_string", "length", "context" or "interrupted"
    prompt_tokens: int
    guarantee: str  # of the verifier: "exact", "distribution", "bounded" or "heuristic"
    parity: str  # of the backend: "bitwise" or "numeric"
    deviation: Deviation
    stats: RunStats
    notices: list[str]
    logprobs: list[TokenLogprobs] | None = None  # one per token of ``tokens``, when asked for
    prompt: list[int] = attrs.field(factory=list)  # the token ids that ``tokens`` follow, earlier turns included
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)  # the settings in force
    fingerprint: str = ""  # of the model

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
            "logprobs": None if self.logprobs is None else [attrs.asdict(entry) for entry in self.logprobs],
        }
