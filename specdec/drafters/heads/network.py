"""What the networks of all heads are made of: their weights over the target's ops, attention, and mapped logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from specdec.backends.choice import make_backend
from specdec.backends.ops import Array, KVCache, Ops
from specdec.checkpoints import StoredWeights, check_weights, fingerprint
from specdec.contract import ForwardOutput, ForwardPass, Hidden, Needs, SharedWeights
from specdec.drafters.heads.files import HeadFiles
from specdec.drafters.heads.layout import Geometry, Layout
from specdec.models.decoder import GatedMlp, RmsNorm
from specdec.models.weights import NoOps, Recorder, Weights


@attrs.frozen(kw_only=True)
class HeadAttention:
    """Attention of a head's layer: q, k and v from ``[T, I]``, the result ``[T, H_d]`` added to a residual.

    Biases and q/k norms are as the head was trained.
    """

    ops: Ops
    geometry: Geometry
    projections: tuple[Array, Array, Array]
    o_proj: Array
    biases: tuple[Array, ...] = ()  # of q, k and v
    o_bias: Array | None = None
    norms: tuple[Array | None, Array | None] = (None, None)  # of q and k

    @classmethod
    def of(cls, weights: Weights, geometry: Geometry, width: int, *, normed: bool = False) -> HeadAttention:
        """Build from the weights under ``self_attn.``; ``width`` is I, ``normed`` says that q/k norms must be there."""
        g, weights = geometry, weights.under("self_attn.")
        mixed, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
        sizes = {"q": mixed, "k": kv, "v": kv}
        biased = "q_proj.bias" in weights
        return cls(
            ops=weights.ops,
            geometry=g,
            projections=tuple(weights.matrix(f"{n}_proj.weight", (size, width)) for n, size in sizes.items()),
            o_proj=weights.matrix("o_proj.weight", (g.hidden, mixed)),
            biases=tuple(weights.matrix(f"{n}_proj.bias", (size,)) for n, size in sizes.items()) if biased else (),
            o_bias=weights.matrix("o_proj.bias", (g.hidden,)) if "o_proj.bias" in weights else None,
            norms=tuple(  # type: ignore[arg-type]
                weights.vector(f"{n}_norm.weight", (g.head_dim,)) if normed or f"{n}_norm.weight" in weights else None
                for n in "qk"
            ),
        )

    def new_cache(self, capacity: int) -> KVCache:
        return self.ops.new_kv(capacity, self.geometry.kv_heads, self.geometry.head_dim)

    def __call__(
        self, x: Array, residual: Array, cache: KVCache, first: Sequence[int] | None = None, *, causal: bool = True
    ) -> Array:
        """``residual + o_proj(attention)``; ``first`` and ``causal`` as in ``Ops.attend_from``."""
        ops, g, rows = self.ops, self.geometry, x.shape[0]
        q, k, v = ops.project(x, self.projections, self.biases)
        q = ops.norm_rope(q.reshape(rows, g.heads, g.head_dim), self.norms[0], g.eps, g.rope, cache.length)
        k = ops.norm_rope(k.reshape(rows, g.kv_heads, g.head_dim), self.norms[1], g.eps, g.rope, cache.length)
        v = v.reshape(rows, g.kv_heads, g.head_dim)
        if first is None and causal:
            mixed = ops.attend(q, k, v, cache, scale=g.scale)
        else:
            mixed = ops.attend_from(q, k, v, cache, scale=g.scale, first=first or [0] * rows, causal=causal)
        if self.o_bias is None:
            return self.ops.linear(mixed, self.o_proj, residual)
        (out,) = self.ops.project(mixed, (self.o_proj,), (self.o_bias,))
        return self.ops.add(residual, out)


def norm(weights: Weights, name: str, size: int, eps: float, *, scale: float = 1.0) -> RmsNorm:
    """The norm under ``name``, with its weight times ``scale``."""
    weight = weights.tensor(f"{name}.weight", (size,)).float() * scale
    return RmsNorm(ops=weights.ops, weight=weights.ops.vector(weight), eps=eps)


def mlp(weights: Weights, geometry: Geometry) -> GatedMlp:
    """The layer's MLP."""
    return GatedMlp.of(weights.under("mlp."), geometry.hidden, geometry.intermediate)


