"""Compare each operation of a loaded model on blocks of 2 to max_rows rows with the same rows one by one.

The calls are taken from the model: one pass over all layers, the heads and the MTP head runs on ops that record the
first call of each kind (name, shapes, dtypes) with its weights and inputs. Each call is then repeated on the backend's
own ops. Operations with a cache are compared after several context lengths, because kernels for long and short caches
differ.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Cache, DeltaShape, Ops, Rope, Routing
from specdec.doctor.comparing import Comparison, arrays_on_host, on_host, one_by_one
from specdec.models.causal_lm import CausalLM
from specdec.records.probes import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTEXTS = (7, 250, 1018, 4090)  # rows before a block; the blocks cross 256, 1024 and 4096 rows
LONG = 512  # from this context on, only one accept count per block is compared, since copying caches takes time
ROW_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "embed": ("tokens",),
    "project": ("x",),
    "project_heads": ("x",),
    "linear": ("x", "residual"),
    "swiglu": ("x",),
    "rms_norm": ("x",),
    "layer_norm": ("x",),
    "gelu": ("x",),
    "add": ("a", "b"),
    "add_positions": ("x",),
    "concat": ("a", "b"),
    "route": ("x",),
    "moe": ("x", "chosen", "residual"),
    "norm_rope": ("x",),
    "attend": ("q", "k", "v", "gate"),
    "attend_latent": ("q", "row"),
    "conv_window": ("x",),
    "gated_delta": ("u", "a", "b"),
    "gated_rms_norm": ("x", "z"),
    "head": ("x",),
    "pruned_head": ("x",),
}  # arguments with an axis of T rows
NO_ROWS = (
    *("weight", "stack", "vector", "to_host", "from_host", "hidden", "array", "head_rows"),
    *("new_kv", "new_latent", "new_delta", "record_passes", "device_executor", "device_samples", "free_bytes"),
    *("append", "attend_from"),
)
"""Operations without rows, that only wrap rows, or that only draft heads run: a draft cannot change the output."""


@attrs.frozen
class Call:
    """One call of an operation, with its arguments by name."""

    name: str
    arguments: Mapping[str, Any]

    def run(self, ops: Ops, start: int, stop: int, **changed: Any) -> Any:
        """Repeat the call for rows ``start`` to ``stop``; ``changed`` replaces arguments."""
        arguments = dict(self.arguments)
        for name in ROW_ARGUMENTS[self.name]:
            if arguments.get(name) is not None:
                arguments[name] = _rows_of(arguments[name], start, stop)
        if "position" in arguments:
            arguments["position"] += start
        arguments |= changed
        positional = []
        for parameter in list(_signature(self.name).parameters.values())[1:]:
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.name not in arguments:
                break
            positional.append(arguments.pop(parameter.name))  # positional, as in models: a backend may use other names
        return operator.methodcaller(self.name, *positional, **arguments)(ops)

    def label(self) -> str:
        """Describe the operation by name and the shapes of its matrices, or of its inputs if it has none."""
        rows = ROW_ARGUMENTS[self.name]
        others = (array for name, value in self.arguments.items() if name not in rows for array in _arrays(value))
        shapes = [_shown(array) for array in others if len(array.shape) > 1]
        if not shapes:
            inputs = (value for name, value in self.arguments.items() if name in rows and name != "residual")
            shapes = [_shown(array, skipped=1) for value in inputs for array in _arrays(value)]
        extra = " + residual" if self.name == "linear" and self.arguments.get("residual") is not None else ""
        storages = {" ".join(_storage(array)) for value in self.arguments.values() for array in _arrays(value)} - {""}
        stored = f" ({'; '.join(sorted(storages))})" if storages else ""
        return f"{self.name} {', '.join(shapes)}{extra}{stored}"


def _signature(operation: str) -> inspect.Signature:
    return inspect.signature(vars(Ops)[operation])


def _rows_of(value: Any, start: int, stop: int) -> Any:
    return tuple(part[start:stop] for part in value) if isinstance(value, tuple) else value[start:stop]


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple)


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [array for part in value for array in _arrays(part)]
    return [value] if _is_array(value) else []


def _shown(array: Any, skipped: int = 0) -> str:
    """``3584x1024``."""
    return "x".join(map(str, tuple(array.shape)[skipped:]))


def _storage(value: Any) -> tuple[str, ...]:
    """The storage settings of a backend's weight class, such as ``("group=64", "bits=4")``."""
    if not attrs.has(type(value)):
        return ()
    settings = ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
    return tuple(f"{name}={setting}" for name, setting in settings if isinstance(setting, int | str))


