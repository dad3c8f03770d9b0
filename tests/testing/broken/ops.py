"""Wrong operations, derived from the torch reference."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from specdec.backends.cpu.arrays import CpuLogits
from specdec.backends.cpu.caches import CpuDeltaCache
from specdec.backends.cpu.reference import ReferenceOps


def _squashed(x: Tensor) -> Tensor:
    """Row by row: vectorised and scalar parts of torch's sigmoid differ in bits, which is another clause's business."""
    return torch.cat([torch.sigmoid(x[t : t + 1].float()) for t in range(len(x))])


class PlusInBfloat16(ReferenceOps):
    def vector(self, tensor, *, plus=0.0):
        return (tensor.bfloat16() + plus).float()


class ForgetsTheResidual(ReferenceOps):
    def linear(self, x, weight, residual=None):
        return super().linear(x, weight)


class GateAndUpSwapped(ReferenceOps):
    def swiglu(self, x, gate, up):
        return super().swiglu(x, up, gate)


class LayerNorm(ReferenceOps):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


class OnePositionForAllRows(ReferenceOps):
    def norm_rope(self, x, weight, eps, rope, position):
        turn = super().norm_rope
        return torch.cat([turn(x[t : t + 1], weight, eps, rope, position) for t in range(len(x))])


class HeadsInterleaved(ReferenceOps):
    """Query head h reads KV head h % nkv."""

    def attend(self, q, k, v, cache, *, scale, gate=None):
        rows, heads, dim = q.shape
        groups = heads // k.shape[1]
        turned = q.reshape(rows, groups, k.shape[1], dim).transpose(1, 2).reshape(rows, heads, dim)
        out = super().attend(turned, k, v, cache, scale=scale).reshape(rows, k.shape[1], groups, dim)
        out = out.transpose(1, 2).reshape(rows, heads, dim)
        return (out if gate is None else out * _squashed(gate).to(self.dtype)).reshape(rows, heads * dim)


class ConvolutionReversed(ReferenceOps):
    def conv_window(self, x, weight, cache):
        return super().conv_window(x, weight.flip(1), cache)


class DecayForgotten(ReferenceOps):
    def gated_delta(self, u, a, b, a_log, dt_bias, cache, shape):
        return super().gated_delta(u, a, b, a_log - 50, dt_bias, cache, shape)


class GateIsSigmoid(ReferenceOps):
    def gated_rms_norm(self, x, z, weight, eps):
        return (self.rms_norm(x, weight, eps).float() * _squashed(z)).to(self.dtype).flatten(1)


class LastBlockOfTheVocabularyMissing(ReferenceOps):
    def head(self, x, weight):
        logits = self._product(x, weight).float()
        logits[:, logits.shape[1] // 64 * 64 :] = 0
        return CpuLogits(logits)


class SidesSwapped(ReferenceOps):
    def concat(self, a, b):
        return super().concat(b, a)


class RowsTogether(ReferenceOps):
    """Products of several rows take another kernel than products of one: other bits."""

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] == 1:
            return F.linear(x, weight, bias)
        half = x.shape[1] // 2
        return F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:], bias)


class StateOfAllRows(ReferenceOps):
    def new_delta(self, shape):
        return _WholeState(shape, self.dtype)


class _WholeState(CpuDeltaCache):
    def commit(self, rows):
        if rows and self.raw is not None:
            self.replay = lambda rows: None
        super().commit(rows)


class SaysItWentBack(ReferenceOps):
    def new_delta(self, shape):
        return _SaysSo(shape, self.dtype)


class _SaysSo(CpuDeltaCache):
    def truncate(self, length):
        super().truncate(length)
        return True


class ResidualInPlace(ReferenceOps):
    def linear(self, x, weight, residual=None):
        return super().linear(x, weight) if residual is None else residual.add_(super().linear(x, weight))


class LayerNormWithoutTheMean(ReferenceOps):
    def layer_norm(self, x, weight, bias, eps):
        return (self.rms_norm(x, weight, eps).float() + bias).to(self.dtype)


class GeluWithTheErrorFunction(ReferenceOps):
    def gelu(self, x):
        return torch.cat([F.gelu(row[None].float()) for row in x]).to(self.dtype)


class PositionsOfThePass(ReferenceOps):
    def add_positions(self, x, table, position):
        return super().add_positions(x, table, 0)


class HeadsInReverse(ReferenceOps):
    def project_heads(self, x, weights):
        return super().project_heads(x, weights[::-1])


class EqualScoresToTheHigherId(ReferenceOps):
    def route(self, x, weight, routing, bias=None):
        turned = None if bias is None else bias.flip(0)
        ids, weights = super().route(x, weight.flip(0), routing, turned)
        return len(weight) - 1 - ids, weights


class ReadsEveryExpert(ReferenceOps):
    """Experts that nobody chose count with weight 0."""

    def moe(self, x, chosen, experts, residual, *, shared=None, shared_gate=None):
        ids, weights = chosen
        count = len(experts[0])
        every = torch.zeros(len(x), count).scatter(1, ids, weights)
        everybody = torch.arange(count).expand(len(x), -1)
        return super().moe(x, (everybody, every), experts, residual, shared=shared, shared_gate=shared_gate)


class MixesTheLastValues(ReferenceOps):
    def attend_latent(self, q, row, cache, *, scale, value_dims):
        return super().attend_latent(q, row, cache, scale=scale, value_dims=q.shape[2])[..., -value_dims:]


class HeadByPlace(ReferenceOps):
    """Logits of a pruned head stand at the places of its rows."""

    def pruned_head(self, x, rows):
        full = torch.full((len(x), rows.vocab_size), -torch.inf)
        values = torch.cat([self.head(x, part).array for part in rows.parts], dim=1)
        full[:, : values.shape[1]] = values
        return CpuLogits(full)


class WindowOfOneMore(ReferenceOps):
    def attend_from(self, q, k, v, cache, *, scale, first, causal=True):
        wider = [max(0, row - 1) for row in first]
        return super().attend_from(q, k, v, cache, scale=scale, first=wider, causal=causal)


class AppendedRowsStay(ReferenceOps):
    """What is appended is committed at once."""

    def append(self, k, v, cache):
        super().append(k, v, cache)
        cache.commit(len(k))


class WindowForgotten(ReferenceOps):
    def new_window(self, capacity, window, kv_heads, head_dim, sinks=None):
        return super().new_window(capacity, 0, kv_heads, head_dim, sinks)


class GegluWithSilu(ReferenceOps):
    def geglu(self, x, gate, up):
        return super().swiglu(x, gate, up)


class SinksForgotten(ReferenceOps):
    def new_window(self, capacity, window, kv_heads, head_dim, sinks=None):
        return super().new_window(capacity, window, kv_heads, head_dim)


class LengthsOfThePass(ReferenceOps):
    def scale_by_position(self, x, beta, length, position):
        return super().scale_by_position(x, beta, length, 0)


class GateWithoutALimit(ReferenceOps):
    def clamped_moe(self, x, router, routing, experts, biases, clamp, residual):
        unlimited = attrs.evolve(clamp, limit=1e6)
        return super().clamped_moe(x, router, routing, experts, biases, unlimited, residual)


class CachedScoresUnscaled(ReferenceOps):
    def attend_cached(self, q, cache, *, scale):
        return super().attend_cached(q, cache, scale=1.0)


BROKEN = {
    PlusInBfloat16: "O1",
    ForgetsTheResidual: "O2",
    GateAndUpSwapped: "O3",
    LayerNorm: "O4",
    OnePositionForAllRows: "O5",
    HeadsInterleaved: "O6",
    ConvolutionReversed: "O7",
    DecayForgotten: "O8",
    GateIsSigmoid: "O9",
    LastBlockOfTheVocabularyMissing: "O10",
    SidesSwapped: "O11",
    RowsTogether: "O12",
    StateOfAllRows: "O13",
    SaysItWentBack: "O14",
    ResidualInPlace: "O15",
    HeadsInReverse: "O16",
    EqualScoresToTheHigherId: "O17",
    ReadsEveryExpert: "O18",
    MixesTheLastValues: "O19",
    HeadByPlace: "O20",
    LayerNormWithoutTheMean: "O21",
    GeluWithTheErrorFunction: "O22",
    PositionsOfThePass: "O23",
    WindowOfOneMore: "O24",
    AppendedRowsStay: "O25",
    WindowForgotten: "O26",
    GegluWithSilu: "O27",
    SinksForgotten: "O28",
    LengthsOfThePass: "O29",
    GateWithoutALimit: "O30",
    CachedScoresUnscaled: "O31",
}
