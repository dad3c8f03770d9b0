"""What ``config.json`` says about quantisation where the shapes of the tensors leave something open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from specdec.checkpoints.names import canonical_name, text_config

_KEYS = ("quantization_config", "quantization")
_MLX_KEYS = ("group_size", "bits", "mode")


@attrs.frozen(kw_only=True)
class Hints:
    """Sizes that the config names anywhere. Which module has which of them, and whether it is quantised at all, is
    never read from the config: its lists of excluded modules are often wrong. MLX's sizes are the exception: its
    tensors leave them open, and its own loader takes them by module from there.

    Attributes:
        method: ``quant_method`` (or the like) and the key that it stands under, for people; None without one.
        blocks: block sizes ``(rows, columns)`` of FP8 weights.
        groups: columns that share a scale, of integer weights.
        bits: bits of an integer weight.
        channels: some integer weights have one scale per row, or one alone.
        mlx: what MLX's section says of all modules, None without such a section.
        mlx_modules: what it says of single ones, by canonical name.
    """

    method: str | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    groups: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    channels: bool = False
    mlx: Mapping[str, Any] | None = None
    mlx_modules: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Hints:
        """Read a ``config.json``. Values of other types than expected are passed over: they are hints."""
        given = text_config(config)
        blocks: dict[tuple[int, int], None] = {}
        groups: dict[int, None] = {}
        bits: dict[int, None] = {}
        channels = False
        for found in (block for key in _KEYS for block in _blocks(given.get(key))):
            blocks[found] = None
        for scheme in (scheme for key in _KEYS for scheme in _schemes(given.get(key))):
            if scheme.get("type", "int") != "int":
                continue
            number, group = scheme.get("num_bits"), scheme.get("group_size")
            if type(number) is int:
                bits[number] = None
            if type(group) is int and group > 0:
                groups[group] = None
            else:
                channels = True
        mlx = next((given[key] for key in reversed(_KEYS) if _is_mlx(given.get(key))), None)
        return cls(
            method=quantisation(config),
            blocks=tuple(blocks),
            groups=tuple(groups),
            bits=tuple(bits),
            channels=channels,
            mlx=mlx,
            mlx_modules={canonical_name(path): value for path, value in (mlx or {}).items() if path not in _MLX_KEYS},
        )


def quantisation(config: Mapping[str, Any]) -> str | None:
    """What config.json says about quantisation, in a few words: ``fp8 (config.json, quantization_config.…)``."""
    given = text_config(config)
    for key in _KEYS:
        section = given.get(key)
        if isinstance(section, Mapping):
            for method in ("quant_method", "quant_algo", "format", "mode", "bits"):
                if method in section:
                    return f"{section[method]} (config.json, {key}.{method})"
            return f"config.json, {key}"
    return None


def _is_mlx(section: Any) -> bool:
    """Whether a section is MLX's: sizes at its top and no method, which GPTQ and AWQ name beside the same sizes."""
    return isinstance(section, Mapping) and {"group_size", "bits"} <= set(section) and "quant_method" not in section


def _schemes(section: Any) -> Iterator[Mapping[str, Any]]:
    """The ``weights`` tables of compressed-tensors' and ModelOpt's ``config_groups``, wherever they stand."""
    if not isinstance(section, Mapping):
        return
    for key, value in section.items():
        if key == "weights" and isinstance(value, Mapping):
            yield value
        elif isinstance(value, Mapping):
            yield from _schemes(value)


def _blocks(section: Any) -> Iterator[tuple[int, int]]:
    if not isinstance(section, Mapping):
        return
    for key, value in section.items():
        if key in ("weight_block_size", "block_structure"):
            if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
                yield (value[0], value[1])
        elif isinstance(value, Mapping) and key != "input_activations":
            yield from _blocks(value)
