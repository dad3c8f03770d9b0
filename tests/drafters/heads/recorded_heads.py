"""Heads and what speculators' own classes compute with them, and a target that gives the recorded states.

``tools/record_heads.py`` wrote both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors.torch import load_file

from specdec.backends.arrays import ArrayHidden
from specdec.contract import (
    Context,
    DrafterEnv,
    DraftNoise,
    ForwardOutput,
    PrepareEnv,
    Sampling,
    SharedWeights,
    Verdict,
)
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.testing import TableModel

RECORDED = Path(__file__).parent / "recorded"
NAMES = tuple(sorted(folder.name for folder in RECORDED.iterdir()))
ENDS = (6, 9, 10, 13)
LAYERS = 8


class Rows(ArrayHidden):
    """Hidden states on the host."""

    concatenate = staticmethod(np.concatenate)

    def rows(self) -> Any:
        return self.array


class RecordedTarget(TableModel):
    """Gives the recorded states of position i for whatever token comes there; its logits say nothing.

    Where the head asks for another boundary it gets states of another position, and the last of the recorded ones is
    the state after the final norm.
    """

    def __init__(
        self, expected: dict[str, torch.Tensor], boundaries: Sequence[int], *, vocab: int, hidden: int, ops: Any = None
    ) -> None:
        super().__init__(np.full((vocab, vocab), 1 / vocab), layers=LAYERS, max_positions=64)
        self.info = attrs.evolve(self.info, hidden_size=hidden)
        parts = expected["states"].numpy().reshape(len(expected["states"]), -1, hidden)
        self._states = dict(zip(boundaries, parts.transpose(1, 0, 2), strict=True))
        self._shared, self._ops = expected, ops

    def rows(self, at: int, count: int) -> ForwardOutput:
        """The states of ``count`` positions."""
        other = np.roll(self._states[min(self._states)], 1, axis=0)
        states = {k: self._states.get(k, other) for k in range(LAYERS + 1)}
        final = self._states[max(self._states)]
        return ForwardOutput(
            rows=count,
            hidden=Rows(final[at : at + count]),
            boundaries={k: Rows(rows[at : at + count]) for k, rows in states.items()},
        )

    def shared_weights(self) -> SharedWeights:
        embed = self._shared["target.embed_tokens"]
        head = self._shared.get("target.lm_head", embed)
        if self._ops is None:
            return SharedWeights(embed_tokens=embed, lm_head=head)
        return SharedWeights(ops=self._ops, embed_tokens=self._ops.weight(embed), lm_head=self._ops.weight(head))


@attrs.define
class Recorded:
    """A recorded head behind the drafter's interface."""

    expected: dict[str, torch.Tensor]
    target: RecordedTarget
    head: Any
    drafter: Any
    at: int = 0

    @classmethod
    def load(cls, name: str, *, folder: Path | None = None, states: Sequence[int] = (), **options: Any) -> Recorded:
        """Load the head of that name; ``states`` are boundaries if they are not those of the config."""
        boundaries = states or ((2, 5) if name == "eagle3-two-states" else (1, 2, 4))
        expected = load_file(RECORDED / name / "expected.safetensors")
        return cls.of(folder or RECORDED / name, expected, boundaries, **options)

    @classmethod
    def of(
        cls,
        folder: Path,
        expected: dict[str, torch.Tensor],
        boundaries: Sequence[int],
        *,
        ops: Any = None,
        **options: Any,
    ) -> Recorded:
        """Load the head in ``folder`` for a target that gives the states of ``expected`` at these boundaries.

        ``ops`` are those of the target's backend; without them the target computes elsewhere.
        """
        spec = next(spec for spec in specdec_drafters() if spec.name == "head")
        config = spec.config(model=str(folder), **options)
        vocab, hidden = expected["target.embed_tokens"].shape
        target = RecordedTarget(expected, boundaries, vocab=vocab, hidden=hidden, ops=ops)
        assert spec.prepare is not None
        head = spec.prepare(config, PrepareEnv(target=target))
        state = target.new_state(64, head.around.needs)
        drafter = spec.factory(config, DrafterEnv(target=target, state=state, shared=head))
        return cls(expected, target, head, drafter)

    def context(self, held: int, noise: DraftNoise = DraftNoise.COUPLED, **sampling: Any) -> Context:
        """The first ``held`` tokens and the pending one."""
        return Context(self.expected["tokens"][: held + 1].tolist(), Sampling(**sampling), draft_noise=noise)

    def prefill(self, upto: int, chunk: int = 64) -> None:
        """Let the drafter see a prompt."""
        while self.at < upto:
            count = min(chunk, upto - self.at)
            seen = Context(self.expected["tokens"][: self.at + count].tolist())
            self.drafter.prefill(seen, self.target.rows(self.at, count))
            self.at += count

    def cycle(self, rows: int, rejected: int = 2) -> None:
        """Let the drafter see a pass of which ``rows`` rows are committed and ``rejected`` are not."""
        whole = self.target.rows(self.at, min(rows + rejected, len(self.expected["states"]) - self.at))
        self.at += rows
        self.drafter.observe(Verdict(rows - 1, 0), whole, self.context(self.at))
