"""Read quantisation sizes from ``config.json`` that tensor shapes leave open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from specdec.checkpoints.names import canonical_name, text_config

QUANTISATION_KEYS = ("quantization_config", "quantization")
_BLOCKS = ("weight_block_size", "block_structure")
_MLX_KEYS = ("group_size", "bits", "mode")


@attrs.frozen(kw_only=True)
class Hints:
    """Sizes found anywhere in the config.

    Whether a module is quantised, and how, is not read from the config, whose lists of excluded modules are often
    wrong. MLX is the exception: its tensors leave the sizes open, and its own loader takes them per module from there.

    Attributes:
        method: ``quant_method`` (or similar) and its key, for messages; None if absent.
        blocks: block sizes ``(rows, columns)`` of FP8 weights.
        groups: columns per scale of integer weights.
        bits: bits of an integer weight.
        channels: some integer weights have one scale per row, or a single scale.
        asymmetric: all integer weights have zero points.
        mlx: MLX's sizes for all modules; None without an MLX section.
        mlx_modules: MLX's sizes for single modules, by canonical name.
    """

    method: str | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    groups: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    channels: bool = False
    asymmetric: bool = False
    mlx: Mapping[str, Any] | None = None
    mlx_modules: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Hints:
        """Read a ``config.json``. Values of unexpected types are ignored: these are hints."""
        given = text_config(config)
        entries = [entry for key in QUANTISATION_KEYS for entry in _entries(given.get(key))]
        schemes = [value for key, value in entries if key == "weights" and isinstance(value, Mapping)]
        schemes = [scheme for scheme in schemes if scheme.get("type", "int") == "int"]
        sizes = [scheme.get("group_size") for scheme in schemes]
        groups = [size for size in sizes if type(size) is int and size > 0]
        bits = [scheme["num_bits"] for scheme in schemes if type(scheme.get("num_bits")) is int]
        mlx = next((given[key] for key in reversed(QUANTISATION_KEYS) if _is_mlx(given.get(key))), None)
        return cls(
            method=quantisation(config),
            blocks=tuple(dict.fromkeys(tuple(value) for key, value in entries if key in _BLOCKS and _is_block(value))),
            groups=tuple(dict.fromkeys(groups)),
            bits=tuple(dict.fromkeys(bits)),
            channels=len(groups) < len(schemes),
            asymmetric=bool(schemes) and all(scheme.get("symmetric") is False for scheme in schemes),
            mlx=mlx,
            mlx_modules={canonical_name(path): value for path, value in (mlx or {}).items() if path not in _MLX_KEYS},
        )


def _section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The section about quantisation and its key; "" without one."""
    given = text_config(config)
    return next(((key, given[key]) for key in QUANTISATION_KEYS if isinstance(given.get(key), Mapping)), ("", {}))


def quantisation(config: Mapping[str, Any]) -> str | None:
    """What config.json says about quantisation, in a few words: ``fp8 (config.json, quantization_config.…)``."""
    key, section = _section(config)
    method = next((one for one in ("quant_method", "quant_algo", "format", "mode", "bits") if one in section), None)
    if method is not None:
        return f"{section[method]} (config.json, {key}.{method})"
    return f"config.json, {key}" if key else None


def declared_packed(config: Mapping[str, Any]) -> str | None:
    """``quantisation`` if config.json says that weights are quantised, and not only the KV cache or activations."""
    _, section = _section(config)
    named = section.get("quant_algo", section.get("quant_method", section.get("bits")))
    only_cache = section.get("quant_method") == "compressed-tensors" and not section.get("config_groups")
    return quantisation(config) if named is not None and not only_cache else None


def _is_mlx(section: Any) -> bool:
    """Whether a section is MLX's: sizes at its top and no method (GPTQ and AWQ have the same sizes and a method)."""
    return isinstance(section, Mapping) and {"group_size", "bits"} <= set(section) and "quant_method" not in section


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def _entries(section: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at every depth, except those about activations."""
    if isinstance(section, Mapping):
        for key, value in section.items():
            if key != "input_activations":
                yield key, value
                yield from _entries(value)
