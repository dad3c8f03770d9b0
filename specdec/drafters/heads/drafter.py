"""Draft with a trained head: follow the target's hidden states, and keep the head's own keys and values.

The ledger of pairs (hidden states of token i, token i + 1) is the one of the MTP head (``MtpPairs``). The drafter owns
it: the target knows nothing of the head. Pairs wait, as the target gave them, until a draft needs them, so that a head
costs next to nothing while nothing is drafted. True pairs replace whatever a draft has appended.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from specdec.backends.ops import Array, Cache, HeadRows
from specdec.backends.passes import Passes
from specdec.config import between, one_of
from specdec.contract import (
    EMPTY_DRAFT,
    IDLE_ROWS,
    WAITING_ROWS,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DraftHead,
    ForwardOutput,
    Hidden,
    Logits,
    MtpPairs,
    PrepareEnv,
    Verdict,
)
from specdec.drafters.gate import DraftGate, Drawing
from specdec.drafters.heads.layout import Layout
from specdec.drafters.heads.network import States, Surroundings
from specdec.drafters.heads.refiner import Block, Refiner
from specdec.drafters.logits import MappedLogits
from specdec.drafters.pruned_head import AUTO, FULL, HeadChoice, PreparedVocabulary, PrunedHeadConfig
from specdec.errors import ConfigError, PromptError
from specdec.models.causal_lm import PrunedHead, weights_of
from specdec.text import common_prefix

FEED_ROWS = 512  # pairs per pass of the head; bounds the memory of a long prompt
UNREAD = 64  # rows that are read at once: one by one they take a multiple of the time
MARKS = 8  # ends of prompts whose last hidden state is kept, for a rewind to there


@attrs.frozen(kw_only=True)
class HeadConfig(PrunedHeadConfig):
    """Which head, what its config leaves open, and when to stop a draft early."""

    example: ClassVar[Mapping[str, Any]] = {"model": "random"}

    model: str = "demo"  # a folder, a hub id, "demo" (the embedded model's), or "random" (untrained, for measurements)
    revision: str | None = None  # branch, tag or commit of a hub id
    layer_ids: str = attrs.field(default="auto", validator=one_of("auto", "boundary", "layer"))  # what they number
    fed_back: str = attrs.field(default="auto", validator=one_of("auto", "state", "normed"))  # into a chained step
    min_acceptance: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # least that a DSpark head predicts


@attrs.frozen(kw_only=True, eq=False, slots=False)
class PreparedHead:
    """A loaded head, shared by all sequences."""

    layout: Layout
    network: Any
    around: Surroundings
    fingerprint: str
    name: str
    vocabulary: PreparedVocabulary | None = None
    passes: Passes | None  # None: op by op, for layers with a window and for blocks
    masked: Any = None  # the fused state of a masked row
    refiner: Refiner | None = None  # of a block head

    def logits(self, rows: Array, choice: Any = None) -> Logits:
        """Logits of normed rows ``[T, H_d]``, addressed by the target's ids. ``choice``: a ``PrunedHead``."""
        if choice is not None:
            return self.around.ops.pruned_head(rows, choice.rows[0])
        return self.mapped(self.around.ops.head(rows, self.around.lm_head))

    def mapped(self, logits: Logits) -> Logits:
        """Logits over the head's vocabulary, addressed by the target's ids."""
        return logits if self.ids is None else MappedLogits(logits, self.ids, self.around.vocab_size)

    @functools.cached_property
    def ids(self) -> Any:
        """The target's ids of the head's vocabulary, ascending, int64; None if they are the same."""
        return None if self.layout.tokens is None else np.array(self.layout.tokens, np.int64)


def prepared_vocabulary(
    config: HeadConfig, layout: Layout, around: Surroundings, env: PrepareEnv, network: Any, refiner: Refiner | None
) -> Any:
    """The rows of the output head for ``drafter.vocabulary``; None for the full head.

    Raises: ConfigError for a file if the head has a reduced vocabulary of its own.
    """
    reads_all = layout.tokens is not None or refiner is not None
    if reads_all and config.vocabulary in (AUTO, FULL):
        return None
    if layout.tokens is not None:
        raise ConfigError(
            f"drafter.vocabulary is given, and the head has a vocabulary of its own ({layout.draft_vocab} tokens)",
            try_="the setting left out",
        )

    def pruned(tokens: Sequence[int], rows: Sequence[HeadRows] = ()) -> PrunedHead:
        if min(tokens) < 0 or max(tokens) >= around.vocab_size:
            raise PromptError(f"a token id is outside the vocabulary (0 to {around.vocab_size - 1})")
        return PrunedHead(around, [around.ops.head_rows(around.lm_head, tokens, *rows)], pruned)

    return config.prepare(env, pruned, weights_of(network), layout.geometry.hidden)