@attrs.frozen(kw_only=True, eq=False)
class Surroundings:
    """What a head computes with beside its own weights.

    Attributes:
        ops: the target's, or those of the CPU backend for a target that computes elsewhere.
        embed_tokens, lm_head: as these ops take them; the head's own or the target's.
        needs: of the head, on this target.
        vocab_size: the target's.
    """

    ops: Ops
    embed_tokens: Array
    lm_head: Array
    needs: Needs
    vocab_size: int

    def array(self, hidden: Hidden) -> Array:
        """Hidden states as the head's ops take them: as they are, or by way of the host."""
        if isinstance(hidden, self.ops.hidden_type):
            return self.ops.array(hidden)
        return self.ops.from_host(torch.from_numpy(np.array(hidden.rows())).to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.ops.to_host(self.ops.embed(self.embed_tokens, [0])).dtype

    def states(self, output: ForwardOutput, rows: int) -> Array:
        """The states of the first ``rows`` rows side by side, ``[rows, n * H_t]``, as ``fc`` joins them."""
        states = [output.boundaries[k] for k in self.needs.boundaries]
        states += [output.need_hidden()] if self.needs.final_hidden else []
        return functools.reduce(self.ops.concat, (self.array(hidden[:rows]) for hidden in states))


def ops_for(shared: SharedWeights, target: ForwardPass) -> Ops:
    """The ops that a head runs on. Raises: SpecdecError if the CPU backend is needed and cannot run."""
    if shared.ops is not None:
        ops: Ops = shared.ops
        return ops
    backend, _ = make_backend("cpu")
    return backend.ops(
        backend.choose_dtype(target.info.dtype if target.info.dtype in backend.dtypes else "float32", "")[0]
    )


Build = Callable[[Weights, Layout], Any]


def load(files: HeadFiles, layout: Layout, target: ForwardPass, build: Build) -> tuple[Any, Surroundings, str]:
    """Check a head's weights and build its network.

    Returns: the network, what it computes with, and a fingerprint of the head.
    Raises: CheckpointError for a tensor that is missing, unused, of another shape or not finite.
    """
    expected = expected_tensors(files, layout, build)
    check_weights(files.checkpoint, expected).raise_for_errors()
    shared = target.shared_weights()
    ops = ops_for(shared, target)
    weights = Weights(ops, StoredWeights(files.checkpoint, keeps=ops.capabilities.packed_formats))

    def targets(array: Any) -> Array:
        return array if shared.ops is not None else ops.weight(torch.as_tensor(array))

    if layout.own_embedding:
        shape = (layout.target_vocab or target.info.vocab_size, layout.geometry.hidden)
        embed = weights.matrix("embed_tokens.weight", shape)
    elif layout.scaled_embedding and shared.embed_scale != 1:
        table = shared.embed_tokens if shared.ops is None else shared.ops.to_host(shared.embed_tokens)
        embed = ops.weight(torch.as_tensor(table) * shared.embed_scale)
    else:
        embed = targets(shared.embed_tokens)
    if not layout.own_head:
        lm_head = targets(shared.lm_head)
    elif "lm_head.weight" in files:
        rows = weights.tensor("lm_head.weight", ())
        lm_head = ops.weight(rows[list(layout.order)].contiguous() if layout.order else rows)
    else:
        lm_head = embed
    around = Surroundings(
        ops=ops, embed_tokens=embed, lm_head=lm_head, needs=layout.needs(target.info), vocab_size=target.info.vocab_size
    )
    return build(weights, layout), around, fingerprint(files.checkpoint)


def expected_tensors(files: HeadFiles, layout: Layout, build: Build) -> Any:
    """Names and shapes of all tensors that a head computes with, by a dry run.

    Raises: CheckpointError for a tensor that is there and not among them.
    """
    ops: Any = NoOps()
    recorder = Recorder(ops, StoredWeights(files.checkpoint))
    build(recorder, layout)
    vocab = layout.target_vocab
    if layout.own_embedding and vocab is not None:
        recorder.tensor("embed_tokens.weight", (vocab, layout.geometry.hidden))
    if "lm_head.weight" in files:
        recorder.tensor("lm_head.weight", (layout.draft_vocab, layout.geometry.hidden))
    files.refuse_unused_tensors(recorder.tensors)
    return recorder.tensors
