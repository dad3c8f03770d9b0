"""Copies, cuts, saves and restores transformers caches.

Three facts about transformers 5.23 (``cache_utils.py``) determine how a pass is rolled back:

* ``DynamicLayer``, ``DynamicSlidingWindowLayer`` and ``DynamicIndexedLayer`` never write into their tensors: each
  update concatenates into a new one. A copy of such a layer may therefore share its keys and values.
* ``crop`` cuts keys and values, and, if past recording was on during the pass, sliding windows and convolution windows.
  It does not change recurrent states.
* Derived classes may hold more than ``crop`` cuts while ``is_croppable`` still returns True (the compressor buffers of
  DeepSeek-V4). So only exactly the classes above are cut; every other cache is copied before a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from specdec.errors import StateError
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_INDEXED = getattr(cache_utils, "DynamicIndexedLayer", DynamicLayer)
_DUMMY = getattr(cache_utils, "DummyLayer", DynamicLayer)
_LINEAR = getattr(cache_utils, "LinearAttentionLayer", None)
_CUT = (DynamicLayer, DynamicSlidingWindowLayer, _INDEXED, _DUMMY)


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; empty if its class has none."""
    return list(getattr(cache, "layers", []))


def _keeps_all(layer: Any) -> bool:
    """Whether the layer holds the keys of every token, in tensors that are never written to."""
    return getattr(type(layer), "update", None) is DynamicLayer.update


def _shares(layer: Any) -> bool:
    return _keeps_all(layer) or getattr(type(layer), "update", None) is DynamicSlidingWindowLayer.update


_GROWING: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "keys": lambda array, length: array[..., :length, :],
    "values": lambda array, length: array[..., :length, :],
    "indexer_keys": lambda array, length: array[:, :length, :],
    "indexer_position_ids": lambda array, length: array[..., :length],
}
"""A layer's tensors with one entry per token, and how to cut each to the first ``length`` tokens."""


def copied(cache: Cache) -> Cache:
    """An independent copy; shares keys and values that no pass writes to."""
    memo: dict[int, Any] = {}
    for layer in layers_of(cache):
        if _shares(layer):
            for name in _GROWING:
                array = getattr(layer, name, None)
                if isinstance(array, Tensor):
                    memo[id(array)] = array
    return copy.deepcopy(cache, memo)


def can_cut(cache: Any) -> bool:
    """Whether the last rows of a pass can be cut exactly from this cache, once a pass has filled it."""
    return type(cache) is DynamicCache and all(
        type(layer) in _CUT or (_is_window_only(layer) and _record_switch(layer)) for layer in cache.layers
    )


def _is_window_only(layer: Any) -> bool:
    """A linear-attention layer that holds convolution windows and no recurrent state (LFM2)."""
    return _LINEAR is not None and type(layer) is _LINEAR and bool(layer.is_croppable)


def _record_switch(layer: Any) -> bool:
    return hasattr(layer, "record_past")


def record_past(cache: Cache, on: bool) -> None:
    """Make windows keep what slides out of them until ``cut``; needed during a pass whose rows may be cut."""
    for layer in layers_of(cache):
        if _record_switch(layer):
            layer.record_past = on


def cut(cache: Cache, rows: int) -> None:
    """Remove the last ``rows`` (0 or more) rows of the last pass, in place, and shrink windows to their size."""
    cache.crop(-rows)
    for layer in layers_of(cache):
        if _LINEAR is not None and type(layer) is _LINEAR:
            for i, window in layer.conv_states.items():
                short = layer.conv_kernel_size[i] - window.shape[-1]
                if short > 0:  # never padded, because it was recorded from the first token
                    layer.conv_states[i] = torch.nn.functional.pad(window, (short, 0))


def holds_all(cache: Any) -> bool:
    """Whether the cache can be cut to any length: no window has lost a token, and there is no recurrent state."""
    return type(cache) is DynamicCache and all(
        type(layer) in _CUT and not _has_lost(layer) and type(layer) is not _LINEAR for layer in cache.layers
    )