class HeadDrafter(Drafter):
    """What drafting with any head has in common: the ledger of states, feeding, rewinding and saving."""

    def __init__(self, config: HeadConfig, env: DrafterEnv) -> None:
        self._head: PreparedHead = env.shared
        self._around = self._head.around
        self._target = env.target
        self._rows = env.target.info.max_rows
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._choice: HeadChoice | None = None
        if self._head.vocabulary is not None:
            self._choice = HeadChoice(self._head.vocabulary, config)
        self._pairs = MtpPairs()
        self._unread: list[States] = []  # of the last cycles without a draft, which the ledger lacks: a row each
        self._before = 0  # tokens before those rows
        self._fed_tokens: list[int] = []  # of the pairs in the caches
        self._unsure = False  # whether those are to be compared with the context
        self._ends: list[int] = []  # lengths of which the ledger keeps the last state
        self._dead_ends = self._replayed = 0
        self._rebuilt = ""
        self._caches: list[Cache] = self._head.network.new_caches(env.state.capacity + 2 * self._rows)
        self._pass = None if self._head.passes is None else self._head.passes.bind(self._caches)
        if env.saved is not None:
            self._rebuilt = self._restore(env.saved)

    # --- following the target ----------------------------------------------------------------------------------------

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self._read(context)
        self._add(context, [(output.hidden, output.boundaries)], output.rows, len(context) - output.rows)
        self._feed()
        if self._pairs.length == len(context):
            self._ends = [*self._ends[1 - MARKS :], len(context)]
            self._pairs.mark(self._ends)

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        unread, states, rows = self._unread, (output.hidden, output.boundaries), verdict.accepted + 1
        before = len(context) - 1 - rows
        if output.rows > 1 or len(unread) == UNREAD or before != self._before + len(unread):
            self._read(context)
            self._before = before
        if output.rows > 1:
            self._add(context, [states], rows, before)
        else:
            self._unread.append(states)

    def _read(self, context: Context) -> None:
        """Add the unread rows to the ledger; precedes every other use of it."""
        self._compare(context)
        unread, self._unread = self._unread, []
        self._add(context, unread, len(unread), self._before)

    def _add(self, context: Context, outputs: Sequence[States], rows: int, before: int) -> None:
        """Add the states of ``rows`` committed rows that follow ``before`` tokens, unless the ledger has a gap."""
        skipped = self._pairs.length - before
        if 0 <= skipped < rows:
            states = self._around.states(outputs)
            if skipped or rows < len(states):
                states = states[skipped:rows]
            self._pairs.add(context[before + skipped : before + rows], states, before + skipped)
            if self._pairs.waiting > IDLE_ROWS:
                self._feed()

    def _compare(self, context: Context) -> None:
        """After a rewind or a restore: drop pairs whose tokens are others than those that came."""
        if self._unsure and len(context) > self._pairs.fed:
            self._unsure = False
            shared = common_prefix(self._fed_tokens, context[1 : self._pairs.fed + 1])
            if shared < self._pairs.fed:
                self._cut(shared)

    def _catch_up(self, context: Context) -> bool:
        """Whether all committed positions are known. What the engine did not report is computed again."""
        self._read(context)
        committed = len(context) - 1
        if self._pairs.length < committed:
            state = self._target.new_state(committed, self._around.needs)
            for at in range(0, committed, FEED_ROWS):
                chunk = context[at : min(at + FEED_ROWS, committed)]
                output = self._target.prefill(state, chunk)
                self._add(context, [(output.hidden, output.boundaries)], len(chunk), at)
            self._replayed += committed
        return self._ready()

    def _ready(self) -> bool:
        """Whether there is something to draft from: a pair that waits for the pending token."""
        return bool(self._pairs.waiting)

    def _feed(self) -> None:
        """Run the waiting pairs through the head, except the last one, whose token is pending."""
        if self._pairs.waiting > 1:
            tokens, states = self._pairs.take()
            for at in range(0, len(tokens), FEED_ROWS):
                self._run_true(tokens[at : at + FEED_ROWS], self._fused(states[at : at + FEED_ROWS]))

    def _fused(self, states: Hidden) -> Array:
        return self._head.network.fused(self._around.array(states))

    def _waiting(self, context: Context) -> tuple[list[int], Array]:
        """Remove the waiting pairs: their tokens, the pending one last, and their fused states."""
        tokens, states = self._pairs.take(context[-1])
        return tokens, self._fused(states)

    def _run_true(self, tokens: Sequence[int], hidden: Array, masked: int = 0) -> Array:
        """A pass over true pairs, which stay in the caches, and ``masked`` rows, which do not."""
        self._truncate()
        whole = [*tokens, *[self._head.layout.mask_token or 0] * masked]
        x = self._run(whole, hidden, len(tokens), self._pairs.fed + len(tokens))
        self._pairs.fed += len(tokens)
        self._fed_tokens += tokens
        return x

    def _run(self, tokens: Sequence[int], hidden: Array, kept: int, true: int) -> Array:
        """A pass of which ``kept`` rows stay in the caches; ``true`` entries are then true."""
        if self._pass is not None:
            x = self._pass.run(tokens, hidden)
            self._pass.commit(kept)
            return x
        around = self._around
        x = self._head.network(self._caches, around.ops.embed(around.embed_tokens, tokens), hidden, true)
        for cache in self._caches:
            cache.commit(kept)
        return x

    def _truncate(self) -> None:
        """Drop what drafts have appended."""
        for cache in self._caches:
            cache.truncate(self._pairs.fed)

    # --- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, context: Context, depth: int) -> Draft:
        if depth < 1 or not self._catch_up(context):
            return EMPTY_DRAFT
        choice = None if self._choice is None else self._choice.follow(context)
        drawing = Drawing(self._gate, context, reduced=choice is not None or self._head.layout.tokens is not None)
        self._draft(drawing, context, min(depth, self._rows), choice)
        self._dead_ends += drawing.dead_end
        return drawing.draft()

    @abc.abstractmethod
    def _draft(self, drawing: Drawing, context: Context, depth: int, choice: DraftHead | None) -> None:
        """Draw at most ``depth`` >= 1 tokens; at least one pair waits."""

    # --- going back --------------------------------------------------------------------------------------------------

    def rewind(self, length: int) -> None:
        self._cut(length)
        self._unsure = True
        if self._choice is not None:
            self._choice.forget()

    def _cut(self, length: int) -> None:
        del self._unread[max(0, length - self._before) :]
        if length < self._pairs.length:
            self._pairs.cut(length)
            self._ends = [end for end in self._ends if end <= length]
        del self._fed_tokens[self._pairs.fed :]
        self._truncate()

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        self._read(context)
        self._feed()
        self._truncate()
        if self._unsure or not self._pairs.length:
            return None
        ops = self._around.ops
        caches = enumerate(self._caches)
        arrays = {f"{i}.{name}": ops.to_host(a) for i, cache in caches for name, a in cache.save().items()}
        if self._pairs.last is not None:
            arrays["states"] = ops.to_host(self._around.array(self._pairs.last)).clone()
        return DrafterSnapshot({**arrays, "tokens": np.array(self._fed_tokens, np.int64)}, self._identity())

    def _identity(self) -> dict[str, int | str]:
        info = self._target.info
        names = {name: getattr(info, name) for name in ("fingerprint", "backend", "dtype")}
        needs = self._around.needs
        states = f"boundaries {list(needs.boundaries)}" + (" and the final state" if needs.final_hidden else "")
        return {"kind": self._head.layout.kind, "head": self._head.fingerprint, "states": states, **names}

    def _restore(self, saved: DrafterSnapshot) -> str:
        """Take over a saved state; why not if it is another head's or damaged."""
        for name, ours in self._identity().items():
            if saved.meta.get(name) != ours:
                return f"saved with another {name}: {saved.meta.get(name)!r}, this one has {ours!r}"
        ops = self._around.ops
        try:
            tokens = [int(token) for token in saved.arrays["tokens"].tolist()]
            for i, cache in enumerate(self._caches):
                own = {name: a for name, a in saved.arrays.items() if name.startswith(f"{i}.")}
                cache.load(
                    {name.split(".", 1)[1]: ops.from_host(torch.as_tensor(a)) for name, a in own.items()}, len(tokens)
                )
            self._pairs.fed = len(tokens)
            if "states" in saved.arrays:
                last = ops.from_host(torch.as_tensor(saved.arrays["states"]))
                self._pairs.resume(len(tokens), [], ops.hidden_type(last))
        except Exception as error:  # noqa: BLE001 - arrays of a damaged file; backends raise different errors
            self._pairs = MtpPairs()
            self._truncate()
            return f"the saved state cannot be restored: {type(error).__name__}: {error}"
        self._fed_tokens, self._unsure = tokens, True
        return ""

    def report(self) -> Mapping[str, Any]:
        return {
            "kind": self._head.layout.kind,
            "model": self._head.name,
            **({} if self._choice is None else self._choice.report()),
            **({"dead_ends": self._dead_ends} if self._dead_ends else {}),
            **({"replayed": self._replayed} if self._replayed else {}),
            **({"rebuilt": self._rebuilt} if self._rebuilt else {}),
            **self._gate.report(),
        }


