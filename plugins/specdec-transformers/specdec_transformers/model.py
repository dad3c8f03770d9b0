"""Runs passes of a transformers model over a cache, and rolls back rejected rows."""

from __future__ import annotations

import enum
import inspect
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from specdec.errors import UnsupportedError
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from specdec_transformers import caches


class Rollback(enum.Enum):
    """How rejected rows of a pass are rolled back, cheapest first."""

    CUT = "the rows are cut off its cache"
    """Attention and convolution windows only."""
    REPLAY = "a copy of the cache is kept during a pass, and kept rows of a pass that is not kept whole run again"
    """Recurrent states, and cache classes unknown to this plugin."""
    STEP = "it continues a text by one token per pass only, so a pass of several rows is several passes"
    RECOMPUTE = "it has no cache that can be taken back, so every pass computes the whole text again"


@attrs.frozen
class Pass:
    """The result of a pass: logits ``[T, V]`` if requested, hidden states ``[T, (1 + n) H]``, the new cache.

    The hidden states after the final norm come first, followed by those at n layer boundaries.
    """

    logits: Tensor | None
    hidden: Tensor | None
    cache: Any


class Model:
    """A transformers model for causal language modelling, called for one sequence at a time.

    Attributes:
        network: the PreTrainedModel.
        rollback: how rows are rolled back; the probe (``probe.py``) confirms it or chooses the next one.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.rollback = Rollback.CUT
        self.vocab_size = 0
        parameters = inspect.signature(network.forward).parameters
        self._cache_name = next((name for name in ("past_key_values", "cache_params") if name in parameters), None)
        self._can_skip = "logits_to_keep" in parameters
        self._own_cache = not network._supports_default_dynamic_cache()
        self._calling = False  # whether a pass of this object runs: the network may have other users
        self._hidden: Tensor | None = None
        self._boundaries: dict[int, Tensor | None] = {}  # those requested by the current call
        self._lock = threading.Lock()  # the hook below writes to this object
        decoder = network.get_decoder()
        self._decoder = decoder if decoder is not None and decoder is not network else network.base_model
        if self._decoder is not network:
            self._decoder.register_forward_hook(self._keep_hidden)
        layers = getattr(self._decoder, "layers", None)
        self.layers = 0  # layers whose boundaries are available
        if isinstance(layers, torch.nn.ModuleList):
            self.layers = len(layers)
            for number, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._boundary_hook(number), with_kwargs=True)
            layers[-1].register_forward_hook(self._keep_last_boundary)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.network.device
        return device

    @property
    def has_cache(self) -> bool:
        """Whether ``forward`` takes a cache at all."""
        return self._cache_name is not None

    def _keep_hidden(self, module: Any, arguments: Any, output: Any) -> None:
        if not self._calling:
            return
        # the decoder's output is the hidden state of every row after the final norm, whichever logits are requested
        self._hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)

    def _boundary_hook(self, number: int) -> Any:
        """A hook on layer ``number``, whose input is the residual stream at that boundary."""

        def keep(module: Any, arguments: Any, named: Any) -> None:
            if number in self._boundaries:
                self._boundaries[number] = named["hidden_states"] if "hidden_states" in named else arguments[0]

        return keep

    def _keep_last_boundary(self, module: Any, arguments: Any, output: Any) -> None:
        if self.layers in self._boundaries:
            self._boundaries[self.layers] = output[0] if isinstance(output, tuple) else output

    def new_cache(self) -> Any:
        """An empty cache, or None if the model makes its own."""
        if self._own_cache:  # such a model makes its own class of cache when given none
            return None
        return DynamicCache(config=self.network.config.get_text_config(decoder=True))

    @torch.no_grad()
    def _take_hidden(self) -> Tensor | None:
        """What ``_keep_hidden`` kept since the last call; None if the decoder did not run."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def _call(
        self, tokens: Sequence[int], logits: bool, boundaries: Sequence[int], **arguments: Any
    ) -> tuple[Any, Tensor | None, Tensor | None]:
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        if self._can_skip:
            arguments["logits_to_keep"] = 0 if logits else 1
        with self._lock:
            self._take_hidden()
            self._boundaries = dict.fromkeys(boundaries)
            self._calling = True
            try:
                output = self.network(input_ids=ids, return_dict=True, **arguments)
            finally:
                self._calling = False
            hidden = self._take_hidden()
            beside, self._boundaries = [self._boundaries[number] for number in boundaries], {}
        if boundaries:
            if hidden is None or any(part is None for part in beside):
                raise UnsupportedError(f"{type(self.network).__name__} did not run the layers whose states are wanted")
            hidden = torch.cat([hidden, *(part for part in beside if part is not None)], dim=-1)
        rows = output.logits[0] if logits else None
        return output, rows, None if hidden is None else hidden[0]

    def whole(self, tokens: Sequence[int], *, logits: bool = True, boundaries: Sequence[int] = ()) -> Pass:
        """A pass over a whole text, without a cache."""
        arguments = {} if self._cache_name is None else {"use_cache": False}
        _, rows, hidden = self._call(tokens, logits, boundaries, **arguments)
        return Pass(rows, hidden, None)

    def extend(self, cache: Any, tokens: Sequence[int], *, logits: bool = True, boundaries: Sequence[int] = ()) -> Pass:
        """A pass over ``tokens`` after those in ``cache`` (None: empty); changes and returns ``cache``.

        Raises: UnsupportedError when the model returns no cache.
        """
        if self._cache_name is None:
            raise UnsupportedError(f"{type(self.network).__name__} takes no cache")
        if self.rollback is Rollback.STEP and cache is not None and len(tokens) > 1:
            steps = [self.extend(cache, [token], logits=logits, boundaries=boundaries) for token in tokens]
            return Pass(
                _joined([step.logits for step in steps]), _joined([step.hidden for step in steps]), steps[-1].cache
            )
        cache = self.new_cache() if cache is None else cache
        output, rows, hidden = self._call(tokens, logits, boundaries, use_cache=True, **{self._cache_name: cache})
        after = getattr(output, self._cache_name, None)
        after = cache if after is None else after
        if not isinstance(after, Cache):
            raise UnsupportedError(f"{type(self.network).__name__} keeps its state as {type(after).__name__}")
        return Pass(rows, hidden, after)


