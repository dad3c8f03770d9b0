"""Typed reading of ``config.json``: every missing or wrong value is one sentence that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import CheckpointError

_MISSING: Any = object()


class Fields:
    """The text part of a ``config.json``, read with types."""

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
        """Refuse a variant of the family that is not implemented, rather than compute something else."""
        value = self._config.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"config.json: {key!r} = {value!r} is not supported; this family has {allowed[0]!r}")

    def rope_theta(self, default: float) -> float:
        """``rope_theta`` at the top, or inside ``rope_parameters`` / ``rope_scaling`` as newer files have it."""
        return self._rope().real("rope_theta", self.real("rope_theta", default))

    def partial_rotary_factor(self, default: float) -> float:
        """The share of a head that is rotated, in (0, 1]."""
        factor = self._rope().real("partial_rotary_factor", self.real("partial_rotary_factor", default))
        if factor > 1:
            raise CheckpointError(f"config.json: 'partial_rotary_factor' is at most 1, got {factor}")
        return factor

    def plain_rope(self) -> None:
        """Refuse scaled rotary embeddings (YaRN, ...): the families read so far use the plain one."""
        kind = self._rope()._config.get("rope_type", self._rope()._config.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; this family has 'default'")

    def _rope(self) -> Fields:
        for key in ("rope_parameters", "rope_scaling"):
            inner = self._config.get(key)
            if isinstance(inner, Mapping):
                return Fields(inner)
        return Fields({})

    def layer_types(self, layers: int, interval: int) -> tuple[str, ...]:
        """``layer_types``, or full attention in every ``interval``-th layer where the key is absent."""
        types = self._config.get("layer_types")
        if types is None:
            return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
        known = ("full_attention", "linear_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise CheckpointError(
                f"config.json: 'layer_types' takes {layers} entries out of {', '.join(known)}, got {types!r}"
            )
        return tuple(types)
