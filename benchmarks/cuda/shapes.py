"""Benchmarked shapes, the bytes that their passes read, and what the cost of a cycle's parts makes of speculation.

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

DEPTHS = (1, 2, 3, 4)  # as far as the profile "mixed" was published
IDENTITY = 0.03  # allowed deviation of a generation from the sum of its parts
PROFILE = PROFILES["mixed"]


@attrs.frozen(kw_only=True)
class Shape:
    """A Qwen3.5 shape: the keys of its config that differ from the 0.8B model's."""

    name: str
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    draft_rows: int = 32768  # of a pruned draft head
    context: int = 2048

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """``config.json`` of a checkpoint of this shape: every fourth layer attends; of fewer than four, the last."""
        config = qwen3_5_config(max_position_embeddings=32768, **self.keys)
        layers = config["num_hidden_layers"]
        every = min(4, layers)
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        return config | {"layer_types": kinds}

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

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

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _values(self, *, mtp: bool) -> int:
        aside = ("embed_tokens.", "lm_head.")
        return sum(
            math.prod(shape)
            for name, shape in self.tensors.items()
            if name.startswith("mtp.") is mtp and not name.startswith(aside)
        )

    def _kv_bytes(self, layers: int) -> int:
        return self.context * layers * 2 * self.config["num_key_value_heads"] * self.config["head_dim"] * 2

    def pass_bytes(self, rows: int) -> int:
        """Bytes that a target pass of ``rows`` rows must move, with its head."""
        kinds = self.config["layer_types"]
        state = self.config["linear_num_value_heads"] * self.config["linear_value_head_dim"] ** 2 * 4
        states = (1 + rows) * kinds.count("linear_attention") * state
        matrices = 2 * (self._values(mtp=False) + self.vocabulary * self.hidden)
        return int(matrices + self._kv_bytes(kinds.count("full_attention")) + states)

    def draft_bytes(self, head_rows: int) -> int:
        """Bytes that one MTP step must move."""
        return 2 * self._values(mtp=True) + 2 * head_rows * self.hidden + self._kv_bytes(1)


_WIDE = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32}
SHAPES = {
    "0.8b": Shape(name="0.8b"),
    "4b": Shape(name="4b", keys={"hidden_size": 2560, "intermediate_size": 9216, **_WIDE}),
    "9b": Shape(
        name="9b", keys={"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False, **_WIDE}
    ),
}
_ONE = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_SIXTEEN = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
TOY = Shape(
    name="toy",
    keys={
        **{"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 96},
        **dict.fromkeys(_ONE, 1),
        **dict.fromkeys(_SIXTEEN, 16),
    },
    draft_rows=48,
    context=3,
)
"""For runs without a device: all layer kinds, minimal sizes."""


# --- speed-ups -------------------------------------------------------------------------------------------------------


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
        return (1.0 + sum(cumulative[:depth])) * self.decode / self.cycle(depth)

    def best(self, cumulative: Sequence[float] = PROFILE) -> tuple[int, float]:
        """The depth with the largest speed-up among the timed ones, and that speed-up."""
        depths = [depth for depth in DEPTHS if depth + 1 in self.verify]
        return max(((depth, self.speedup(depth, cumulative)) for depth in depths), key=lambda pair: pair[1])
