"""Read ``config.json`` with types; every missing or wrong value is an error that names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specdec.backends.ops import Rope
from specdec.errors import CheckpointError

_MISSING: Any = object()


class Fields:
    """The text part of a ``config.json``, with typed access."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"config.json lacks {key!r}", model_type=self._config.get("model_type"))
            return default
        return value

    def whole(self, key: str, default: int | None = _MISSING, *, low: int = 1) -> int:
        """An integer of at least ``low``."""
        value = self._value(key, default)
        if type(value) is not int or value < low:
            raise CheckpointError(f"config.json: {key!r} takes a whole number of at least {low}, got {value!r}")
        return value

    def real(self, key: str, default: float = _MISSING) -> float:
        """A positive number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not value > 0:
            raise CheckpointError(f"config.json: {key!r} takes a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"config.json: {key!r} takes true or false, got {value!r}")
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse unimplemented variants of the family."""
        value = self._config.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"config.json: {key!r} = {value!r} is not supported; this family has {allowed[0]!r}")

    def rope_theta(self, default: float) -> float:
        """``rope_theta`` at the top, or inside ``rope_parameters`` / ``rope_scaling`` in newer files."""
        return self._rope().real("rope_theta", self.real("rope_theta", default))

    def partial_rotary_factor(self, default: float) -> float:
        """The share of a head that is rotated, in (0, 1]."""
        factor = self._rope().real("partial_rotary_factor", self.real("partial_rotary_factor", default))
        if factor > 1:
            raise CheckpointError(f"config.json: 'partial_rotary_factor' is at most 1, got {factor}")
        return factor

    def plain_rope(self) -> None:
        """Refuse scaled rotary embeddings (YaRN, ...) for a family that supports only the plain one."""
        if self.rope_kind() not in ("default", "mrope"):
            raise CheckpointError(
                f"config.json: rope type {self.rope_kind()!r} is not supported; this family has 'default'"
            )

    def rope(self, rotary_dims: int, theta: float) -> tuple[Rope, float]:
        """The rotary embedding (plain, YaRN or Llama 3's) and the factor on its cosines and sines.

        The factor is YaRN's attention factor: ``0.1 ln(factor) + 1``, or the quotient of two such terms with ``mscale``
        and ``mscale_all_dim``. Raises: CheckpointError naming any other kind.
        """
        inner, theta = self._rope(), self.rope_theta(theta)
        kind = self.rope_kind()
        if kind in ("default", "mrope"):
            return Rope.of(theta, rotary_dims), 1.0
        if kind not in ("yarn", "llama3"):
            raise CheckpointError(
                f"config.json: rope type {kind!r} is not supported; read are 'default', 'yarn' and 'llama3'"
            )
        factor, original = inner.real("factor"), inner.whole("original_max_position_embeddings")
        if kind == "llama3":
            low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
            if not low < high:
                raise CheckpointError(
                    f"config.json: 'low_freq_factor' takes less than 'high_freq_factor' ({high}), got {low}"
                )
            return Rope.llama3(theta, rotary_dims, factor=factor, original=original, low=low, high=high), 1.0
        rope = Rope.yarn(
            theta,
            rotary_dims,
            factor=factor,
            original=original,
            beta_fast=inner.real("beta_fast", 32.0),
            beta_slow=inner.real("beta_slow", 1.0),
            truncate=inner.flag("truncate", True),
        )
        mscale, all_dim = (inner._config.get(key) for key in ("mscale", "mscale_all_dim"))
        if mscale and all_dim:
            default = yarn_mscale(factor, inner.real("mscale")) / yarn_mscale(factor, inner.real("mscale_all_dim"))
        else:
            default = yarn_mscale(factor)
        return rope, inner.real("attention_factor", default)

    def rope_kind(self) -> str:
        """The rotary embedding's kind: "default", "yarn", ..."""
        inner = self._rope()._config
        return str(inner.get("rope_type", inner.get("type", "default")))

    def max_positions(self, default: int) -> int:
        """``max_position_embeddings``, or YaRN's stretched length if larger."""
        positions, inner = self.whole("max_position_embeddings", default), self._rope()
        if self.rope_kind() == "yarn":
            stretched = inner.whole("original_max_position_embeddings") * inner.real("factor")
            positions = max(positions, int(stretched))
        return positions

    def yarn_all_dim(self) -> float:
        """DeepSeek's factor on attention scores: ``mscale ** 2`` of ``mscale_all_dim``; 1 without YaRN or the key.

        It is squared because the authors scale both queries and keys.
        """
        inner = self._rope()
        if self.rope_kind() == "default" or not inner._config.get("mscale_all_dim"):
            return 1.0
        return yarn_mscale(inner.real("factor"), inner.real("mscale_all_dim")) ** 2

    def _rope(self) -> Fields:
        for key in ("rope_parameters", "rope_scaling"):
            inner = self._config.get(key)
            if isinstance(inner, Mapping):
                return Fields(inner)
        return Fields({})

    def mtp_layers(self, key: str) -> int:
        """The number of MTP layers, 0 or 1."""
        layers = self.whole(key, 0, low=0)
        if layers > 1:
            raise CheckpointError(f"config.json: {key!r} is 0 or 1 in this family, got {layers}")
        return layers

    def layer_types(self, layers: int, interval: int) -> tuple[str, ...]:
        """``layer_types``, or full attention in every ``interval``-th layer if the key is absent."""
        types = self._config.get("layer_types")
        if types is None:
            return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
        known = ("full_attention", "linear_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise CheckpointError(
                f"config.json: 'layer_types' takes {layers} entries out of {', '.join(known)}, got {types!r}"
            )
        return tuple(types)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1``. Source: Peng et al. 2023, arXiv:2309.00071, equation 22 (its square root)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