def can_lose(cache: Any) -> bool:
    """Whether the cache has, or will have, parts that cannot be cut to every length: windows and recurrent states."""
    return type(cache) is not DynamicCache or not all(
        type(layer) in _CUT and type(layer) is not DynamicSlidingWindowLayer for layer in cache.layers
    )


def _has_lost(layer: Any) -> bool:
    if type(layer) is not DynamicSlidingWindowLayer or layer.keys is None:
        return False
    return bool(layer.cumulative_length != layer.keys.shape[-2])


def cut_to(cache: Cache, length: int) -> Cache:
    """A copy with the first ``length`` tokens of a cache that ``holds_all``."""
    cache = copied(cache)
    for layer in layers_of(cache):
        _cut_layer(layer, layer, length)
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = length
    return cache


def _cut_layer(layer: Any, source: Any, length: int) -> None:
    for name, first in _GROWING.items():
        array = getattr(source, name, None)
        if isinstance(array, Tensor) and array.numel():
            setattr(layer, name, first(array, length))


def mark(cache: Cache) -> Cache:
    """A copy to return to, without the keys that every later cache also holds."""
    cache = copied(cache)
    for layer in layers_of(cache):
        if _keeps_all(layer):
            for name in _GROWING:
                if isinstance(getattr(layer, name, None), Tensor):
                    setattr(layer, name, None)
    return cache


def back_at(marked: Cache, later: Cache, length: int) -> Cache:
    """The cache given to ``mark``, with ``length`` tokens; ``later`` is a cache that continued from it."""
    cache = copied(marked)
    for layer, source in zip(layers_of(cache), layers_of(later), strict=True):
        if _keeps_all(layer):
            _cut_layer(layer, source, length)
    return cache


# --- saved form ----------------------------------------------------------------------------------------------------


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every tensor, number and None below ``value``: (path, container, key, leaf)."""
    entries: list[tuple[Any, Any]]
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        entries = list(vars(value).items())
    else:
        return
    for key, entry in entries:
        here = f"{path}.{key}" if path else str(key)
        if entry is None or isinstance(entry, Tensor | bool | int):
            yield here, value, key, entry
        else:
            yield from _leaves(entry, here)


def saved(cache: Cache) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Copies of a cache's tensors and numbers, by path ("layers.0.keys")."""
    arrays: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for path, _, _, leaf in _leaves(cache, ""):
        if isinstance(leaf, Tensor):
            arrays[path] = leaf.detach().clone(memory_format=torch.contiguous_format)
        elif leaf is not None:
            numbers[path] = int(leaf)
    return arrays, numbers


def loaded(template: Cache, arrays: Mapping[str, Any], numbers: Mapping[str, int]) -> Cache:
    """The inverse of ``saved``. ``template``: any used cache of the same model; gives classes, dtype and device.

    Raises: StateError for a tensor that the template does not have.
    """
    cache = copied(template)
    known = list(_leaves(cache, ""))
    device = next((leaf.device for _, _, _, leaf in known if isinstance(leaf, Tensor)), torch.device("cpu"))
    unknown = (arrays.keys() | numbers.keys()) - {path for path, _, _, _ in known}
    if unknown:
        raise StateError(f"the saved state has {sorted(unknown)[0]!r}, which this model's cache does not have")
    for path, container, key, leaf in known:
        if path in arrays:
            value: Any = torch.as_tensor(arrays[path]).to(device, copy=True)
        elif path in numbers:
            value = bool(numbers[path]) if isinstance(leaf, bool) else numbers[path]
        else:
            value = None
        if isinstance(container, dict | list):
            container[key] = value
        else:
            setattr(container, key, value)
    return cache


def nbytes(cache: Cache | None) -> int:
    """Bytes of a cache's tensors; shared ones count once."""
    found = {id(leaf): leaf for _, _, _, leaf in _leaves(cache, "") if isinstance(leaf, Tensor)}
    return sum(leaf.numel() * leaf.element_size() for leaf in found.values())
