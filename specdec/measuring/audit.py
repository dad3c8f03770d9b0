"""Teacher-forced replay of a finished run: would plain decoding, one row at a time, have chosen the same tokens?

A divergence at one position says nothing about the next: every row sees the committed tokens, not the replay's own.
With an exact verifier on a backend of BITWISE parity there is none. With a lossy verifier they are what it tolerated.
With NUMERIC parity they are near-ties, and the histogram of top-two gaps shows how near.

The control replays the same tokens by plain decoding in passes of several rows. What differs there is the backend's
own dependence on the number of rows, without any speculation.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.config import GenerationConfig, structure_options
from specdec.contract import Context, Guarantee, Parity
from specdec.decoding.prefill import PREFILL_CHUNK
from specdec.decoding.settings import make_sampling, override_generation
from specdec.errors import PromptError, UnsupportedError
from specdec.sampling import Rows

if TYPE_CHECKING:
    from specdec.contract import State
    from specdec.pipeline import LanguageModel

GAP_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Edges of the gap histogram in nats; the first bin starts at 0 (a tie), the last has no end."""


@attrs.frozen
class Divergence:
    """A committed token that the replay would not have chosen."""

    position: int  # among the audited tokens; 0 is the first after the prompt
    token: int  # what the run committed
    chosen: int  # what plain decoding chooses there
    gap: float  # nats between the row's best logit and the committed token's; inf for a token that is not allowed
    top_two: float  # nats between the row's two best logits


@attrs.frozen(kw_only=True)
class Control:
    """Plain decoding of the same tokens in passes of ``rows`` rows, against passes of one row."""

    rows: int
    compared: int  # token positions
    equal_rows: int  # of them: logits equal bit for bit
    argmax_disagreements: int
    largest_difference: float  # between two logits of the same position and token

    @property
    def equal_share(self) -> float:
        """Share of the positions whose logits are equal bit for bit."""
        return self.equal_rows / self.compared if self.compared else 1.0