class RecordingOps(DelegatingOps):
    """Ops that delegate every call and record the first one of each kind.

    Attributes:
        calls: the recorded calls, in order.
        unknown: called operations that cannot be repeated here.
    """

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self.unknown: set[str] = set()
        self._seen: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Any:  # an operation that ``Ops`` does not have
        if name.startswith("_"):
            raise AttributeError(name)
        self.unknown.add(name)
        return operator.attrgetter(name)(self.inner)

    def call(self, name: str, *positional: Any, **named: Any) -> Any:
        if name in ROW_ARGUMENTS:
            arguments = dict(_signature(name).bind(self, *positional, **named).arguments)
            del arguments["self"]
            kind = (name, *((key, _kind_of(name, key, value)) for key, value in arguments.items()))
            if kind not in self._seen:
                self._seen.add(kind)
                self.calls.append(Call(name, arguments))
        return super().call(name, *positional, **named)


def _kind_of(operation: str, name: str, value: Any) -> Any:
    """A key that is equal for calls that look the same to a kernel: shapes without rows, dtypes, settings."""
    if name in ("position", "cache"):
        return None
    if name in ROW_ARGUMENTS[operation] and isinstance(value, list):
        return None  # token ids
    if isinstance(value, tuple | list):
        return tuple(_kind_of(operation, name, part) for part in value)
    if _is_array(value):
        shape = tuple(value.shape)[1:] if name in ROW_ARGUMENTS[operation] else tuple(value.shape)
        return type(value).__name__, shape, str(getattr(value, "dtype", "")), _storage(value)
    if value is None or isinstance(value, int | float | str | Rope | Routing | DeltaShape):
        return value
    return id(value)  # unknown: each object is its own kind


def over(piece: Any, ops: Any) -> Any:
    """Copy a piece of a model, recursively, with these ops in place of its own; weights are shared."""
    if attrs.has(type(piece)):
        changed = {}
        for field in attrs.fields(type(piece)):
            value = getattr(piece, field.name)
            new = ops if field.name == "ops" else over(value, ops)
            if field.init and new is not value:
                changed[field.alias] = new
        return attrs.evolve(piece, **changed) if changed else piece
    if type(piece) is tuple:
        parts = tuple(over(part, ops) for part in piece)
        return parts if any(new is not old for new, old in zip(parts, piece, strict=True)) else piece
    return piece


def note_calls(lm: CausalLM, rows: int) -> RecordingOps:
    """Record the calls of a pass of ``rows`` rows through the layers, the heads and the MTP head."""
    ops = RecordingOps(lm.ops)  # type: ignore[abstract]  # its methods are defined in a loop
    model = over(lm.model, ops)
    tokens = [(7 * i + 1) % lm.info.vocab_size for i in range(rows)]
    x = model.embed(tokens, 0)
    for layer in model.layers:
        x = layer(x, layer.new_cache(rows))
    x = model.norm(x)
    ops.head(x, model.lm_head)
    if model.mtp is not None:
        table = model.embed_tokens if model.mtp_embed_tokens is None else model.mtp_embed_tokens
        x = model.mtp(ops.embed(table, tokens), x, model.mtp.layer.new_cache(rows))
        ops.head(x, model.lm_head if model.mtp_lm_head is None else model.mtp_lm_head)
    return ops


