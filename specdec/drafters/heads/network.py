"""What the networks of all heads are made of: their weights over the target's ops, attention, and mapped logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from specdec.backends.arrays import ArrayHidden
from specdec.backends.batching import batching
from specdec.backends.choice import make_backend
from specdec.backends.ops import Array, Cache, Ops
from specdec.checkpoints import StoredWeights, check_weights, fingerprint
from specdec.contract import ForwardPass, Hidden, Needs, SharedWeights
from specdec.drafters.heads.files import P_EAGLE, HeadFiles
from specdec.drafters.heads.layout import Layout
from specdec.models.causal_lm import Boundaries
from specdec.models.decoder import Attention, GatedMlp, RmsNorm
from specdec.models.weights import NoOps, Recorder, Weights


def norm(weights: Weights, name: str, size: int, eps: float, *, scale: float = 1.0) -> RmsNorm:
    """The norm under ``name``, with its weight times ``scale``."""
    weight = weights.tensor(f"{name}.weight", (size,)).float() * scale
    return RmsNorm(ops=weights.ops, weight=weights.ops.vector(weight), eps=eps)


@attrs.frozen(kw_only=True)
class HeadLayer:
    """A decoder layer of a head.

    Attributes:
        hidden_norm: of the first layer of an EAGLE head, which reads an embedded token beside its state.
        window: entries that a row sees; None for all. It counts from the last true entry, or ``slides`` with the row;
            then P-EAGLE's rows see the last true entry in any case.
        causal: whether a row sees no row after it.
    """

    ops: Ops
    input_norm: RmsNorm
    hidden_norm: RmsNorm | None
    mixer: Attention
    post_norm: RmsNorm
    mlp: GatedMlp
    norm_before_residual: bool
    window: int | None
    slides: bool
    parallel: bool  # P-EAGLE's
    causal: bool

    @classmethod
    def of(cls, weights: Weights, layout: Layout, number: int) -> HeadLayer:
        """Build a layer from the head's weights, or record their names in a dry run."""
        g, layer, block = layout.geometry, weights.under(f"layers.{number}."), layout.block_size > 0
        paired, parallel = number == 0 and not block, layout.kind == P_EAGLE
        attention = layer.under("self_attn.")
        shape = attrs.evolve(  # biases and norms are as the tensors say
            g.attention,
            biased="q_proj.bias" in attention,
            biased_output="o_proj.bias" in attention,
            normed="heads" if block or "q_norm.weight" in attention else "",
        )
        return cls(
            ops=weights.ops,
            input_norm=norm(layer, "input_layernorm", g.hidden, g.eps),
            hidden_norm=norm(layer, "hidden_norm", g.hidden, g.eps) if paired else None,
            mixer=Attention.of(attention, g.hidden, shape, g.eps, width=2 * g.hidden if paired else g.hidden),
            post_norm=norm(layer, "post_attention_layernorm", g.hidden, g.eps),
            mlp=GatedMlp.of(layer.under("mlp."), g.hidden, g.intermediate),
            norm_before_residual=layout.norm_before_residual,
            window=g.windows[number],
            slides=not layout.window_from_anchor if block else parallel,
            parallel=parallel,
            causal=not (block and layout.bidirectional[number]),
        )

    def __call__(self, x: Array, embedded: Array, cache: Any, true: int) -> Array:
        """``true``: entries of the cache and of this pass that are true; only a layer with a window asks."""
        first = self._first(x.shape[0], cache, true - 1)
        x = self.mixer(*self._read(x, embedded), cache, first, causal=self.causal)
        return self.mlp(self.post_norm(x), x)

    def fill(self, x: Array, embedded: Array, cache: Any) -> None:
        """Append what ``__call__`` appends to the cache."""
        self.mixer.fill(self._read(x, embedded)[0], cache)

    def _read(self, x: Array, embedded: Array) -> tuple[Array, Array]:
        """What attention reads, and the residual."""
        if self.hidden_norm is None:
            return self.input_norm(x), x
        u = self.hidden_norm(x)
        return self.ops.concat(self.input_norm(embedded), u), u if self.norm_before_residual else x

    def _first(self, rows: int, cache: Any, last: int) -> list[int] | None:
        """The first entry that each row sees; ``last``: the last true one."""
        if self.window is None:
            return None
        places = range(int(cache.length), int(cache.length) + rows)
        ends = [row if self.slides else min(row, last) for row in places]
        first = [max(0, end - self.window + 1) for end in ends]
        return [min(entry, last) for entry in first] if self.parallel else first


@attrs.frozen(kw_only=True)
class Network:
    """What the networks of all kinds have: ``logit_norm`` is the final norm, whose output the logits are of."""

    ops: Ops
    layers: tuple[HeadLayer, ...]
    logit_norm: RmsNorm

    def new_caches(self, capacity: int) -> list[Cache]:
        """Empty caches, one per layer."""
        return [layer.mixer.new_cache(capacity) for layer in self.layers]


States = tuple[Hidden | None, Mapping[int, Hidden]]
"""The states of an output: those after the final norm, and those at layer boundaries."""


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

    def states(self, outputs: Sequence[States]) -> ArrayHidden:
        """The states of outputs that the head reads, in the order in which ``fc`` takes them: ``[T, n * H_t]``."""
        first = outputs[0][1]
        if isinstance(first, Boundaries):
            later: list[Any] = [boundaries for _, boundaries in outputs[1:]]
            if (states := first.side_by_side(self.needs, later)) is not None:
                return states
        rows = []
        for hidden, boundaries in outputs:
            apart = [boundaries[k] for k in self.needs.boundaries]
            if self.needs.final_hidden:
                assert hidden is not None
                apart.append(hidden)
            rows.append(self.ops.hidden_type(functools.reduce(self.ops.concat, map(self.array, apart))))
        return rows[0].join(rows[1:]) if rows[1:] else rows[0]


def ops_for(shared: SharedWeights, target: ForwardPass) -> Ops:
    """The ops that a head runs on. Raises: SpecdecError if the CPU backend is needed and cannot run."""
    if shared.ops is not None:
        ops: Ops = shared.ops
        return ops
    backend, _ = make_backend("cpu")
    asked = target.info.dtype if target.info.dtype in backend.dtypes else "float32"
    return batching(backend.ops(backend.choose_dtype(asked, "")[0]))


Build = Callable[[Weights, Layout], Any]


def load(files: HeadFiles, layout: Layout, target: ForwardPass, build: Build) -> tuple[Any, Surroundings, str]:
    """Check a head's weights and build its network.

    Returns: the network, what it computes with, and a fingerprint of the head.
    Raises: CheckpointError for a tensor that is missing, unused, of another shape or not finite.
    """
    check(files, layout, build)
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


def check(files: HeadFiles, layout: Layout, build: Build) -> None:
    """Check a head's tensors; a dry run says which it computes with. Raises: as ``load``."""
    ops: Any = NoOps()
    recorder = Recorder(ops, StoredWeights(files.checkpoint))
    build(recorder, layout)
    vocab = layout.target_vocab
    if layout.own_embedding and vocab is not None:
        recorder.tensor("embed_tokens.weight", (vocab, layout.geometry.hidden))
    if "lm_head.weight" in files:
        recorder.tensor("lm_head.weight", (layout.draft_vocab, layout.geometry.hidden))
    files.refuse_unused_tensors(recorder.tensors)
    check_weights(files.checkpoint, recorder.tensors).raise_for_errors()
