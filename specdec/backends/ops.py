"""The operations that model families are built from, and the capabilities that a backend declares.

A backend subclasses ``Ops``. All backends are tested against the reference in ``specdec.backends.cpu.reference``.

Axes: T rows (consecutive token positions of one sequence, no batch axis), H hidden, N output features, nq / nkv query
and key-value heads, D head size, R rotary dimensions, C convolution channels, Hk / Hv key and value heads of a linear
layer, Dk / Dv their sizes, V vocabulary. "act" is the activation dtype (bfloat16, float16 or float32).

**Row invariance** is part of the contract: the bits of row t of any result depend only on row t of the inputs and on
the cached rows before it, never on T or on how earlier rows were grouped into passes. A backend that cannot guarantee
this for passes of up to ``max_rows`` rows declares ``Parity.NUMERIC`` (see ``Capabilities``).

Ops return new arrays and never write to their inputs. Only caches change, and rows that an op appends to a cache are
provisional until the cache's ``commit``.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import numpy as np

from specdec.backends.arrays import ArrayHidden, HostLogits
from specdec.backends.caches import Array, Cache, DeltaCache, HeadRows, KVCache, LatentCache
from specdec.backends.passes import Body, EagerPasses, Passes
from specdec.contract import Hidden, Logits, Parity
from specdec.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Array",
    "Cache",
    "Capabilities",
    "Clamp",
    "DeltaCache",
    "DeltaShape",
    "HeadRows",
    "KVCache",
    "LatentCache",
    "Ops",
    "Rope",
    "Routing",
]


@attrs.frozen
class Rope:
    """Rotary embedding of the first ``2 * len(inv_freq)`` dimensions of a head, half-split ("NeoX") pairs.

    ``inv_freq[j] = theta ** (-2 j / R)``; the angle of position p is ``p * inv_freq[j]`` in float32.
    """

    inv_freq: tuple[float, ...]

    @classmethod
    def of(cls, theta: float, rotary_dims: int) -> Rope:
        """Frequencies of standard rotary embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""
        return cls(tuple(theta ** (-2.0 * j / rotary_dims) for j in range(rotary_dims // 2)))

    @classmethod
    def yarn(
        cls,
        theta: float,
        rotary_dims: int,
        *,
        factor: float,
        original: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
    ) -> Rope:
        """Frequencies of YaRN: low ones are divided by ``factor``, high ones kept, and those in between blended.

        ``original`` is the context length of pre-training (L). ``beta_fast`` and ``beta_slow`` are the rotations per L
        (beta and alpha) at the ends of the ramp. The caller applies the attention factor to the softmax scale.
        Source: Peng et al. 2023, arXiv:2309.00071, section 3.2 (NTK-by-parts). As in the authors' code, the ramp runs
        over dimensions instead of rotations, and ``truncate`` rounds its ends to whole dimensions.
        """

        def dimension(rotations: float) -> float:
            return rotary_dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(beta_fast), dimension(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dims - 1)
        if low == high:
            high += 0.001  # a step; the authors' code does the same

        def blended(j: int, plain: float) -> float:
            ramp = min(max((j - low) / (high - low), 0.0), 1.0)
            return plain / factor * ramp + plain * (1 - ramp)

        return cls(tuple(blended(j, plain) for j, plain in enumerate(cls.of(theta, rotary_dims).inv_freq)))

    @classmethod
    def llama3(
        cls, theta: float, rotary_dims: int, *, factor: float, original: int, low: float = 1.0, high: float = 4.0
    ) -> Rope:
        """Frequencies of Llama 3.1: wavelengths above ``original / low`` are multiplied by ``factor``, those below
        ``original / high`` kept, and those in between blended linearly in rotations per ``original``.

        Source: Llama 3.1's reference code (``apply_scaling``); no paper gives the formula.
        """

        def scaled(plain: float) -> float:
            rotations = original * plain / (2 * math.pi)
            kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
            return (1 - kept) * plain / factor + kept * plain

        return cls(tuple(scaled(plain) for plain in cls.of(theta, rotary_dims).inv_freq))


@attrs.frozen(kw_only=True)
class Routing:
    """How a router chooses ``top_k`` of E experts for a row, and how it weights them.

    ``scores`` are a softmax or sigmoids of the router's logits, in float32. The experts with the ``top_k`` largest
    ``scores + bias`` are chosen; ties go to the lower id. With ``groups > 1`` only experts of the ``kept_groups`` best
    groups can be chosen; a group's score is the sum of its two best. The weights are the chosen scores **without** the
    bias, divided by their sum (plus 1e-20) if ``normalised``, times ``scale``.

    Sources: Qwen's router uses the softmax; sigmoids, bias and groups are from DeepSeek-V3 (arXiv:2412.19437,
    equations 12 to 16 and section 2.1.2).
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1


@attrs.frozen(kw_only=True)
class Clamp:
    """The gating of ``Ops.clamped_moe``: ``(u + 1) g sigmoid(alpha g)``, with the gate's value g clamped to at most
    ``limit`` and the other one, u, to ``-limit`` to ``limit``.

    Source: the gpt-oss model card, arXiv:2508.10925, section 2.2.
    """

    alpha: float
    limit: float


@attrs.frozen(kw_only=True)
class DeltaShape:
    """Sizes of one gated delta-rule layer."""

    key_heads: int  # Hk
    value_heads: int  # Hv, a multiple of Hk (1, 2, 3, ...)
    key_dim: int  # Dk
    value_dim: int  # Dv
    kernel: int  # taps of the causal convolution, kc

    @property
    def channels(self) -> int:
        """C = 2 Hk Dk + Hv Dv: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@attrs.frozen(kw_only=True)
class Capabilities:
    """What an ``Ops`` guarantees and supports; fixed at construction.

    Attributes:
        kernels: a readable description of the kernels.
        parity: BITWISE if a row has the same bits in passes of 1 to ``max_rows`` rows, else NUMERIC.
        parity_reason: the justification of the declared parity.
        probed_context: committed rows that attention starts from in the probe at every load, so that it covers more
            than one of the parts that the kernels cut a context into.
        max_rows: rows of the longest pass that ``parity`` covers.
        batch_rows: rows of the longest pass over several sequences (``specdec.backends.batching``) that it covers; 0 if
            sequences run one after another.
        warms_by_rows: as in ``ModelInfo``.
        packed_formats: quantised formats whose weights stay packed ("fp8-block", "nvfp4", "mlx-affine"); weights in
            other formats arrive decoded. See ``Ops.weight``.
        slow: the kernels are a slow fallback; loading a model then reports ``kernels``.
    """

    kernels: str
    parity: Parity
    parity_reason: str = ""
    probed_context: int = 0
    max_rows: int = 16
    batch_rows: int = 0
    warms_by_rows: bool = True
    packed_formats: frozenset[str] = frozenset()
    slow: bool = False


class Ops(abc.ABC):
    """The operations of a backend. Every weight argument is a result of ``weight()``.

    A backend must implement the abstract methods. The others serve some families or are optimisations; their defaults
    use the abstract methods or raise UnsupportedError. ``layer_norm`` and ``gelu`` compute on the host by default, one
    row at a time: right on every backend, slow on a device, and not part of a recorded pass.
    """

    capabilities: Capabilities
    hidden_type: ClassVar[type[ArrayHidden]]
    int8_matrices: int = 0  # weights so far whose products take activations in int8 (``target.activations``)

    # --- weights and storage ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def weight(self, tensor: Array) -> Array:
        """Convert a checkpoint tensor (torch, on the host) to this backend's form: act dtype, 2-D ``[N, H]``.

        For a format in ``capabilities.packed_formats`` the argument is a ``specdec.checkpoints.quantised.StoredMatrix``
        (embedding tables and heads included), and every operation with a weight accepts the result. Use
        ``StoredMatrix.decode`` for sizes without a kernel.
        """

    def stack(self, tensors: Sequence[Array]) -> Array:
        """Convert checkpoint matrices of one shape ``[N, H]``, one per head or expert, for ``project_heads`` and
        ``moe``. A backend may store them separately (views of a fused tensor stay views) or contiguously. Either all
        are tensors, or all are ``StoredMatrix`` of one layout in ``packed_formats``."""
        return tuple(self.weight(tensor) for tensor in tensors)

    def table(self, tensor: Array) -> Array:
        """``weight`` of a table that is only looked up in (``embed``), which a backend may leave in its file."""
        return self.weight(tensor)

    @abc.abstractmethod
    def to_host(self, array: Array) -> Tensor:
        """Copy an array of this backend to a torch tensor on the host, of the same dtype.

        Accepts results of operations, saved caches, and weights; packed weights are decoded.
        """

    @abc.abstractmethod
    def from_host(self, tensor: Tensor) -> Array:
        """Convert a torch tensor on the host to an array of this backend, of the same dtype."""

    @abc.abstractmethod
    def vector(self, tensor: Array, *, plus: float = 0.0) -> Array:
        """Convert a small parameter to float32 and add ``plus`` (1.0 for norms stored as an offset from 1)."""

    @abc.abstractmethod
    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> Cache:
        """Create a cache for the keys and values of one attention layer: ``capacity`` rows, one per token, act."""

    def new_window(self, capacity: int, window: int, kv_heads: int, head_dim: int, sinks: Array | None = None) -> Cache:
        """Create a cache as ``new_kv`` does, in which a row attends to the last ``window`` rows only, its own included.

        With 0 it attends to all. ``sinks [nq]``, a result of ``vector``, are scores, one per query head, that join
        every softmax and have no value. It keeps all ``capacity`` rows, so that it can be truncated to any length.
        Sources: Beltagy, Peters and Cohan 2020, arXiv:2004.05150, section 3.1 (one-sided); learned sinks: the gpt-oss
        model card, arXiv:2508.10925, section 2.2.
        """
        raise self._lacks("new_window")

    def new_latent(self, capacity: int, dims: int) -> Cache:
        """Create a cache for compressed keys and values: ``capacity`` rows of ``dims`` values, in act dtype."""
        raise self._lacks("new_latent")

    def new_delta(self, shape: DeltaShape) -> Cache:
        """Create a zeroed cache for one gated delta-rule layer.

        It holds the committed recurrent matrix S ``[Hv, Dk, Dv]`` float32, the last kc-1 raw rows, and the data for a
        partial commit: after a pass of T rows, ``commit(a)`` leaves exactly the bits of a pass of a rows. It can be
        truncated only to its ``marks``.
        """
        raise self._lacks("new_delta")

    # --- dense -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def embed(self, table: Array, tokens: Sequence[int]) -> Array:
        """Look up T token ids in ``table [V, H]``: ``[T, H]`` act."""

    @abc.abstractmethod
    def project(self, x: Array, weights: Sequence[Array], biases: Sequence[Array | None] = ()) -> tuple[Array, ...]:
        """``x [T, H] @ w.T (+ bias)`` for several weights ``[N_i, H]``: ``[T, N_i]`` act each.

        A bias ``[N_i]`` is a result of ``weight()``.
        """

    def project_heads(self, x: Array, weights: Array) -> Array:
        """``x[:, h] @ weights[h].T`` for every head: ``x [T, n, I]`` and a ``stack`` of n ``[O, I]``: ``[T, n, O]``."""
        raise self._lacks("project_heads")

    @abc.abstractmethod
    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array:
        """``x @ w.T``, plus ``residual [T, N]``: ``[T, N]`` act.

        The sum should be rounded once, but a product that a library has rounded to act is allowed, as in the torch
        reference.
        """

    @abc.abstractmethod
    def swiglu(self, x: Array, gate: Array, up: Array) -> Array:
        """``silu(x @ gate.T) * (x @ up.T)``: ``[T, I]`` act, both products and the gating in float32."""

    def geglu(self, x: Array, gate: Array, up: Array) -> Array:
        """As ``swiglu``, with ``gelu`` in place of silu: ``[T, I]`` act.

        Source: Shazeer 2020, arXiv:2002.05202, equation 6.
        """
        raise self._lacks("geglu")

    @abc.abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis in float32, rounded once; weight from ``vector``.

        Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
        """

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`` over the last axis in float32, rounded once.

        ``weight`` and ``bias`` are results of ``vector``. Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
        """
        import torch.nn.functional as F  # noqa: N812  (torch's own convention)

        scale, shift = self.to_host(weight), self.to_host(bias)
        return self._on_host(lambda row: F.layer_norm(row, row.shape[-1:], scale, shift, eps), x)

    def gelu(self, x: Array) -> Array:
        """``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` of every element in float32, rounded once.

        Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2: the approximation that GPT-2 was trained with.
        """
        import torch.nn.functional as F  # noqa: N812

        return self._on_host(lambda row: F.gelu(row, approximate="tanh"), x)

    def scale(self, x: Array, factor: float) -> Array:
        """``x * factor`` of every element, rounded once."""
        return x * factor

    def scale_by_position(self, x: Array, beta: float, length: int, position: int) -> Array:
        """``x (1 + beta ln(1 + floor(p / length)))`` of every row of ``x [T, H]``, rounded once; p is position + t.

        Source: the queries of Llama 4 and Ministral 3 at long contexts, as their reference code scales them.
        """
        raise self._lacks("scale_by_position")

    def add(self, a: Array, b: Array) -> Array:
        """``a + b`` of two activations ``[T, H]``, rounded once."""
        return a + b

    def multiply(self, a: Array, b: Array) -> Array:
        """``a * b`` of the elements of two activations ``[T, H]``, rounded once."""
        return a * b

    def add_positions(self, x: Array, table: Array, position: int) -> Array:
        """Add learned position embeddings to ``x [T, H]``: row t gets ``table[position + t]``, of ``table [P, H]``."""
        return self.add(x, self.embed(table, range(position, position + x.shape[0])))

    def _on_host(self, function: Callable[[Tensor], Tensor], x: Array) -> Array:
        """``function`` of every row of ``x [T, H]`` alone: torch's bits depend on the number of rows."""
        import torch

        host = self.to_host(x)
        return self.from_host(torch.cat([function(row[None].float()) for row in host]).to(host.dtype))

    @abc.abstractmethod
    def concat(self, a: Array, b: Array) -> Array:
        """Concatenate ``[T, ..., H_a]`` and ``[T, ..., H_b]`` along the last axis: ``[T, ..., H_a + H_b]``."""

    # --- experts ---------------------------------------------------------------------------------------------------

    def route(self, x: Array, weight: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
        """Choose the experts of every row: ids ``[T, k]`` and weights ``[T, k]`` float32, best first.

        ``weight [E, H]`` is the router's; ``bias [E]`` is a result of ``vector()``. The logits ``x @ w.T`` are not
        rounded to act.
        """
        raise self._lacks("route")

    def moe(
        self,
        x: Array,
        chosen: tuple[Array, Array],
        experts: tuple[Array, Array, Array],
        residual: Array,
        *,
        shared: tuple[Array, Array, Array] | None = None,
        shared_gate: Array | None = None,
    ) -> Array:
        """``residual + sum_j w_j expert_j(x) (+ sigmoid(shared_gate x) shared(x))``: ``[T, H]`` act.

        ``chosen`` is the result of ``route``. ``experts`` are stacks of gate and up ``[I, H]`` and down ``[H, I]``
        matrices; ``shared`` is three such matrices. An expert is ``down(silu(gate x) * up x)`` rounded to act.
        ``shared_gate`` is ``[1, H]``; without it the shared expert has weight 1. The sum runs in float32 over the slots
        in order, the shared expert and the residual, and is rounded once. An expert is read once per pass.
        """
        raise self._lacks("moe")

    def clamped_moe(
        self,
        x: Array,
        router: tuple[Array, Array],
        routing: Routing,
        experts: tuple[Array, Array, Array],
        biases: tuple[Array, Array, Array],
        clamp: Clamp,
        residual: Array,
    ) -> Array:
        """``route`` and ``moe`` of experts with biases and the gating of ``clamp``: ``[T, H]`` act.

        ``router`` is its weight ``[E, H]`` and the bias ``[E]`` of its logits; ``biases`` are those of gate and up
        ``[E, I]`` and down ``[E, H]``. All biases are results of ``vector``. Products with a bias are rounded to act.
        """
        raise self._lacks("clamped_moe")

    # --- attention -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def norm_rope(self, x: Array, weight: Array | None, eps: float, rope: Rope, position: int) -> Array:
        """RMS-norm every head of ``x [T, n, D]`` (skipped when weight is None), then rotate; row t is at position + t.

        ``x`` may be a strided view, such as the query half of an interleaved query-gate projection.
        """

    @abc.abstractmethod
    def attend(self, q: Array, k: Array, v: Array, cache: KVCache, *, scale: float, gate: Array | None = None) -> Array:
        """Append k, v ``[T, nkv, D]`` to the cache and attend causally with q ``[T, nq, D]``: ``[T, nq * D]`` act.

        Query head h reads KV head ``h // (nq / nkv)``. The softmax is in float32. Row t sees the committed rows and
        rows 0..t of this pass, or the last of these with a cache of ``new_window``. With ``gate [T, nq, D]`` the result
        is multiplied by ``sigmoid(gate)`` before rounding.
        """

    def append(self, k: Array, v: Array, cache: KVCache) -> None:
        """Append k, v ``[T, nkv, D]`` to the cache as provisional rows, without queries.

        For draft heads whose keys and values come from another model's hidden states, and for prompts whose output
        nobody reads. By default ``attend`` with the keys as queries.
        """
        self.attend(k, k, v, cache, scale=1.0)

    def attend_cached(self, q: Array, cache: KVCache, *, scale: float) -> Array:
        """``attend`` with q ``[T, nq, D]`` once the cache holds the keys and values of these T rows: ``[T, nq * D]``.

        For layers that read what an earlier layer has appended. Source: Brandon et al. 2024, arXiv:2405.12981.
        """
        raise self._lacks("attend_cached")

    def attend_from(
        self, q: Array, k: Array, v: Array, cache: KVCache, *, scale: float, first: Sequence[int], causal: bool = True
    ) -> Array:
        """Append k, v to the cache and attend within windows: ``[T, nq * D]`` act.

        Row t sees the rows from ``first[t]`` on (a row of the cache, at most its own), up to itself, or up to the last
        row of this pass with ``causal=False``. Otherwise like ``attend``. Not part of a recorded pass.
        """
        raise self._lacks("attend_from")

    def attend_latent(self, q: Array, row: Array, cache: LatentCache, *, scale: float, value_dims: int) -> Array:
        """Append ``row [T, D]`` to the cache and attend causally with ``q [T, n, D]``: ``[T, n, value_dims]`` act.

        All heads read the same rows: a key is a whole row, a value its first ``value_dims``. Softmax in float32.
        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2, with the up-projections absorbed (appendix C).
        """
        raise self._lacks("attend_latent")

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Array, weight: Array, cache: DeltaCache) -> Array:
        """Causal depthwise convolution and silu: ``[T, C]`` act.

        ``u[t, c] = silu(sum_j weight[c, j] * x[t - kc + 1 + j, c])``, with rows before this pass from the cache (zeros
        before the first token). ``weight [C, kc]`` is from ``vector``; ``weight[:, kc-1]`` applies to the newest row.
        """
        raise self._lacks("conv_window")

    def gated_delta(
        self, u: Array, a: Array, b: Array, a_log: Array, dt_bias: Array, cache: DeltaCache, shape: DeltaShape
    ) -> Array:
        """The gated delta rule, token by token in float32: ``[T, Hv, Dv]`` act.

        ``u [T, C]`` holds q, k ``[Hk, Dk]`` and v ``[Hv, Dv]`` of each row; a, b ``[T, Hv]``. Value head h uses
        key head ``h // (Hv / Hk)``. With q and k L2-normalised (eps 1e-6 inside the root), q scaled by Dk^-0.5,
        ``beta = sigmoid(b)`` and ``g = -exp(a_log) * softplus(a + dt_bias)``:

            S = S exp(g);  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q

        Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10.
        """
        raise self._lacks("gated_delta")

    def gated_rms_norm(self, x: Array, z: Array, weight: Array, eps: float) -> Array:
        """``rms_norm(x) * silu(z)`` per head of ``x, z [T, Hv, Dv]``, float32, rounded once: ``[T, Hv * Dv]`` act."""
        raise self._lacks("gated_rms_norm")

    # --- head ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def head(self, x: Array, weight: Array) -> Logits:
        """Float32 logits ``x @ w.T`` of every row, ``[T, V]``, on the device."""

    def softcap(self, logits: Logits, cap: float) -> Logits:
        """``cap * tanh(logit / cap)`` of every logit, in float32. By default on the host.

        Source: Gemma 2, arXiv:2408.00118, section 2.
        """
        rows, limit = logits.rows(), np.float32(cap)
        return HostLogits(np.tanh(rows / limit) * limit)

    def head_rows(self, weight: Array, tokens: Sequence[int], base: HeadRows | None = None) -> HeadRows:
        """Copy the rows of a head for these token ids.

        With ``base``, earlier rows of the same head, only the missing ones are copied and the others are shared.
        """
        raise self._lacks("head_rows")

    def pruned_head(self, x: Array, rows: HeadRows) -> Logits:
        """Logits for the ids of ``rows`` only, addressed by token id; every other id has -inf.

        All ``Logits`` methods give the bits of a full row with -inf at the other ids. The finite values equal those of
        ``head`` up to rounding, as each row of the weight has other neighbours.
        """
        raise self._lacks("pruned_head")

    def pruned_heads(self, x: Array, heads: Sequence[HeadRows]) -> Sequence[Logits]:
        """``pruned_head`` of each row of ``x [T, H]`` with rows of its own."""
        return [self.pruned_head(x[t : t + 1], rows) for t, rows in enumerate(heads)]

    # --- rows ------------------------------------------------------------------------------------------------------

    def hidden(self, x: Array) -> Hidden:
        """Wrap ``[T, H]`` as an opaque handle."""
        return self.hidden_type(x)

    def array(self, hidden: Hidden) -> Array:
        """Unwrap a handle of this backend. Raises: ContractError for another backend's."""
        if not isinstance(hidden, self.hidden_type):
            raise ContractError(f"hidden states of another backend: {type(hidden).__name__}")
        return hidden.array

    def free_bytes(self) -> int | None:
        """The bytes of device memory that caches may still take; None if only the host's memory limits them."""
        return None

    # --- how passes are launched -----------------------------------------------------------------------------------

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int = 0) -> Passes:
        """Return passes of ``body``, recorded if the backend can, with the bits of the ops.

        ``caches`` are empty caches of the kinds that the body takes, not used afterwards. ``hidden_size`` is H of the
        hidden states that the body takes, 0 for none. A body that cannot be recorded runs op by op, with the reason in
        ``eager_reason``. By default every pass runs op by op.
        """
        return EagerPasses(body)

    def _lacks(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} has no {operation}, which this model needs", try_='target.backend = "cpu"'
        )
