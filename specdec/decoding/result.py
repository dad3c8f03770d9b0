"""The result of a generation: text, tokens, counters of draft acceptance and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from specdec.config import GenerationConfig, RunConfig
from specdec.contract import CycleRecord, Deviation, Stats
from specdec.errors import shown

PHASES = ("prefill", "draft", "verify", "commit")


@attrs.define(kw_only=True)
class RunStats(Stats):
    """Everything counted during one generation."""

    rows: int = 0  # computed by verification: sum(offered) + cycles
    prefilled: int = 0  # prompt tokens run through the target (the rest came from the session's state)
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(PHASES, 0.0))  # wall-clock by phase
    draft_lengths: dict[int, int] = attrs.field(factory=dict)  # verified draft tokens of a cycle -> cycles
    deviation: Deviation = Deviation()
    decode_seconds: float = 0.0  # wall-clock of all cycles, bookkeeping included
    drafter: str = "none"
    inactive_reason: str = ""  # why nothing was drafted or speculation went off, if known
    faults: dict[str, int] = attrs.field(factory=dict)  # faults of drafts -> how often
    forbidden: int = 0  # draft tokens cut because a logits processor does not allow them
    draft: dict[str, Any] = attrs.field(factory=dict)  # ``Drafter.report()`` at the end
    prediction_offered: int = 0  # tokens of ``offered`` that the prediction gave instead of the drafter
    prediction_accepted: int = 0  # tokens of those that were accepted

    def add(self, cycle: CycleRecord, gaps: Sequence[float] = ()) -> None:
        """Count one cycle; ``gaps`` of its tokens that the target would not have chosen, in nats."""
        self.cycles += 1
        self.tokens += len(cycle.emitted)
        self.rows += cycle.offered + 1
        self.count(cycle.offered, cycle.accepted)
        self.draft_lengths[cycle.offered] = self.draft_lengths.get(cycle.offered, 0) + 1
        seconds = self.seconds
        seconds["draft"] += cycle.draft_seconds
        seconds["verify"] += cycle.verify_seconds
        seconds["commit"] += cycle.commit_seconds
        if gaps:
            largest = max(self.deviation.largest_gap, *gaps)
            self.deviation = Deviation(self.deviation.count + len(gaps), largest)

    def fault(self, what: str) -> None:
        """Count a draft that had to be cut because it was faulty."""
        self.faults[what] = self.faults.get(what, 0) + 1

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, prefill excluded; 0 when nothing was generated."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def __repr__(self) -> str:
        kept = f"{sum(self.accepted)} of {sum(self.offered)} drafted tokens kept"
        return f"<RunStats {self.tokens} tokens in {self.cycles} cycles, {kept}, {self.tokens_per_second:.1f} tokens/s>"

    def speculation(self) -> dict[str, object]:
        """Whether any draft token was verified, and if not, why."""
        if self.offered:
            return {"active": True, "drafter": self.drafter, "reason": self.inactive_reason}
        reason = self.inactive_reason or ("no cycle ran" if self.cycles == 0 else "the drafter made no draft")
        cut = [f"{what} ({count})" for what, count in self.faults.items()]
        cut += [f"forbidden by a logits processor ({self.forbidden})"] * bool(self.forbidden)
        if cut and not self.inactive_reason:
            reason = f"every draft was cut before it was verified: {', '.join(cut)}"
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
            "depth": {str(depth): count for depth, count in sorted(self.draft_lengths.items())},
            "speculation": self.speculation(),
            "faults": dict(self.faults),
            "forbidden": self.forbidden,
            "draft": dict(self.draft),
            "prediction": {"offered": self.prediction_offered, "accepted": self.prediction_accepted},
        }


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

    def __repr__(self) -> str:
        made = f"{len(self.tokens)} tokens, ended by {self.finish_reason!r}"
        return f"<Result {shown(self.text, 60)}, {made}, {self.guarantee}, with {self.parity} parity, {self.stats!r}>"

    def to_dict(self) -> dict[str, Any]:
        """The object that ``generate --json`` prints."""
        return {
            **attrs.asdict(self, recurse=False),
            "deviation": attrs.asdict(self.deviation),
            "stats": self.stats.to_dict(),
            "generation": RunConfig(generation=self.generation).to_dict()["generation"],
            "logprobs": None if self.logprobs is None else [attrs.asdict(entry) for entry in self.logprobs],
        }