class EagleDrafter(HeadDrafter):
    """EAGLE-3: the first token from the true pairs, each further one from a step over the head's own state."""

    def _draft(self, drawing: Drawing, context: Context, depth: int, choice: DraftHead | None) -> None:
        network = self._head.network
        if self._pairs.waiting > WAITING_ROWS:
            self._feed()
        x = self._run_true(*self._waiting(context))[-1:]
        while drawing.next(self._head.logits(network.logit_norm(x), choice)) is not None:
            if len(drawing.tokens) == depth:
                return
            fed = network.norm(x) if self._head.layout.norm_output else x
            x = self._run(drawing.tokens[-1:], fed, 1, self._pairs.fed)


class ParallelDrafter(HeadDrafter):
    """P-EAGLE: all tokens of a draft in one pass, from rows of the mask token after the true pairs."""

    def _draft(self, drawing: Drawing, context: Context, depth: int, choice: DraftHead | None) -> None:
        ops, network = self._around.ops, self._head.network
        if self._pairs.waiting + depth - 1 > self._rows:
            self._feed()
        tokens, fused = self._waiting(context)
        rows = ops.array(ops.hidden(fused).join([self._head.masked] * (depth - 1))) if depth > 1 else fused
        x = self._run_true(tokens, rows, depth - 1)
        drawing.rows(self._head.logits(network.logit_norm(x[-depth:]), choice))


