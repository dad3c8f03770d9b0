"""A target without a checkpoint: the next character by counting what followed the last three in a text."""

import sys
import zlib
from collections import Counter, defaultdict

import numpy as np
import tokenizers

import specdec
import specdec.registry
from specdec import ForwardOutput, ForwardPass, ModelInfo, Parity, hookimpl
from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS, Snapshot, State
from specdec.errors import StateError
from specdec.text import Tokenizer

TEXT = "the cat sat on the mat. the dog sat on the log. the cat saw the dog, and the dog saw the cat. " * 3


class TextState(State):
    """A table needs the tokens themselves; another engine's state would hold its caches."""

    def __init__(self, capacity):
        self.tokens, self.provisional, self._capacity = [], None, capacity

    length = property(lambda self: len(self.tokens))
    capacity = property(lambda self: self._capacity)

    def nbytes(self):
        return 8 * len(self.tokens)


class Markov(ForwardPass):
    def __init__(self, text, order=3):
        self.order, self.counts = order, defaultdict(Counter)
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(sorted(set(text)))}))
        core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        core.decoder = tokenizers.decoders.Fuse()
        self.tokenizer = Tokenizer(core)
        ids = self.tokenizer.encode(text)
        for end, token in enumerate(ids):
            for start in range(max(0, end - order), end + 1):
                self.counts[tuple(ids[start:end])][token] += 1
        self.info = ModelInfo(
            family="markov",
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=1,
            gives_hidden=False,
            max_positions=100_000,
            max_rows=16,
            mtp_layers=0,
            parity=Parity.BITWISE,
            parity_reason="every row is looked up alone",
            backend="markov",
            dtype="float32",
            fingerprint=f"{zlib.crc32(text.encode()):08x}-{order}",
        )

    def row(self, tokens):
        """Logits after ``tokens``: the longest context that occurs decides, and no token is impossible."""
        tail = tuple(tokens[-self.order :])
        while tail not in self.counts:
            tail = tail[1:]
        weights = np.full(self.info.vocab_size, 0.01, np.float32)
        for token, count in self.counts[tail].items():
            weights[token] += count
        return np.log(weights / weights.sum())

    def new_state(self, capacity, needs=NO_NEEDS):
        self.check_new_state(capacity, needs)
        return TextState(capacity)

    def prefill(self, state, tokens):
        self.check_pass(state, tokens, decode=False)
        state.tokens += tokens
        state.provisional = None
        return ForwardOutput(rows=len(tokens))

    def decode(self, state, tokens):
        self.check_pass(state, tokens, decode=True)
        state.provisional = list(tokens)
        rows = [self.row([*state.tokens, *tokens[: t + 1]]) for t in range(len(tokens))]
        return ForwardOutput(rows=len(rows), logits=HostLogits(np.stack(rows)))

    def commit(self, state, rows):
        if state.provisional is None or not 0 <= rows <= len(state.provisional):
            raise StateError(f"commit({rows}) does not fit the last decode")
        state.tokens += state.provisional[:rows]
        state.provisional = None

    def rewind(self, state, length):
        self.check_rewind(state, length)
        del state.tokens[length:]
        state.provisional = None
        return length

    def snapshot(self, state):
        return Snapshot(state.length, state.capacity, {"tokens": np.array(state.tokens, np.int64)}, {})

    def restore(self, snapshot, needs=NO_NEEDS):
        state = self.new_state(snapshot.capacity, needs)
        state.tokens = [int(token) for token in snapshot.arrays["tokens"]]  # torch tensors after a file
        return state


@hookimpl
def specdec_forward_pass(target_config):
    return Markov(TEXT) if target_config.backend == "markov" else None


if __name__ == "__main__":  # without packaging: register this module, then ask for the target by its name
    specdec.registry.registry().register(sys.modules[__name__])
    lm = specdec.load(backend="markov", drafter="ngram", depth=4)
    result = lm.generate("the dog ", max_new_tokens=60)
    print(result.text, result.guarantee, result.stats.speculation(), *result.notices, sep="\n")
