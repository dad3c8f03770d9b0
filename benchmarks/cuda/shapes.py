"""Benchmarked shapes, the bytes that their passes read, and targets for them.

A pass of T rows reads every matrix once, the context's keys and values once, and the recurrent states once; it writes
the states T times (one state is kept per row, so that rollback is free).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.common import qwen3_5_config
from specdec.measuring.synthetic import PROFILES

CONTEXT = 2048
DRAFT_ROWS = 32768  # rows of a pruned draft head
DEPTHS = (1, 2, 3, 4)  # as far as the profile "mixed" was published


@attrs.frozen(kw_only=True)
class Targets:
    """Targets of a shape: minimum fractions and speed-ups, maximum ratios. None: no target."""

    decode_of_bound: float | None = None
    verify_4: float | None = None
    draft: float | None = None
    speedup: float | None = None


@attrs.frozen(kw_only=True)
class Shape:
    """A Qwen3.5 shape."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    value_heads: int
    tied: bool
    key_heads: int = 16
    linear_dim: int = 128
    head_dim: int = 256
    vocabulary: int = 248320
    draft_rows: int = DRAFT_ROWS
    context: int = CONTEXT
    targets: Targets = Targets()

    @property
    def config(self) -> dict[str, Any]:
        """``config.json`` of a checkpoint of this shape."""
        config = qwen3_5_config(
            hidden=self.hidden,
            layers=self.layers,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            linear_dim=self.linear_dim,
            vocab=self.vocabulary,
            tied=self.tied,
            max_positions=32768,
        )
        return config | {"layer_types": self._layer_types()}

    def _layer_types(self) -> list[str]:
        """Every fourth layer attends; with fewer than four, the last one does."""
        every = min(4, self.layers)
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(self.layers)]

    @functools.cached_property
    def family(self) -> Any:
        """The family's own config."""
        from specdec.models.qwen3_5 import parse_dense

        return parse_dense(self.config)

    @functools.cached_property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by canonical name."""
        from specdec.models.weights import dry_run
        from specdec.registry import registry

        return {name: spec.shape for name, spec in dry_run(registry().model("qwen3_5"), self.family).tensors.items()}

    @property
    def attention_layers(self) -> int:
        return int(self.family.layer_types.count("full_attention"))

    @property
    def delta_layers(self) -> int:
        return self.layers - self.attention_layers

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _values(self, *, mtp: bool) -> int:
        aside = ("embed_tokens.", "lm_head.")
        return sum(
            math.prod(shape)
            for name, shape in self.tensors.items()
            if name.startswith("mtp.") is mtp and not name.startswith(aside)
        )

    @property
    def head_bytes(self) -> int:
        return 2 * self.vocabulary * self.hidden

    def kv_bytes(self, context: int, layers: int) -> int:
        return context * layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states, once."""
        return self.delta_layers * self.value_heads * self.linear_dim**2 * 4

    def pass_bytes(self, rows: int, context: int | None = None) -> int:
        """Bytes that a target pass of ``rows`` rows must move, with its head."""
        at = self.context if context is None else context
        matrices = 2 * self._values(mtp=False) + self.head_bytes
        return matrices + self.kv_bytes(at, self.attention_layers) + (1 + rows) * self.state_bytes

    def draft_bytes(self, head_rows: int, context: int | None = None) -> int:
        """Bytes that one MTP step must move."""
        at = self.context if context is None else context
        return 2 * self._values(mtp=True) + 2 * head_rows * self.hidden + self.kv_bytes(at, 1)


SHAPES = {
    "0.8b": Shape(
        name="0.8b",
        hidden=1024,
        layers=24,
        intermediate=3584,
        heads=8,
        kv_heads=2,
        value_heads=16,
        tied=True,
        targets=Targets(decode_of_bound=0.55, verify_4=1.12, draft=0.12, speedup=1.4),
    ),
    "4b": Shape(
        name="4b",
        hidden=2560,
        layers=32,
        intermediate=9216,
        heads=16,
        kv_heads=4,
        value_heads=32,
        tied=True,
        targets=Targets(decode_of_bound=0.80, verify_4=1.08, draft=0.07, speedup=2.0),
    ),
    "9b": Shape(
        name="9b",
        hidden=4096,
        layers=32,
        intermediate=12288,
        heads=16,
        kv_heads=4,
        value_heads=32,
        tied=False,
        targets=Targets(decode_of_bound=0.85, verify_4=1.06, draft=0.065, speedup=2.1),
    ),
}
TOY = Shape(
    name="toy",
    hidden=32,
    layers=2,
    intermediate=48,
    heads=1,
    kv_heads=1,
    value_heads=1,
    key_heads=1,
    linear_dim=16,
    head_dim=16,
    vocabulary=96,
    tied=True,
    draft_rows=48,
    context=3,
)
"""For runs without a device: all layer kinds, minimal sizes."""

AGAINST_TRANSFORMERS = {"speculative": 5.0, "plain": 2.0}
IDENTITY = 0.03  # allowed deviation of a generation from the sum of its parts
PROFILE = PROFILES["mixed"]


# --- speed-ups -------------------------------------------------------------------------------------------------------


def conditional(cumulative: Sequence[float], depth: int) -> list[float]:
    """Conditional acceptances of the first ``depth`` positions."""
    before = (1.0, *cumulative)
    return [rate / last for last, rate in zip(before, cumulative, strict=False)][:depth]


@attrs.frozen(kw_only=True)
class Costs:
    """Seconds of the parts of a cycle."""

    decode: float
    verify: Mapping[int, float]  # by rows
    draft: float  # one step
    bookkeeping: float

    def cycle(self, depth: int) -> float:
        return self.verify[depth + 1] + depth * self.draft + self.bookkeeping

    def speedup(self, depth: int, cumulative: Sequence[float] = PROFILE) -> float:
        """Tokens per second at ``depth``, relative to plain decoding."""
        from specdec.measuring.speed_model import expected_tokens

        return expected_tokens(conditional(cumulative, depth)) * self.decode / self.cycle(depth)

    def best(self, cumulative: Sequence[float] = PROFILE) -> tuple[int, float]:
        """The depth with the largest speed-up among the timed ones, and that speed-up."""
        depths = [depth for depth in DEPTHS if depth + 1 in self.verify]
        return max(((depth, self.speedup(depth, cumulative)) for depth in depths), key=lambda pair: pair[1])
