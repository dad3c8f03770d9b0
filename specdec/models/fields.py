"""Read ``config.json`` with types; every missing or wrong value is an error that names its key."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from specdec.backends.ops import Rope
from specdec.errors import CheckpointError, shown

_MISSING: Any = object()
# What no weight confirms is bounded here: a config is read before any memory is reserved for what it says.
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 2**16
MOST_EXPERTS = 2**14
LARGEST_HEAD = 2**16  # values; a head's rotary frequencies are computed from the config alone
MOST_POSITIONS = 2**24  # up to here float32, in which rotary angles are computed, has every whole number
LARGEST_EPS = 0.1  # of a norm
_REALS = (1e-30, 1e30)  # their powers and quotients are still finite


def wrong(key: str, takes: str, got: object) -> CheckpointError:
    """The error for a key with a value of another kind than it ``takes``."""
    return CheckpointError(f"config.json: {key!r} takes {takes}, got {shown(got)}")


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

    def whole(self, key: str, default: int | None = _MISSING, *, low: int = 1, high: int = LARGEST_SIZE) -> int:
        """An integer from ``low`` to ``high``."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise wrong(key, f"a whole number from {low} to {high}", value)
        return value

    def either(self, *keys: str) -> str:
        """The first of these names of one key that has a value, or else the first."""
        return next((key for key in keys if self._config.get(key) is not None), keys[0])

    def real(self, key: str, default: float = _MISSING, *, high: float = _REALS[1]) -> float:
        """A positive number, from 1e-30 to ``high``."""
        value, low = self._value(key, default), _REALS[0]
        if type(value) not in (int, float) or not low <= value <= high:
            raise wrong(key, f"a positive number from {low} to {high}", value)
        return float(value)

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise wrong(key, "true or false", value)
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse unimplemented variants of the family."""
        value = self._config.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"config.json: {key!r} = {shown(value)} is not supported; this family has {allowed[0]!r}"
            )

    def rope_theta(self, default: float) -> float:
        """``rope_theta`` at the top, or inside ``rope_parameters`` / ``rope_scaling`` in newer files."""
        theta = self._rope_real("rope_theta", default)
        if theta <= 1:
            raise wrong("rope_theta", "a number above 1", theta)
        return theta

    def partial_rotary_factor(self, default: float) -> float:
        """The share of a head that is rotated, in (0, 1]."""
        factor = self._rope_real("partial_rotary_factor", default)
        if factor > 1:
            raise CheckpointError(f"config.json: 'partial_rotary_factor' is at most 1, got {factor}")
        return factor

    def _rope_real(self, key: str, default: float) -> float:
        """A number at the top or among the rotary keys. Raises: CheckpointError if the two places contradict."""
        inner, top = self._rope(), self.real(key, default)
        value = inner.real(key, top)
        if self._config.get(key) is not None and value != top:
            raise CheckpointError(
                f"config.json: {key!r} is {top} at the top and {value} among the rotary keys",
                try_="the config.json that the weights came with",
            )
        return value

    def plain_rope(self) -> None:
        """Refuse scaled rotary embeddings (YaRN, ...) for a family that supports only the plain one."""
        if self.rope_kind() not in ("default", "mrope"):
            raise CheckpointError(
                f"config.json: rope type {shown(self.rope_kind())} is not supported; this family has 'default'"
            )

    def rope(self, head_dim: int, theta: float, *, share: float | None = None) -> tuple[Rope, float]:
        """The rotary embedding (plain, linear, proportional, LongRoPE's short one, YaRN or Llama 3's), and the factor
        on its cosines and sines.

        Args:
            head_dim: of the values that can be rotated.
            theta: the family's default base.
            share: the family's default ``partial_rotary_factor``; None if it always rotates all of them.

        The factor is YaRN's attention factor: ``0.1 ln(factor) + 1``, or the quotient of two such terms with ``mscale``
        and ``mscale_all_dim``. Text has one position on all axes of a "mrope". Raises: CheckpointError naming any other
        kind, or a factor other than 1 where only a part of a head is rotated.
        """
        rope, factor = self._any_rope(head_dim, theta, share)
        if factor != 1.0 and 2 * len(rope.inv_freq) < head_dim:
            raise CheckpointError(
                f"config.json: an 'attention_factor' of {factor:.4f} is not supported where a part of a head is rotated"
            )
        return rope, factor

    def _any_rope(self, head_dim: int, theta: float, share: float | None) -> tuple[Rope, float]:
        factor = self.partial_rotary_factor(1.0 if share is None else share)
        if share is None and factor != 1:
            raise CheckpointError(
                f"config.json: 'partial_rotary_factor' = {factor} is not supported; this family has 1.0"
            )
        rotary_dims = int(head_dim * factor)
        if rotary_dims not in range(2, LARGEST_HEAD + 1, 2):
            raise CheckpointError(
                f"config.json: a head rotates an even number of values, at most {LARGEST_HEAD}, and not {rotary_dims}"
            )
        inner, theta = self._rope(), self.rope_theta(theta)
        kind = self.rope_kind()
        if kind in ("default", "mrope"):
            return Rope.of(theta, rotary_dims), 1.0
        if kind == "longrope":
            return self._short_rope(theta, rotary_dims)
        if kind == "proportional":  # pairs are those of the whole head, and the last of them do not turn
            plain, factor = Rope.of(theta, head_dim).inv_freq, inner.real("factor", 1.0)
            turning = rotary_dims // 2
            return Rope(tuple(one / factor * (j < turning) for j, one in enumerate(plain))), 1.0
        if kind not in ("linear", "yarn", "llama3"):
            raise CheckpointError(
                f"config.json: rope type {shown(kind)} is not supported; read are 'default', 'linear', "
                "'proportional', 'longrope', 'yarn' and 'llama3'"
            )
        if kind == "linear":
            factor = inner.real("factor")
            return Rope(tuple(plain / factor for plain in Rope.of(theta, rotary_dims).inv_freq)), 1.0
        factor, original = inner.real("factor"), inner.whole("original_max_position_embeddings")
        if kind == "llama3":
            low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
            if not low < high:
                raise wrong("low_freq_factor", f"less than 'high_freq_factor' ({high})", low)
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

    def _short_rope(self, theta: float, rotary_dims: int) -> tuple[Rope, float]:
        """LongRoPE up to the context of pre-training, to which ``max_positions`` limits the model.

        Source: Ding et al. 2024, arXiv:2402.13753, as Phi-3 was trained: one divisor per frequency.
        """
        inner, original = self._rope(), self._original_positions()
        divisors = inner._config.get("short_factor")
        if not isinstance(divisors, list) or len(divisors) != rotary_dims // 2:
            raise wrong("short_factor", f"{rotary_dims // 2} numbers", divisors)
        plain = Rope.of(theta, rotary_dims).inv_freq
        divided = (
            one / Fields({"short_factor": by}).real("short_factor") for one, by in zip(plain, divisors, strict=True)
        )
        stretch = self.whole("max_position_embeddings") / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        return Rope(tuple(divided)), inner.real("attention_factor", factor)

    def _original_positions(self) -> int:
        """``original_max_position_embeddings``, among the rotary keys or at the top."""
        key, inner = "original_max_position_embeddings", self._rope()
        return (self if inner._config.get(key) is None else inner).whole(key, low=2, high=MOST_POSITIONS)

    def rope_kind(self) -> str:
        """The rotary embedding's kind: "default", "yarn", ..."""
        return str(self._rope()._config.get("rope_type", "default"))

    def max_positions(self, default: int) -> int:
        """``max_position_embeddings``, or YaRN's stretched length if larger, or LongRoPE's original one."""
        positions, inner = self.whole("max_position_embeddings", default, high=MOST_POSITIONS), self._rope()
        if self.rope_kind() == "longrope":
            return min(positions, self._original_positions())
        if self.rope_kind() == "yarn":
            original = inner.whole("original_max_position_embeddings", high=MOST_POSITIONS)
            positions = max(positions, min(int(original * inner.real("factor")), MOST_POSITIONS))
        return positions

    def query_growth(self) -> tuple[float, int]:
        """Ministral 3's ``llama_4_scaling_beta``, and the length of pre-training, beyond which it counts."""
        inner = self._rope()
        return inner.real("llama_4_scaling_beta"), inner.whole("original_max_position_embeddings")

    def yarn_all_dim(self) -> float:
        """DeepSeek's factor on attention scores: ``mscale ** 2`` of ``mscale_all_dim``; 1 without YaRN or the key.

        It is squared because the authors scale both queries and keys.
        """
        inner = self._rope()
        if self.rope_kind() == "default" or not inner._config.get("mscale_all_dim"):
            return 1.0
        return yarn_mscale(inner.real("factor"), inner.real("mscale_all_dim")) ** 2

    def _rope(self) -> Fields:
        """The rotary keys, from ``rope_parameters`` or ``rope_scaling``. Raises: CheckpointError if they contradict."""
        found = [inner for key in ("rope_parameters", "rope_scaling") if (inner := self._rope_keys(key))]
        if len(found) == 2:
            new, old = found
            for key in sorted((new.keys() | old.keys()) - {"type"}):
                absent = key in ("rope_theta", "partial_rotary_factor") and None in (new.get(key), old.get(key))
                if not absent and new.get(key) != old.get(key):
                    raise CheckpointError(
                        f"config.json: {key!r} is {shown(new.get(key))} in 'rope_parameters' and "
                        f"{shown(old.get(key))} in 'rope_scaling'",
                        try_="the config.json that the weights came with",
                    )
            return Fields({**old, **new})
        return Fields(found[0] if found else {})

    def _rope_keys(self, name: str) -> dict[str, Any]:
        """The keys under ``rope_parameters`` or ``rope_scaling`` that are not null, and the kind as ``rope_type``."""
        given = self._config.get(name)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise wrong(name, "an object", given)
        keys = {key: value for key, value in given.items() if value is not None}
        nested = next((key for key, value in keys.items() if isinstance(value, Mapping)), None)
        if nested is not None:
            raise CheckpointError(
                f"config.json: {name!r} has rotary keys of its own for {shown(nested)}; this family has one rotary "
                "embedding for all layers"
            )
        if "factor" in keys and not keys.keys() & {"rope_type", "type"}:
            raise CheckpointError(f"config.json: {name!r} has a 'factor' and lacks 'rope_type'")
        if "rope_type" in keys and keys.get("type") not in (None, keys["rope_type"], "mrope"):
            raise CheckpointError(
                f"config.json: {name!r} has the 'rope_type' {shown(keys['rope_type'])} and the 'type' "
                f"{shown(keys['type'])}"
            )
        return {"rope_type": keys.get("type", "default"), **keys} if keys else {}

    def mtp_layers(self, key: str, default: int = 0, *, most: int = 1) -> int:
        """The number of MTP modules. Raises: CheckpointError for more than the family defines how to chain."""
        layers = self.whole(key, default, low=0)
        if layers > most:
            raise CheckpointError(
                f"config.json: {key!r} is {layers}, and this family has at most {most}",
                try_=f"a copy with {key!r} = 0, which loads the model without its head, and another drafter",
            )
        return layers

    def of_layers(self, kind: str) -> Fields | None:
        """The same with the rotary keys of one kind of layers; None if ``rope_parameters`` does not tell them apart."""
        given = self._config.get("rope_parameters")
        inner = given.get(kind) if isinstance(given, Mapping) else None
        if not isinstance(inner, Mapping):
            return None
        return Fields(ChainMap({"rope_parameters": inner, "rope_theta": None}, self._config))  # type: ignore[arg-type]

    def layer_types(self, layers: int, interval: int, other: str = "linear_attention") -> tuple[str, ...]:
        """``layer_types``, or full attention in every ``interval``-th layer and ``other`` between if it is absent."""
        types = self._config.get("layer_types")
        if types is None:
            return tuple("full_attention" if (i + 1) % interval == 0 else other for i in range(layers))
        known = ("full_attention", other)
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise wrong("layer_types", f"{layers} entries out of {', '.join(known)}", types)
        return tuple(types)

    def sliding_layers(self, layers: int, interval: int) -> tuple[int, ...]:
        """The layers with a window, by ``layer_types``; likewise."""
        types = self.layer_types(layers, interval, "sliding_attention")
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1``. Source: Peng et al. 2023, arXiv:2309.00071, equation 22 (its square root)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