def probe_operations(lm: CausalLM, contexts: Sequence[int] = CONTEXTS) -> tuple[list[Finding], list[str]]:
    """Return a finding for each operation, and one sentence for each that could not be compared."""
    rows = min(lm.ops.capabilities.max_rows, lm.info.max_positions)
    noted = note_calls(lm, rows)
    fitting = [context for context in contexts if context + rows <= lm.info.max_positions] or [0]
    findings: list[Finding] = []
    windows = [call for call in noted.calls if call.name == "conv_window"]
    for call in noted.calls:
        if call.name in ("attend", "attend_latent"):
            findings += [_with_cache(lm.ops, _attention(lm.ops, call), rows, context) for context in fitting]
        elif call.name == "gated_delta":
            window = next((w for w in windows if _channels(w) == call.arguments["shape"].channels), None)
            if window is None:
                noted.unknown.add("gated_delta without a conv_window")
            else:
                findings += [
                    _with_cache(lm.ops, _delta(lm.ops, window, call), rows, context) for context in (0, fitting[0])
                ]
        elif call.name != "conv_window":
            findings.append(_stateless(lm.ops, call, rows))
    notes = [f"no comparison of rows is known for the operation {name}" for name in sorted(noted.unknown)]
    if not noted.calls:
        notes.append(f"the layers of the family {lm.info.family} cannot be taken apart: no operation was compared")
    return findings, notes


def _channels(window: Call) -> int:
    return int(window.arguments["x"].shape[1])


def _stateless(ops: Ops, call: Call, rows: int) -> Finding:
    alone = one_by_one(arrays_on_host(ops, call.run(ops, t, t + 1)) for t in range(rows))
    comparison = Comparison("op", call.label(), rows)
    for count in range(2, rows + 1):
        comparison.rows(arrays_on_host(ops, call.run(ops, 0, count)), alone)
    return comparison.finding()


@attrs.frozen(kw_only=True)
class _Sequential:
    """An operation with a cache."""

    label: str
    empty: Callable[[int], Cache]  # capacity -> a cache
    step: Callable[[Cache, int, int], list[NDArray[Any]]]  # run rows start to stop, provisionally


def _attention(ops: Ops, call: Call) -> _Sequential:
    q = call.arguments["q"]
    if call.name == "attend":
        k = call.arguments["k"]
        heads, dim = k.shape[1:]
        label = f"attend, {q.shape[1]} query and {heads} key heads of {dim}"
        empty: Callable[[int], Cache] = lambda capacity: ops.new_kv(capacity, heads, dim)  # noqa: E731
    else:
        dims = call.arguments["row"].shape[1]
        label = f"attend_latent, {q.shape[1]} heads of {dims}"
        empty = lambda capacity: ops.new_latent(capacity, dims)  # noqa: E731

    def step(cache: Cache, start: int, stop: int) -> list[NDArray[Any]]:
        return [on_host(ops, call.run(ops, start, stop, cache=cache))]

    return _Sequential(label=label, empty=empty, step=step)


def _delta(ops: Ops, window: Call, call: Call) -> _Sequential:
    shape = call.arguments["shape"]

    def step(cache: Any, start: int, stop: int) -> list[NDArray[Any]]:
        u = window.run(ops, start, stop, cache=cache)
        mixed = call.run(ops, start, stop, cache=cache, u=u)
        return [on_host(ops, u), on_host(ops, mixed)]

    label = (
        f"conv_window and gated_delta, {shape.value_heads} heads of {shape.key_dim}x{shape.value_dim}, "
        f"{shape.channels} channels"
    )
    return _Sequential(label=label, empty=lambda capacity: ops.new_delta(shape), step=step)


def _with_cache(ops: Ops, op: _Sequential, rows: int, context: int) -> Finding:
    """Compare results and committed cache contents after ``context`` rows."""
    before = op.empty(context + rows)
    for start in range(0, context, rows):
        count = min(rows, context - start)
        op.step(before, 0, count)
        before.commit(count)
    saved = before.save()

    def again() -> Cache:
        cache = op.empty(context + rows)
        if context:
            cache.load(saved, context)
        return cache

    cache, singles, kept = again(), [], []
    for t in range(rows):
        singles.append(op.step(cache, t, t + 1))
        cache.commit(1)
        kept.append(_contents(ops, cache))
    alone = one_by_one(singles)
    comparison = Comparison("op", f"{op.label}, {context} rows before", rows)
    for count in range(2, rows + 1):
        for accepted in (count - 1, count) if context < LONG else (count - count % 2,):
            cache = again()
            comparison.rows(op.step(cache, 0, count), alone)
            cache.commit(accepted)
            comparison.state(count, _contents(ops, cache), kept[accepted - 1])
    return comparison.finding()


def _contents(ops: Ops, cache: Cache) -> dict[str, NDArray[Any]]:
    return {name: on_host(ops, array) for name, array in cache.save().items()}