@attrs.frozen(kw_only=True)
class AuditReport:
    """What a replay found. Gaps are of the logits after bias, penalties and bans, before temperature."""

    prompt_tokens: int
    tokens: int  # audited
    temperature: float
    guarantee: str  # of the verifier
    parity: str  # of the backend
    divergences: tuple[Divergence, ...]
    gaps: tuple[float, ...]  # top-two gap of every position
    control: Control | None  # None where it was not asked for, or the target takes one row only

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
        """The largest gap of a divergence; 0 where there is none."""
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    @property
    def broken_promise(self) -> bool:
        """Whether tokens diverge although verifier and backend promise that none does."""
        promised = self.guarantee == Guarantee.EXACT.value and self.parity == Parity.BITWISE.value
        return promised and bool(self.divergences)

    def histogram(self) -> list[tuple[float, float, int, int]]:
        """Bins of the top-two gap: from, to (inf at last), positions, divergences among them."""
        everywhere = _counts(self.gaps)
        diverging = _counts(divergence.top_two for divergence in self.divergences)
        edges = (0.0, *GAP_EDGES, math.inf)
        return list(zip(edges, edges[1:], everywhere, diverging, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``audit --json`` prints; an infinite number is null."""
        control = self.control
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "guarantee": self.guarantee,
            "parity": self.parity,
            "divergence": {
                "count": len(self.divergences),
                "rate": self.rate,
                "first": self.first,
                "largest_gap": _finite(self.largest_gap),
                "positions": [
                    {**attrs.asdict(found), "gap": _finite(found.gap), "top_two": _finite(found.top_two)}
                    for found in self.divergences
                ],
            },
            "gap_histogram": [
                {"from": low, "to": _finite(high), "positions": all_, "divergences": diverging}
                for low, high, all_, diverging in self.histogram()
            ],
            "control": None if control is None else {**attrs.asdict(control), "equal_share": control.equal_share},
            "broken_promise": self.broken_promise,
        }


def _counts(gaps: Iterable[float]) -> list[int]:
    counts = [0] * (len(GAP_EDGES) + 1)
    for gap in gaps:
        counts[bisect_right(GAP_EDGES, gap)] += 1
    return counts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def audit(
    lm: LanguageModel,
    prompt_tokens: Sequence[int],
    tokens: Sequence[int],
    *,
    rows: int = 4,
    generation: GenerationConfig | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> AuditReport:
    """Replay ``tokens`` after ``prompt_tokens``, teacher-forced, and compare each with plain decoding's choice.

    At temperature 0 that is the argmax, above it the token that the position's noise chooses, so the seed matters.

    Args:
        lm: the model; its drafter and verifier are not used.
        prompt_tokens, tokens: of a finished run, such as ``result.prompt`` and ``result.tokens``.
        rows: of the control's passes; 1 leaves the control out.
        generation: the settings that the run was made with, such as ``result.generation``; the configuration's where
            None.
        progress: called with the number of tokens done.
        **settings: fields of ``specdec.config.GenerationConfig`` (temperature, seed, logit_bias, ...) that differ.

    Raises: PromptError for an empty or unusable prompt, tokens or setting.
    """
    prompt = lm.encode(list(prompt_tokens))
    if not tokens:
        raise PromptError("there are no tokens to audit", try_="a run that generated at least one")
    forced = lm.encode(list(tokens))
    if len(prompt) + len(forced) > lm.capacity:
        raise PromptError(f"{len(prompt)} and {len(forced)} tokens are more than the {lm.capacity} that fit")
    if rows < 1:
        raise PromptError(f"the control's passes take 1 row or more, got {rows}")
    generation = override_generation(generation or lm.config.generation, settings)
    sampling = make_sampling(lm, generation, generated_from=len(prompt))
    rows = min(rows, lm.info.max_rows)
    history = list(prompt)
    context = Context(history, sampling, generated_from=len(prompt))
    single = _prefilled(lm, prompt, len(forced))
    control = _ControlRun(lm, _prefilled(lm, prompt, len(forced)), rows) if rows > 1 else None

    divergences: list[Divergence] = []
    gaps: list[float] = []
    for position, token in enumerate(forced):
        pending = history[-1]
        logits = lm.target.decode(single, [pending]).need_logits()
        lm.target.commit(single, 1)
        deciding = Rows(logits, (), context)
        chosen = deciding.choose(0)
        values = deciding.processed(0)
        best, second = np.partition(values, -2)[[-1, -2]] if len(values) > 1 else (values[0], -math.inf)
        gaps.append(float(best - second))
        if token != chosen:
            divergences.append(Divergence(position, token, chosen, float(best - values[token]), gaps[-1]))
        if control is not None:
            control.take(pending, logits.rows()[0])
        history.append(token)
        if progress is not None:
            progress(position + 1)
    return AuditReport(
        prompt_tokens=len(prompt),
        tokens=len(forced),
        temperature=generation.temperature,
        guarantee=lm.verifier.guarantee.value,
        parity=lm.info.parity.value,
        divergences=tuple(divergences),
        gaps=tuple(gaps),
        control=None if control is None else control.report(),
    )


def _prefilled(lm: LanguageModel, prompt: Sequence[int], room: int) -> State:
    """A state that holds the prompt without its last token, taken in as a session takes it in."""
    state = lm.target.new_state(len(prompt) + room)
    for at in range(0, len(prompt) - 1, PREFILL_CHUNK):
        lm.target.prefill(state, prompt[at : min(at + PREFILL_CHUNK, len(prompt) - 1)])
    return state


class _ControlRun:
    """Collects the single-row logits of a block, then runs the block in one pass and compares."""

    def __init__(self, lm: LanguageModel, state: State, rows: int) -> None:
        self._target, self._state, self._rows = lm.target, state, rows
        self._tokens: list[int] = []
        self._singly: list[np.ndarray] = []
        self._compared = self._equal = self._disagreements = 0
        self._largest = 0.0

    def take(self, token: int, logits: np.ndarray) -> None:
        """A token that was fed, and the logits ``[V]`` float32 that it gave as the only row."""
        self._tokens.append(token)
        self._singly.append(logits.copy())
        if len(self._tokens) == self._rows:
            self._run()

    def _run(self) -> None:
        together = self._target.decode(self._state, self._tokens).need_logits().rows()
        for one, many in zip(self._singly, together, strict=True):
            difference = float(np.abs(one - many).max())
            self._compared += 1
            self._equal += bool((one == many).all())
            self._disagreements += int(np.argmax(one)) != int(np.argmax(many))
            self._largest = max(self._largest, difference)
        self._target.commit(self._state, len(self._tokens))
        self._tokens, self._singly = [], []

    def report(self) -> Control:
        """What was found; the last block may have fewer rows."""
        if self._tokens:
            self._run()
        return Control(
            rows=self._rows,
            compared=self._compared,
            equal_rows=self._equal,
            argmax_disagreements=self._disagreements,
            largest_difference=self._largest,
        )


# --- a run from a file -----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RecordedRun:
    """What ``generate --json`` wrote about a run, as far as an audit needs it."""

    prompt: list[int]
    tokens: list[int]
    generation: GenerationConfig | None  # the settings in force; None where the file has none
    fingerprint: str  # of the model that made it
    deviation: dict[str, Any]  # the run's own count


def read_run(path: str | Path) -> RecordedRun:
    """Read ``generate --json`` output. Raises: PromptError or ConfigError that says what is wrong with the file."""
    made = "specdec generate --json > FILE"
    try:
        told = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise PromptError(f"the run file cannot be read: {error.strerror or error}", file=path) from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the run file is no JSON: {error}", file=path, try_=made) from error
    if isinstance(told, Mapping) and "error" in told:
        raise PromptError("the run file holds an error, no run", file=path)
    for name in ("prompt", "tokens"):
        ids = told.get(name) if isinstance(told, Mapping) else None
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise PromptError(f"the run file has no list of token ids under {name!r}", file=path, try_=made)
    generation, deviation = told.get("generation"), told.get("deviation")
    return RecordedRun(
        prompt=told["prompt"],
        tokens=told["tokens"],
        generation=structure_options(generation, GenerationConfig, "generation", str(path)) if generation else None,
        fingerprint=str(told.get("fingerprint", "")),
        deviation=dict(deviation) if isinstance(deviation, Mapping) else {},
    )


# --- a picture -------------------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raises: UnsupportedError when there is no matplotlib to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"a plot needs matplotlib: {error}", try_="pip install 'specdec-framework[plot]', or leave out the plot"
        ) from error


def plot(report: AuditReport, path: str | Path) -> None:
    """Draw the gap histogram and the divergences by position into a PNG file.

    Raises: UnsupportedError without matplotlib, PromptError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    bins = report.histogram()
    labels = [bin_label(low, high) for low, high, _, _ in bins]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(
        f"{len(report.divergences)} of {report.tokens} tokens diverge from plain decoding"
        f"  (guarantee {report.guarantee}, parity {report.parity})"
    )
    places = np.arange(len(bins))
    left.bar(places, [count for _, _, count, _ in bins], width=0.8, color="#c8ccd4", label="all positions")
    left.bar(places, [count for _, _, _, count in bins], width=0.5, color="#b3261e", label="divergences")
    left.set_yscale("symlog", linthresh=1)
    left.set_ylim(bottom=0)
    left.set_xticks(places, labels, rotation=45, ha="right")
    left.set(xlabel="gap of the two best logits (nats)", ylabel="token positions", title="How near the choices were")
    left.legend(frameon=False)
    found = [(d.position, d.gap) for d in report.divergences if math.isfinite(d.gap)]
    right.set(xlabel="position after the prompt", ylabel="nats below the best logit", title="The tokens that diverge")
    right.set_xlim(-0.02 * report.tokens, 1.02 * report.tokens)
    if found:
        right.vlines([at for at, _ in found], 0, [gap for _, gap in found], color="#b3261e", linewidth=1)
        right.plot([at for at, _ in found], [gap for _, gap in found], "o", color="#b3261e", markersize=3)
        right.set_ylim(bottom=0)
    else:
        right.text(0.5, 0.5, "none", transform=right.transAxes, ha="center", va="center", color="#5f6368", fontsize=14)
        right.set_yticks([])
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise PromptError(f"the plot cannot be written: {error.strerror or error}", file=path) from error


def bin_label(low: float, high: float) -> str:
    """A bin of the histogram for people: ``0.1 to 0.3``."""
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
