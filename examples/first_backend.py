"""A backend in plain numpy, with every operation that dense and recurrent families need, one row at a time.

It is slow and short. Families with experts or latent attention need operations that it lacks, and raise an error.
"""

import sys

import numpy as np
import torch

import specdec.registry
from specdec import BackendSpec, Parity, hookimpl
from specdec.backends import Backend
from specdec.backends.arrays import ArrayHidden, HostLogits
from specdec.backends.ops import Cache, Capabilities, Ops


class NumpyHidden(ArrayHidden):
    """``[T, H]`` float32."""

    @staticmethod
    def concatenate(arrays):
        return np.concatenate(arrays)

    def rows(self):
        return self.array


class RowCache(Cache):
    """Keys and values of one attention layer. Entries from ``length`` on are provisional or stale."""

    def __init__(self, capacity, heads, dim):
        self.length = 0
        self.keys, self.values = (np.zeros((capacity, heads, dim), np.float32) for _ in range(2))

    def append(self, keys, values):
        end = self.length + len(keys)
        self.keys[self.length : end], self.values[self.length : end] = keys, values

    def commit(self, rows):
        self.length += rows

    def truncate(self, length):
        self.length = length
        return True

    def save(self):
        return {"keys": self.keys[: self.length].copy(), "values": self.values[: self.length].copy()}

    def load(self, arrays, length):
        self.keys[:length], self.values[:length], self.length = arrays["keys"], arrays["values"], length

    def nbytes(self):
        return self.keys.nbytes + self.values.nbytes


class DeltaCache(Cache):
    """The state of one delta-rule layer. Arrays are never written to, so a reference to one is a copy."""

    def __init__(self, shape):
        self.length = 0
        self.state = np.zeros((shape.value_heads, shape.key_dim, shape.value_dim), np.float32)
        self.window = np.zeros((shape.kernel - 1, shape.channels), np.float32)  # the last rows, oldest first
        self.raw, self.after = self.window, []  # of the last pass: window and rows; the state after each row
        self._marks = {0: (self.state, self.window)}

    def commit(self, rows):
        if rows:
            self.state, self.window = self.after[rows - 1], self.raw[rows : rows + len(self.window)].copy()
            self.length += rows
        self.after = []

    def mark(self):
        self._marks[self.length] = self.state, self.window

    def marks(self):
        return sorted({*self._marks, self.length})

    def truncate(self, length):
        if length not in self.marks():
            return False
        if length != self.length:
            self.state, self.window = self._marks[length]
            self._marks = {at: kept for at, kept in self._marks.items() if at <= length}
            self.length = length
        return True

    def save(self):
        return {"state": self.state, "window": self.window}

    def load(self, arrays, length):
        self.state, self.window, self.length = np.array(arrays["state"]), np.array(arrays["window"]), length

    def nbytes(self):
        return sum(state.nbytes + window.nbytes for state, window in [(self.state, self.window), *self._marks.values()])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6))