class BlockDrafter(HeadDrafter):
    """DFlash and what refines it: a block of rows in one pass, over keys made of the target's states."""

    def _ready(self) -> bool:
        return True

    def _run(self, tokens: Sequence[int], hidden: Array, kept: int, true: int) -> Array:
        self._head.network.extend(self._caches, hidden)
        return hidden

    def _draft(self, drawing: Drawing, context: Context, depth: int, choice: DraftHead | None) -> None:
        head, around, layout = self._head, self._around, self._head.layout
        assert layout.mask_token is not None
        if self._pairs.waiting > WAITING_ROWS:
            self._feed()
        if self._pairs.waiting:
            self._run_true(*self._waiting(context))
        self._truncate()
        tokens = [context[-1], *[layout.mask_token] * (layout.block_size - 1)]
        rows = head.network(self._caches, around.ops.embed(around.embed_tokens, tokens))
        self._truncate()
        first = 0 if layout.from_anchor else 1
        rows = rows[first : first + depth]
        if choice is not None or head.refiner is None:  # no refiner knows a pruned vocabulary
            drawing.rows(head.logits(rows, choice))
            return
        hidden = around.ops.to_host(rows).float().numpy()
        logits = around.ops.head(rows, around.lm_head)
        steps = head.refiner.refine(Block(pending=context[-1], hidden=hidden, logits=logits, ids=head.ids))
        try:
            refined = next(steps)
            while (token := drawing.next(head.mapped(refined))) is not None and len(drawing.tokens) < len(hidden):
                refined = steps.send(token)
        except StopIteration:
            pass
        finally:
            steps.close()