def one_line(error: Exception) -> str:
    """A third-party error with its class, as one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


class Text:
    """The state of one sequence: its cache, or all of its tokens if no cache is used."""

    def __init__(self, model: Model, boundaries: Sequence[int] = ()) -> None:
        self.model = model
        self.boundaries = boundaries
        self.length = 0
        self.cache: Any = None
        self.tokens: list[int] = []  # with Rollback.RECOMPUTE only
        self._pending: tuple[list[int], Any] | None = None  # tokens and cache of the uncommitted pass

    @property
    def pending(self) -> int | None:
        """Rows of the pass that waits for ``commit``; None if there is none."""
        return None if self._pending is None else len(self._pending[0])

    def drop(self) -> None:
        """Discard the pass that waits for ``commit``."""
        self._pending = None

    def run(self, tokens: Sequence[int], *, logits: bool, keep: bool) -> Pass:
        """A pass after the committed tokens, committed at once (``keep``) or waiting for ``commit``.

        The committed cache is not changed, so that a pass that fails half-way leaves it intact.
        """
        model, tokens = self.model, list(tokens)
        self._pending = None
        if model.rollback is Rollback.RECOMPUTE:
            whole = model.whole([*self.tokens, *tokens], logits=logits, boundaries=self.boundaries)
            made = Pass(
                None if whole.logits is None else whole.logits[-len(tokens) :],
                None if whole.hidden is None else whole.hidden[-len(tokens) :],
                None,
            )
        else:
            cache = None if self.cache is None else caches.copied(self.cache)
            if cache is None and model.rollback is Rollback.CUT:
                cache = model.new_cache()
            if cache is not None:
                caches.record_past(cache, on=not keep and model.rollback is Rollback.CUT)
            made = model.extend(cache, tokens, logits=logits, boundaries=self.boundaries)
        if keep:
            self._advance(tokens, made.cache)
        else:
            self._pending = list(tokens), made.cache
        return made

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the waiting pass."""
        assert self._pending is not None
        (tokens, cache), self._pending = self._pending, None
        if rows == 0:
            return
        kept = tokens[:rows]
        if self.model.rollback is Rollback.CUT:
            caches.cut(cache, len(tokens) - rows)
        elif self.model.rollback is not Rollback.RECOMPUTE and rows < len(tokens):
            before = None if self.cache is None else caches.copied(self.cache)
            cache = self.model.extend(before, kept, logits=False).cache
        self._advance(kept, cache)

    def _advance(self, tokens: list[int], cache: Any) -> None:
        self.cache = cache
        self.length += len(tokens)
        if self.model.rollback is Rollback.RECOMPUTE:
            self.tokens += tokens

    def nbytes(self) -> int:
        """Bytes of the committed cache, or of the tokens."""
        return 8 * len(self.tokens) + (0 if self.cache is None else caches.nbytes(self.cache))
