"""The operations that every model family is written over, and what a backend says about its own.

A backend subclasses ``Ops``; ``specdec.backends.cpu.reference`` is the reference that all others are tested against.

Axes: T rows (consecutive token positions of one sequence, no batch axis), H hidden, N output features, nq / nkv query
and key-value heads, D head size, R rotary dimensions, C convolution channels, Hk / Hv key and value heads of a linear
layer, Dk / Dv their sizes, V vocabulary. "act" is the activation dtype (bfloat16, float16 or float32).

**Row invariance** is part of the contract: the bits of row t of any result depend on row t of the inputs and on the
cached rows before it, never on T or on how earlier rows were grouped into passes. A backend that cannot keep this for
up to ``max_rows`` rows declares ``Parity.NUMERIC`` (see ``Capabilities``).

Ops return new arrays and never write to their inputs; the caches own all mutation, and what an op writes to a cache is
provisional until the cache's ``commit``.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from specdec.backends.arrays import ArrayHidden
from specdec.backends.caches import Array, Cache, DeltaCache, HeadRows, KVCache, LatentCache
from specdec.backends.passes import Body, EagerPasses, ExecutorSetup, Pass, Passes
from specdec.contract import Executor, Hidden, Logits, Parity
from specdec.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Array",
    "Cache",
    "Capabilities",
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
        """Frequencies of plain rotary embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""
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
        """Frequencies of YaRN: slow turns are stretched by ``factor``, fast ones kept, those between blended.

        ``original`` is the context length of pre-training (L), ``beta_fast`` and ``beta_slow`` are the rotations per
        L (beta and alpha) between which the ramp lies. The attention factor is the caller's, for the softmax scale.
        Source: Peng et al. 2023, arXiv:2309.00071, section 3.2 (NTK-by-parts); its ramp over dimensions in place of
        rotations, and ``truncate`` (whole dimensions as its ends), are those of the authors' code.
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
        """Frequencies of Llama 3.1: wavelengths above ``original / low`` are stretched by ``factor``, those below
        ``original / high`` kept, those between blended linearly in rotations per ``original``.

        Source: Llama 3.1's reference code (``apply_scaling``); no paper gives the formula.
        """

        def scaled(plain: float) -> float:
            rotations = original * plain / (2 * math.pi)
            kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
            return (1 - kept) * plain / factor + kept * plain

        return cls(tuple(scaled(plain) for plain in cls.of(theta, rotary_dims).inv_freq))


@attrs.frozen(kw_only=True)
class Routing:
    """How a router chooses ``top_k`` of E experts for a row, and how much each one counts.

    ``scores`` of all experts are a softmax or sigmoids of the router's logits, in float32. The best ``top_k`` of
    ``scores + bias`` are chosen, the lower id where two are equal. With ``groups > 1`` only experts of the
    ``kept_groups`` best groups can be chosen, a group being worth the sum of its two best. The weights are the chosen
    scores **without** the bias, divided by their sum (plus 1e-20) where ``normalised``, times ``scale``.

    Sources: Qwen's router is the softmax form; sigmoids, bias and groups are DeepSeek-V3's (arXiv:2412.19437,
    equations 12 to 16 and section 2.1.2).
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1


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
    """What an ``Ops`` promises and offers; fixed when it is made.

    Attributes:
        kernels: which kernels run, for people.
        parity: BITWISE where a row has the same bits in passes of 1 to ``max_rows`` rows, else NUMERIC.
        parity_reason: what the declared parity rests on.
        parity_needs_probe: BITWISE holds only where a stored probe shows it (``specdec.records.probes``): there is
            reason to believe it, and it could not be tried on this device.
        max_rows: rows of the longest pass that ``parity`` covers.
        packed_formats: quantised formats that it computes with as they are stored ("fp8-block", "nvfp4",
            "mlx-affine"); weights of all others come decoded. See ``Ops.weight``.
        slow: the kernels are a slow substitute; a load then says so, with ``kernels``.
    """

    kernels: str
    parity: Parity
    parity_reason: str = ""
    parity_needs_probe: bool = False
    max_rows: int = 16
    packed_formats: frozenset[str] = frozenset()
    slow: bool = False