class NumpyOps(Ops):
    """See ``specdec.backends.ops.Ops`` for what each operation computes."""

    hidden_type = NumpyHidden

    def __init__(self):
        self.capabilities = Capabilities(
            kernels=f"numpy {np.__version__}",
            parity=Parity.BITWISE,
            parity_reason="every row is multiplied alone, in prompts too",
            max_rows=16,
            slow=True,
        )

    # weights come as torch tensors, and sessions are saved as such

    def weight(self, tensor):
        return self.from_host(tensor)

    def vector(self, tensor, *, plus=0.0):
        return self.from_host(tensor) + np.float32(plus)

    def to_host(self, array):
        return torch.tensor(array)

    def from_host(self, tensor):
        return tensor.float().numpy()

    # a product of many rows may sum in a different order than a product of one, so rows are multiplied one by one

    def linear(self, x, weight, residual=None):
        y = np.stack([weight @ row for row in x.copy()])
        return y if residual is None else y + residual

    def project(self, x, weights, biases=()):
        products = [self.linear(x, weight) for weight in weights]
        biases = biases or [None] * len(weights)
        return tuple(y if bias is None else y + bias for y, bias in zip(products, biases, strict=True))

    def embed(self, table, tokens):
        return table[list(tokens)]

    def swiglu(self, x, gate, up):
        return silu(self.linear(x, gate)) * self.linear(x, up)

    def rms_norm(self, x, weight, eps):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight

    def concat(self, a, b):
        return np.concatenate([a, b], axis=-1)

    def head(self, x, weight):
        return HostLogits(self.linear(x, weight))

    # attention

    def new_kv(self, capacity, kv_heads, head_dim):
        return RowCache(capacity, kv_heads, head_dim)

    def norm_rope(self, x, weight, eps, rope, position):
        if weight is not None:
            x = self.rms_norm(x, weight, eps)
        half = len(rope.inv_freq)
        angles = np.arange(position, position + len(x))[:, None, None] * np.array(rope.inv_freq)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)

    def attend(self, q, k, v, cache, *, scale, gate=None):
        cache.append(k, v)
        rows, heads, dim = q.shape
        out = np.empty((rows, heads, dim), np.float32)
        for t in range(rows):
            end = cache.length + t + 1  # causal: the committed rows, and this pass's up to row t
            groups = q[t].reshape(k.shape[1], -1, dim)  # the query heads of each key-value head
            scores = np.einsum("ngd,snd->ngs", groups, cache.keys[:end]) * np.float32(scale)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[t] = np.einsum("ngs,snd->ngd", weights, cache.values[:end]).reshape(heads, dim)
        return (out if gate is None else out * sigmoid(gate)).reshape(rows, -1)

    # the gated delta rule, token by token

    def new_delta(self, shape):
        return DeltaCache(shape)

    def conv_window(self, x, weight, cache):
        cache.raw = np.concatenate([cache.window, x])
        return silu(sum(cache.raw[tap : tap + len(x)] * weight[:, tap] for tap in range(weight.shape[1])))

    def gated_delta(self, u, a, b, a_log, dt_bias, cache, shape):
        keys = shape.key_heads * shape.key_dim
        repeats = shape.value_heads // shape.key_heads
        decay, beta = np.exp(-np.exp(a_log) * np.logaddexp(a + dt_bias, np.float32(0))), sigmoid(b)
        state, out, cache.after = cache.state, [], []
        for t, row in enumerate(u):
            q, k = (
                unit(part.reshape(shape.key_heads, -1)).repeat(repeats, axis=0)
                for part in (row[:keys], row[keys : 2 * keys])
            )
            v = row[2 * keys :].reshape(shape.value_heads, -1)
            state = state * decay[t, :, None, None]
            delta = beta[t, :, None] * (v - np.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * delta[:, None]
            cache.after.append(state)
            out.append(np.einsum("hkv,hk->hv", state, q * np.float32(shape.key_dim**-0.5)))
        return np.stack(out)

    def gated_rms_norm(self, x, z, weight, eps):
        return (self.rms_norm(x, weight, eps) * silu(z)).reshape(len(x), -1)


class NumpyBackend(Backend):
    """numpy computes in float32 here."""

    name = "numpy"
    device = "cpu"
    dtypes = ("float32",)

    def ops(self, dtype):
        return NumpyOps()


@hookimpl
def specdec_backends():
    return [BackendSpec(name="numpy", factory=lambda config: NumpyBackend(), help="plain numpy, for reading")]


if __name__ == "__main__":  # without packaging: register this module, then ask for the backend by its name
    specdec.registry.registry().register(sys.modules[__name__])
    lm = specdec.load("demo", backend="numpy", depth=2)
    result = lm.generate("def add(a, b):", max_new_tokens=24)
    print(result.text, result.guarantee, lm.info.parity, *result.notices, sep="\n")
