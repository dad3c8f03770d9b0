"""Audit a finished run: replay it teacher-forced, one row at a time, and compare each token with plain decoding's.

Every row sees the committed tokens rather than the replay's choices, so one divergence does not cause the next. An
exact verifier on a backend of BITWISE parity has none. With a lossy verifier, divergences are what it tolerated. With
NUMERIC parity they are near-ties; the histogram of top-two gaps shows how near.

``specdec doctor`` shows what the backend does to the bits of passes of several rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import attrs
import numpy as np

from specdec.checking import between, checked
from specdec.config import GenerationConfig
from specdec.contract import Context, Guarantee, Parity
from specdec.decoding.parts import make_sampling, override_generation
from specdec.decoding.sequence import PREFILL_CHUNK
from specdec.errors import PromptError
from specdec.measuring.divergences import Divergence, GapReport, Verdict, finite, rounding_of
from specdec.pipeline import LanguageModel
from specdec.sampling import Rows


@attrs.frozen(kw_only=True)
class AuditReport(GapReport):
    """The result of a replay. Gaps are between logits after bias, penalties and bans, before temperature."""

    prompt_tokens: int
    tokens: int  # audited
    temperature: float
    guarantee: str  # of the verifier
    parity: str  # of the backend
    divergences: tuple[Divergence, ...]
    gaps: tuple[float, ...]  # top-two gap of every position
    tolerance: float | None = None  # nats that a committed token may be below the best one; None: any gap
    dtype: str = ""  # of the activations; it says what rounding explains

    @property
    def rate(self) -> float:
        """Divergences per token."""
        return len(self.divergences) / self.tokens if self.tokens else 0.0

    @property
    def first(self) -> int | None:
        """The position of the first divergence."""
        return self.divergences[0].position if self.divergences else None

    @property
    def largest_gap(self) -> float:
        """The largest gap of a divergence; 0 without any."""
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    def verdict(self, divergence: Divergence) -> Verdict:
        """Whether rounding explains a divergence; of a sampled run nobody can tell."""
        return rounding_of(self.dtype).verdict(divergence.gap if self.temperature == 0 else math.nan)

    @property
    def broken_promise(self) -> bool:
        """Whether tokens diverge although verifier and backend promise that none does."""
        promised = self.guarantee == Guarantee.EXACT.value and self.parity == Parity.BITWISE.value
        return promised and bool(self.divergences)

    @property
    def beyond(self) -> int:
        """Divergences with a gap above the tolerance; 0 without one."""
        return sum(self.tolerance is not None and divergence.gap > self.tolerance for divergence in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``audit --json`` prints; an infinite number is null."""
        facts = ("prompt_tokens", "tokens", "temperature", "guarantee", "parity", "broken_promise", "tolerance")
        summary = {"count": len(self.divergences), "rate": self.rate, "first": self.first}
        positions = [
            finite(attrs.asdict(divergence)) | {"verdict": self.verdict(divergence).value}
            for divergence in self.divergences
        ]
        return {
            **{name: getattr(self, name) for name in facts},
            "divergence": finite({**summary, "largest_gap": self.largest_gap, "positions": positions}),
            "gap_histogram": self.histogram_dict(),
            "beyond_tolerance": self.beyond,
        }


@checked(PromptError)
def audit(
    lm: LanguageModel,
    prompt_tokens: Sequence[int],
    tokens: Sequence[int],
    *,
    tolerance: Annotated[float, between(0.0, math.inf)] | None = None,
    generation: GenerationConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> AuditReport:
    """Replay ``tokens`` after ``prompt_tokens``, teacher-forced, and compare each with plain decoding's choice.

    That is the argmax at temperature 0; above, the token chosen by the position's noise, which depends on the seed.

    Args:
        lm: the model; its drafter and verifier are not used.
        prompt_tokens, tokens: of a finished run, such as ``result.prompt`` and ``result.tokens``.
        tolerance: nats that a greedy token may be below the row's best one; ``AuditReport.beyond`` counts those that
            are further below.
        generation: the run's settings, such as ``result.generation``; the configuration's if None.
        progress: called with the tokens done and their total.
        **settings: fields of ``specdec.config.GenerationConfig`` (temperature, seed, logit_bias, ...) that differ.

    Raises: PromptError for an empty or unusable prompt, tokens or setting.
    """
    prompt = lm.encode(list(prompt_tokens))
    if not tokens:
        raise PromptError("there are no tokens to audit", try_="a run that generated at least one")
    forced = lm.encode(list(tokens))
    if len(prompt) + len(forced) > lm.capacity:
        raise PromptError(f"{len(prompt)} and {len(forced)} tokens are more than the {lm.capacity} that fit")
    generation = override_generation(generation or lm.config.generation, settings)
    if tolerance is not None and generation.temperature > 0:
        raise PromptError(
            f"a tolerance is a distance from the best token, and this run sampled (temperature "
            f"{generation.temperature:g})",
            try_="no tolerance, or a greedy run",
        )
    sampling = make_sampling(lm, generation, generated_from=len(prompt))
    history = list(prompt)
    context = Context(history, sampling, generated_from=len(prompt))
    state = lm.target.new_state(len(prompt) + len(forced))
    for at in range(0, len(prompt) - 1, PREFILL_CHUNK):  # as a session does it
        lm.target.prefill(state, prompt[at : min(at + PREFILL_CHUNK, len(prompt) - 1)])
    divergences: list[Divergence] = []
    gaps: list[float] = []
    for position, token in enumerate(forced):
        logits = lm.target.decode(state, [history[-1]]).need_logits()
        lm.target.commit(state, 1)
        deciding = Rows(logits, (), context)
        chosen = deciding.choose(0)
        values = deciding.processed(0)
        best, second = np.partition(values, -2)[[-1, -2]] if len(values) > 1 else (values[0], -math.inf)
        gaps.append(float(best - second))
        if token != chosen:
            divergences.append(Divergence(position, token, chosen, float(best - values[token]), gaps[-1]))
        history.append(token)
        if progress is not None:
            progress(position + 1, len(forced))
    return AuditReport(
        prompt_tokens=len(prompt),
        tokens=len(forced),
        temperature=generation.temperature,
        guarantee=lm.verifier.guarantee.value,
        parity=lm.info.parity.value,
        divergences=tuple(divergences),
        gaps=tuple(gaps),
        tolerance=tolerance,
        dtype=lm.info.dtype,
    )