class Ops(abc.ABC):
    """The operations. Every weight is as ``weight()`` returned it.

    A backend must have the abstract ones. Each of the others serves some families, or makes something faster; by
    default it is built from the abstract ones, or raises UnsupportedError.
    """

    capabilities: Capabilities
    hidden_type: ClassVar[type[ArrayHidden]]

    # --- weights and storage ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def weight(self, tensor: Array) -> Array:
        """A checkpoint tensor (torch, on the host) as this backend computes with it: act dtype, 2-D ``[N, H]``.

        Of a format in ``capabilities.packed_formats`` it is a ``specdec.checkpoints.quantised.StoredMatrix``, an
        embedding table and a head too; every operation that takes a weight takes what is returned for it.
        ``StoredMatrix.decode`` is the way out for sizes that have no kernel.
        """

    def stack(self, tensors: Sequence[Array]) -> Array:
        """Checkpoint matrices of one shape ``[N, H]``, one per head or expert, as ``project_heads`` and ``moe`` take
        them. A backend may keep them apart (views of a fused tensor stay views) or side by side. Of a format in
        ``packed_formats`` all are ``StoredMatrix`` of one layout, or all are tensors."""
        return tuple(self.weight(tensor) for tensor in tensors)

    @abc.abstractmethod
    def to_host(self, array: Array) -> Tensor:
        """An array of this backend as a torch tensor on the host, of the same dtype.

        It takes what the operations return, what caches save, and weights, packed ones decoded.
        """

    @abc.abstractmethod
    def from_host(self, tensor: Tensor) -> Array:
        """A torch tensor on the host as an array of this backend, of the same dtype."""

    @abc.abstractmethod
    def vector(self, tensor: Array, *, plus: float = 0.0) -> Array:
        """A small float32 parameter, ``plus`` added in float32 (1.0 for norms stored as an offset from 1)."""

    @abc.abstractmethod
    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> Cache:
        """An empty cache for keys and values of one attention layer: ``capacity`` rows, one per token, in act dtype."""

    def new_latent(self, capacity: int, dims: int) -> Cache:
        """An empty cache for compressed keys and values: ``capacity`` rows of ``dims`` values, in act dtype."""
        raise self._lacks("new_latent")

    def new_delta(self, shape: DeltaShape) -> Cache:
        """A zero convolution window and recurrent matrix of one gated delta-rule layer.

        The cache holds the committed recurrent matrix S ``[Hv, Dk, Dv]`` float32 and the last kc-1 raw rows, plus what
        the last pass needs to be cut short: after a pass of T rows, ``commit(a)`` leaves exactly the bits that a pass
        of a rows leaves. It can return to its ``marks`` only.
        """
        raise self._lacks("new_delta")

    # --- dense -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def embed(self, table: Array, tokens: Sequence[int]) -> Array:
        """Rows of ``table [V, H]`` for T token ids: ``[T, H]`` act."""

    @abc.abstractmethod
    def project(self, x: Array, weights: Sequence[Array], biases: Sequence[Array | None] = ()) -> tuple[Array, ...]:
        """``x [T, H] @ w.T (+ bias)`` for several weights ``[N_i, H]`` that read the same x: ``[T, N_i]`` act each.

        A bias ``[N_i]`` is as ``weight()`` returned it.
        """

    def project_heads(self, x: Array, weights: Array) -> Array:
        """``x[:, h] @ weights[h].T`` for every head: ``x [T, n, I]`` and a ``stack`` of n ``[O, I]``: ``[T, n, O]``."""
        raise self._lacks("project_heads")

    @abc.abstractmethod
    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array:
        """``x @ w.T``, plus ``residual [T, N]``: ``[T, N]`` act.

        The sum is meant to be rounded once; a library product that comes rounded to act (the torch reference's) is
        within the contract.
        """

    @abc.abstractmethod
    def swiglu(self, x: Array, gate: Array, up: Array) -> Array:
        """``silu(x @ gate.T) * (x @ up.T)``: ``[T, I]`` act, both products and the gating in float32."""

    @abc.abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis in float32, rounded once; weight from ``vector``.

        Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
        """

    @abc.abstractmethod
    def concat(self, a: Array, b: Array) -> Array:
        """``[T, ..., H_a]`` and ``[T, ..., H_b]`` side by side: ``[T, ..., H_a + H_b]``."""

    # --- experts ---------------------------------------------------------------------------------------------------

    def route(self, x: Array, weight: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
        """The experts of every row and their weights: ids ``[T, k]``, weights ``[T, k]`` float32, best first.

        ``weight [E, H]`` is the router's, from ``weight()``; ``bias [E]`` from ``vector()``. The logits ``x @ w.T``
        are not rounded to act.
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

        ``chosen`` is what ``route`` gave; ``experts`` are stacks of gate, up ``[I, H]`` and down ``[H, I]`` matrices
        and ``shared`` three such matrices, each expert being ``down(silu(gate x) * up x)`` rounded to act.
        ``shared_gate`` is ``[1, H]``; without it the shared expert counts whole. The sum runs in float32 in the order
        of the slots, then the shared expert, then the residual, and is rounded once. An expert is read once per pass.
        """
        raise self._lacks("moe")

    # --- attention -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def norm_rope(self, x: Array, weight: Array | None, eps: float, rope: Rope, position: int) -> Array:
        """RMS-norm every head of ``x [T, n, D]`` (skipped when weight is None), then rotate; row t is at position + t.

        ``x`` may be a strided view (a query half of an interleaved query-gate projection).
        """

    @abc.abstractmethod
    def attend(self, q: Array, k: Array, v: Array, cache: KVCache, *, scale: float, gate: Array | None = None) -> Array:
        """Append k, v ``[T, nkv, D]`` to the cache and attend causally with q ``[T, nq, D]``: ``[T, nq * D]`` act.

        Query head h reads KV head ``h // (nq / nkv)``; softmax in float32; row t sees the committed rows and rows
        0..t of this pass. With ``gate [T, nq, D]`` the result is multiplied by ``sigmoid(gate)`` before rounding.
        """

    def attend_latent(self, q: Array, row: Array, cache: LatentCache, *, scale: float, value_dims: int) -> Array:
        """Append ``row [T, D]`` to the cache and attend causally with ``q [T, n, D]``: ``[T, n, value_dims]`` act.

        All heads read the same rows: keys are whole rows, values their first ``value_dims``. Softmax in float32.
        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2, with the up-projections absorbed (appendix C).
        """
        raise self._lacks("attend_latent")

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Array, weight: Array, cache: DeltaCache) -> Array:
        """Causal depthwise convolution and silu: ``[T, C]`` act.

        ``u[t, c] = silu(sum_j weight[c, j] * x[t - kc + 1 + j, c])`` with rows before this pass from the cache
        (zeros before the first token); ``weight [C, kc]`` from ``vector``, ``weight[:, kc-1]`` meets the newest row.
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
        """Float32 logits ``x @ w.T`` of every row, ``[T, V]``, left on the device."""

    def head_rows(self, weight: Array, tokens: Sequence[int], base: HeadRows | None = None) -> HeadRows:
        """The rows of a head for these token ids, gathered into memory of their own.

        With ``base``, rows of the same head: missing ones are added, its own are shared.
        """
        raise self._lacks("head_rows")

    def pruned_head(self, x: Array, rows: HeadRows) -> Logits:
        """``head`` for the ids of ``rows`` alone. The logits are addressed by token id; every other id has -inf.

        Everything that ``Logits`` answers has the bits of a full row with -inf in the other places. Its finite values
        are those of ``head`` up to rounding: other rows of a weight may stand beside each of them.
        """
        raise self._lacks("pruned_head")

    # --- rows ------------------------------------------------------------------------------------------------------

    def hidden(self, x: Array) -> Hidden:
        """Wrap ``[T, H]`` as an opaque handle."""
        return self.hidden_type(x)

    def array(self, hidden: Hidden) -> Array:
        """The array inside a handle that this backend made. Raises: ContractError for another backend's."""
        if not isinstance(hidden, self.hidden_type):
            raise ContractError(f"hidden states of another backend: {type(hidden).__name__}")
        return hidden.array

    # --- how passes are launched -----------------------------------------------------------------------------------

    def device_executor(self, target: Pass, head: Pass | None, setup: ExecutorSetup) -> Executor | None:
        """Cycles that run on the device without the host, over passes which these ops bound; None where not offered.

        ``head`` is the MTP head's pass, None without ``setup.waiting``; its cache then holds true pairs alone.
        """
        return None

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int = 0) -> Passes:
        """Passes of ``body``, recorded once per number of rows where the backend can, with the bits of the ops.

        ``caches`` are of the kinds that the body takes, empty and not used afterwards. ``hidden_size`` is H of the
        hidden states that it takes, 0 for none. A body that cannot be recorded runs eagerly, with the reason in
        ``eager_reason``. By default every pass runs op by op.
        """
        return EagerPasses(body)

    def _lacks(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} has no {operation}, which this model needs", try_='target.backend = "cpu"'
        )
