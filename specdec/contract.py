"""The contracts between specdec and its plugins: what a plugin's author implements. Imports no tensor library.

Axes: T rows (token positions in one pass), K drafted tokens, V vocabulary, H hidden, L layers.

All contracts share one invariant: *n* tokens are committed, every state holds tokens ``0..n-2``, and token ``n-1`` is
**pending**. The pending token is row 0 of the next verification pass, so no pass is spent on it alone.
"""

from __future__ import annotations

import abc
import enum
import numbers
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, overload

import attrs

from specdec.checking import between, checked_fields, each
from specdec.errors import PromptError, ShapeError, SpecdecError, StateError, UnsupportedError
from specdec.exchange import IDLE_ROWS as IDLE_ROWS
from specdec.exchange import WAITING_ROWS as WAITING_ROWS
from specdec.exchange import FamilyConfig as FamilyConfig
from specdec.exchange import Hidden as Hidden
from specdec.exchange import ModelSpec as ModelSpec
from specdec.exchange import MtpPairs as MtpPairs
from specdec.exchange import Seen as Seen
from specdec.exchange import SharedWeights as SharedWeights

if TYPE_CHECKING:
    from specdec.exchange import Float32 as Float32

R = TypeVar("R")


class Parity(enum.Enum):
    """What a backend promises about a row of a pass."""

    BITWISE = "bitwise"
    """The bits of a row depend on that row and the committed prefix only, never on the number of rows."""
    NUMERIC = "numeric"
    """Rows agree up to rounding; near-ties may fall differently."""


class Guarantee(enum.Enum):
    """What a verifier promises about the output, strongest first."""

    EXACT = "exact"
    """Same seed, same tokens as plain decoding (given BITWISE parity)."""
    DISTRIBUTION = "distribution"
    """The output has the same distribution as plain decoding."""
    BOUNDED = "bounded"
    """Every committed token is within a stated bound of the target's best."""
    HEURISTIC = "heuristic"
    """No bound; only measurements show the quality."""


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Facts about a loaded target, known before the first pass.

    Attributes:
        family: the name its ModelSpec was registered under, such as "qwen3_5".
        vocab_size: token ids, V.
        hidden_size: H.
        max_positions: tokens that a sequence may hold, prompt included.
        mtp_layers: 0 without an MTP head.
        mtp_reason: where the head was taken from if not from the weights, or why there is none.
        pass_weights: how many weights the matrices of a pass have, the output head's included; 0 if unknown.
        mtp_weights: the same for a draft step, without the output head.
        layers: decoder layers, whose boundaries ``Needs`` can name; 0 if the target gives no hidden states there.
        gives_hidden: whether the target gives the state after the final norm.
        max_rows: rows that one ``decode`` takes, the pending token included.
        batch_rows: rows that one pass of ``decode_batch`` takes; 0 if sequences run one after another.
        warms_by_rows: whether the first pass of each number of rows is slow (it is recorded, or compiles kernels).
        parity: what the target promises about a row.
        parity_reason: how the parity was established, or why it was downgraded.
        backend: the name that ``target.backend`` chose it by.
        device: a readable description.
        dtype: of its activations.
        dtype_reason: why this dtype, when it was chosen automatically.
        weights: formats that the matrices are computed in, with their counts.
        kernels: which kernels run, and why when they are a fallback.
        fingerprint: of config and weights; a saved session fits only the model it came from.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    mtp_layers: int
    mtp_reason: str = ""
    pass_weights: int = 0
    mtp_weights: int = 0
    layers: int = 0
    gives_hidden: bool = True
    max_rows: int
    batch_rows: int = 0
    warms_by_rows: bool = True
    parity: Parity
    parity_reason: str = ""
    backend: str = ""
    device: str = ""
    dtype: str = ""
    dtype_reason: str = ""
    weights: str = ""
    kernels: str = ""
    fingerprint: str = ""


def _ascending(boundaries: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(map(operator.index, boundaries))))


@attrs.frozen(kw_only=True)
class Needs:
    """What a drafter needs from its target besides tokens. What is not requested is neither computed nor kept.

    Boundary k of a model with L layers is the residual stream that enters layer k, before any norm: k = 0 is the output
    of the embedding, and k = L is the output of the last layer.

    Attributes:
        mtp: the checkpoint's multi-token-prediction head, and the pairs that feed it (``State.pairs``).
        final_hidden: ``ForwardOutput.hidden``, the hidden state after the final norm.
        boundaries: ``ForwardOutput.boundaries`` at these layer boundaries; sorted, without duplicates.
    """

    mtp: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    final_hidden: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    boundaries: tuple[int, ...] = attrs.field(default=(), converter=_ascending)

    @property
    def hidden(self) -> bool:
        """Whether any hidden state is requested."""
        return self.final_hidden or bool(self.boundaries)

    @property
    def tokens_only(self) -> bool:
        """Whether tokens are all that is needed, so that the drafter runs in any engine (``specdec.hosting``)."""
        return not self.mtp and not self.hidden

    def __or__(self, other: Needs) -> Needs:
        """The union: what serves both drafters."""
        return Needs(
            mtp=self.mtp or other.mtp,
            final_hidden=self.final_hidden or other.final_hidden,
            boundaries=self.boundaries + other.boundaries,
        )

    def unmet(self, info: ModelInfo) -> str | None:
        """What the target cannot give, as the end of "the drafter 'x' needs ..."; None if it gives everything."""
        if self.mtp and not info.mtp_layers:
            return f"an MTP head, and this {info.family} checkpoint has none{_because(info)}"
        if self.boundaries and not info.layers:
            return f"hidden states between layers, and this {info.family} target gives none"
        outside = [k for k in self.boundaries if not 0 <= k <= info.layers]
        if outside:
            return (
                f"the hidden states at layer boundary {outside[0]}, and this target has boundaries 0 to {info.layers}"
            )
        if self.final_hidden and not info.gives_hidden:
            return f"hidden states after the final norm, and this {info.family} target gives none"
        return None


NO_NEEDS = Needs()


class Logits(abc.ABC):
    """The target's logits for T rows, left on the device until they are read. Ties go to the lowest id."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """T."""

    @abc.abstractmethod
    def argmax(self) -> list[int]:
        """The best token id of every row, the lowest id where several are equal."""

    @abc.abstractmethod
    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and float32 logits of the k best tokens of every row, best first, equal logits by ascending id."""

    def logsumexp(self) -> list[float]:
        """``log(sum_v exp(logits[t, v]))`` of every row: with the best logit, the probability of the best token."""
        import numpy as np

        rows = self.rows().astype(np.float64)
        best = rows.max(axis=1, keepdims=True)
        sums: list[float] = (best[:, 0] + np.log(np.exp(rows - best).sum(axis=1))).tolist()
        return sums

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        """The tokens of these rows, chosen on the device by the backend's own deterministic sampler.

        A row's token depends on that row, the settings and the noise of its position only, so that plain decoding and
        verification agree. A row that the backend cannot decide has None, and the caller computes it from ``rows()``.
        Empty: the backend does not offer this.
        """
        return ()

    @abc.abstractmethod
    def rows(self) -> Float32:
        """All logits on the host, ``[T, V]`` float32. Costly: a verifier reads them only if it must."""


class DraftHead(abc.ABC):
    """An output head cut to a draft vocabulary, made by ``ForwardPass.draft_head``. Opaque except for the ids."""

    @property
    @abc.abstractmethod
    def tokens(self) -> Sequence[int]:
        """The token ids that can be drafted, ascending."""

    @abc.abstractmethod
    def extended(self, tokens: Sequence[int]) -> DraftHead:
        """A head with these ids as well; it shares the rows it already has.

        Raises: PromptError for ids outside the vocabulary.
        """


@attrs.frozen(kw_only=True)
class ForwardOutput:
    """What one pass gives.

    Attributes:
        rows: T, the number of tokens in the pass.
        logits: of all rows after ``decode``, of the last row after ``decode_mtp``; None after ``prefill``.
        hidden: states after the final norm if ``Needs.final_hidden``, else None; after ``decode_mtp``, the states that
            a chained step starts from.
        boundaries: the residual stream by layer boundary, for ``Needs.boundaries``.

    Hidden states have T rows.
    """

    rows: int
    logits: Logits | None = None
    hidden: Hidden | None = None
    boundaries: Mapping[int, Hidden] = attrs.field(factory=dict)

    def need_logits(self) -> Logits:
        """``logits``, of a pass that must have them."""
        if self.logits is None:
            raise AssertionError("this pass was asked for no logits")
        return self.logits

    def need_hidden(self) -> Hidden:
        """``hidden``, of a pass that must have it."""
        if self.hidden is None:
            raise AssertionError("this pass gives no hidden states")
        return self.hidden


class State(abc.ABC):
    """One sequence's caches. Their contents are committed or provisional; ``commit`` moves the line.

    Attributes:
        needs: what the state was made for.
        pairs: the ledger of MTP pairs if ``needs.mtp``, else None.
    """

    needs: Needs = NO_NEEDS
    pairs: MtpPairs | None = None

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Committed tokens that the state holds."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Tokens that fit, including provisional ones."""

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that the state occupies."""


class ForwardPass(abc.ABC):
    """A causal language model on a device; weights are shared, state is per sequence.

    The engine calls ``prefill`` for all prompt tokens but the last, then cycles of ``decode`` and ``commit``.
    """

    info: ModelInfo
    notices: Sequence[str] = ()
    """What a user should know about the load of another engine's model, one sentence each; results carry them."""
    tokenizer: Any = None
    """The ``specdec.text.Tokenizer`` of a target that has no checkpoint; None: it is in the folder ``target.model``."""

    @abc.abstractmethod
    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> State:
        """An empty state for up to ``capacity`` tokens, which gives and keeps what ``needs`` requests.

        Raises: PromptError if ``capacity`` is not 1 to ``info.max_positions``; UnsupportedError if the target
        cannot give what ``needs`` requests.
        """

    @abc.abstractmethod
    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        """Append a prompt chunk of any length, committed at once; gives no logits.

        Any chunking leaves the same state. With BITWISE parity it has the same bits, at least for chunks of up to
        ``info.max_rows`` tokens; a backend whose longer chunks have other bits says so in ``info.parity_reason``.
        If the state has ``pairs``, those of the chunk go through the MTP head (``prefill_mtp``); the last one waits.
        """

    @abc.abstractmethod
    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        """Run 1..max_rows rows after the committed prefix; provisional until ``commit``.

        Calling it again before ``commit`` starts over from the committed prefix.
        """

    def decode_batch(self, batch: Sequence[tuple[State, Sequence[int]]]) -> list[ForwardOutput]:
        """``decode`` of several states, each different from the others, with the same results and bits.

        All outputs are provisional until each state's own ``commit``. The default runs one after another. A target that
        shares a pass among them says so in ``info.batch_rows``.
        """
        return [self.decode(state, tokens) for state, tokens in batch]

    @abc.abstractmethod
    def commit(self, state: State, rows: int) -> None:
        """Keep the first ``rows`` (0..T) rows of the last ``decode``; the rest never happened.

        Raises: StateError when there is nothing to commit or ``rows`` is above T.
        """

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:  # noqa: B027
        """Append true pairs to the MTP cache: ``tokens[t]`` follows the token whose hidden state is ``hidden[t]``.

        Drops provisional entries first and advances ``state.pairs.fed``. The default does nothing, for models without a
        head.
        """

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        """One MTP pass over pairs; logits of the **last** row only, hidden states (after ``mtp.norm``) of all rows.

        ``provisional=False``: true pairs. They replace provisional entries, stay, and advance ``state.pairs.fed``.
        ``provisional=True``: a chained step. Its entries are dropped by the next true pair.
        ``head``: compute the logits of its ids only. They are still addressed by token id; all other ids have -inf.
        Only heads that ``draft_head`` of this object made are passed, so a target without them may omit the argument.
        """
        raise no_mtp_head(self.info)

    def feed_mtp(self, state: State) -> None:
        """Run the waiting pairs through the head, except the last one, whose token is pending."""
        pairs = state.pairs
        if pairs is not None and pairs.waiting > 1:
            self.prefill_mtp(state, *pairs.take())

    def draft_mtp(
        self,
        state: State,
        pending: int,
        depth: int,
        *,
        head: DraftHead | None = None,
        choose: Callable[[Logits, Sequence[int]], int | None] | None = None,
    ) -> tuple[int, ...]:
        """Draft up to ``depth`` tokens after ``pending`` with the MTP head.

        The waiting pairs go through the head in one pass, whose last row gives the first token. Each further
        token comes from a chained step over the token before it and the head's own output.

        Args:
            pending: the last committed token.
            head: a pruned head to draft with, as in ``decode_mtp``.
            choose: returns the next token, given a step's logits (one row) and the tokens drafted so far; None ends the
                draft. The default is the argmax.

        Returns an empty tuple if no position is committed yet.
        Raises: StateError if the state was made without ``Needs.mtp`` or has lost hidden states; UnsupportedError for a
        model without a head.
        """
        options: dict[str, Any] = {} if head is None else {"head": head}  # a target without such heads may not know it
        steps, output = self._mtp_steps(state, pending, depth, choose), None
        while True:
            try:
                tokens, hidden, provisional = steps.send(output)
            except StopIteration as end:
                drafted: tuple[int, ...] = end.value
                return drafted
            output = self.decode_mtp(state, tokens, hidden, provisional=provisional, **options)

    def draft_mtp_batch(self, drafts: Sequence[MtpDraft]) -> list[tuple[int, ...] | BaseException]:
        """``draft_mtp`` of several states, each different from the others, with the same results and bits.

        What one draft raises comes in its place. The default runs one after another.
        """
        return [draft.run() for draft in drafts]

    def _mtp_steps(
        self, state: State, pending: int, depth: int, choose: Callable[[Logits, Sequence[int]], int | None] | None
    ) -> Generator[tuple[Sequence[int], Hidden, bool], Any, tuple[int, ...]]:
        """A draft as a generator of the arguments of ``decode_mtp``, which is sent the outputs."""
        pairs = self._pairs_to_draft_from(state)
        if depth < 1 or not pairs.waiting:
            return ()
        if pairs.waiting > WAITING_ROWS:
            self.feed_mtp(state)
        output: ForwardOutput = yield (*pairs.take(pending), False)
        drafted: list[int] = []
        while True:
            logits = output.need_logits()
            token = logits.argmax()[0] if choose is None else choose(logits, drafted)
            if token is None:
                break
            drafted.append(token)
            if len(drafted) == depth:
                break
            output = yield [token], output.need_hidden()[-1:], True
        return tuple(drafted)

    def _pairs_to_draft_from(self, state: State) -> MtpPairs:
        if state.pairs is None:
            raise no_mtp_pairs(self.info)
        missing = state.length - state.pairs.length
        if missing:
            raise StateError(
                f"the MTP cache lacks {missing} positions, so it cannot draft",
                reason="the state was built without the drafter 'mtp', or after that had failed",
                try_="a new session with the same tokens",
            )
        return state.pairs

    def most_tokens(self, needs: Needs = NO_NEEDS) -> int | None:
        """Tokens of one new state that fit the memory of the device as it is now, 0 or more; None: it sets no limit.

        The default is None.
        """
        return None

    def draft_head(self, tokens: Sequence[int]) -> DraftHead:
        """The head that ``decode_mtp`` drafts with, cut to ``tokens``. Its rows are gathered once into memory.

        Source: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856, section 3.
        Raises: UnsupportedError if the target offers none; PromptError for ids outside the vocabulary.
        """
        raise UnsupportedError(
            f"this {self.info.family} target offers no pruned draft head", try_="the drafter without a draft vocabulary"
        )

    def shared_weights(self) -> SharedWeights:
        """The embedding and the output head, for trained draft heads that ship without their own.

        Raises: UnsupportedError if the target does not hand them out.
        """
        raise UnsupportedError(
            f"this {self.info.family} target does not hand out its embedding and output head, which a draft head needs",
            try_='drafter.name = "ngram", or a target whose shared_weights gives them',
        )

    @abc.abstractmethod
    def rewind(self, state: State, length: int) -> int:
        """Go back to at most ``length`` tokens and return the length reached.

        Attention caches reach ``length``, or one token less if the state gives hidden states, so that the last kept
        token's are given again; a recurrent state reaches the nearest point it has kept, at worst 0. The caller
        prefills the tokens in between again.

        Raises: StateError when ``length`` is above the committed length or negative.
        """

    @abc.abstractmethod
    def snapshot(self, state: State) -> Snapshot:
        """A copy of everything committed, independent of what happens to ``state`` later.

        A session's file keeps its arrays through ``to_host``, and gives them back through ``from_host``.
        """

    @abc.abstractmethod
    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> State:
        """A new state equal, bit for bit, to the one that ``snapshot`` was taken from, made for ``needs``.

        If ``needs.mtp`` requests pairs that the snapshot lacks, ``state.pairs`` is shorter than the state.
        """

    def to_host(self, array: Any) -> Any:
        """An array of a ``Snapshot`` in host memory, of the same dtype, as a torch tensor or as ``torch.as_tensor``
        takes it. The default gives it as it is."""
        return array

    def from_host(self, tensor: Any) -> Any:
        """A torch tensor in host memory as ``restore`` takes it: the inverse of ``to_host``."""
        return tensor

    # --- what the methods above can check their arguments with -----------------------------------------------------

    def check_new_state(self, capacity: int, needs: Needs) -> None:
        """Raises: as ``new_state``."""
        if not 1 <= capacity <= self.info.max_positions:
            raise PromptError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity}")
        if unmet := needs.unmet(self.info):
            raise UnsupportedError(f"a state is asked for {unmet}")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises: ShapeError if there are none; PromptError for an id outside the vocabulary."""
        if len(tokens) == 0:
            raise ShapeError("a pass takes at least one token, got none")
        if min(tokens) < 0 or max(tokens) >= self.info.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.info.vocab_size)
            raise PromptError(f"token id {wrong} is outside the vocabulary (0 to {self.info.vocab_size - 1})")

    def check_pass(self, state: State, tokens: Sequence[int], *, decode: bool) -> None:
        """Raises: as ``check_tokens``; ShapeError for too many rows of a ``decode``; StateError if they do not fit."""
        self.check_tokens(tokens)
        rows, held, room = len(tokens), state.length, state.capacity
        if decode and rows > self.info.max_rows:
            raise ShapeError(f"decode takes 1 to {self.info.max_rows} rows, got {rows}")
        if held + rows > room:
            raise StateError(f"the state holds {held} of {room} tokens; {rows} more do not fit")

    def check_rewind(self, state: State, length: int) -> None:
        """Raises: as ``rewind``."""
        if not 0 <= length <= state.length:
            raise StateError(f"rewind takes 0 to {state.length} tokens, got {length}")


@attrs.frozen
class DrafterSnapshot:
    """Saved state of a drafter: named arrays, as ``torch.as_tensor`` takes them, and what they belong to.

    A session's file gives them back as torch tensors in host memory.
    """

    arrays: Mapping[str, Any]
    meta: Mapping[str, int | str] = attrs.field(factory=dict)


@attrs.frozen
class Snapshot:
    """A saved state: named arrays of the backend plus plain metadata (what sessions write to disk)."""

    length: int
    capacity: int
    arrays: Mapping[str, Any]
    meta: Mapping[str, int]


def no_mtp_head(info: ModelInfo) -> UnsupportedError:
    """The error for an MTP pass on a model without a head."""
    return UnsupportedError(
        f"this {info.family} model has no MTP head{_because(info)}", try_=f'drafter.name = "ngram", or {OTHER_HEAD}'
    )


OTHER_HEAD = "target.mtp with a file or folder that holds its MTP head, if it was released with one"


def _because(info: ModelInfo) -> str:
    return f" ({info.mtp_reason})" if info.mtp_reason else ""


def no_mtp_pairs(info: ModelInfo) -> SpecdecError:
    """The error for drafting from a state without ``MtpPairs``."""
    if not info.mtp_layers:
        return no_mtp_head(info)
    return StateError("the state was made without Needs.mtp", try_="new_state(capacity, Needs(mtp=True))")


class LogitsProcessor(abc.ABC):
    """A step between logits and choice, such as a mask or a bias. One object per sequence.

    It is called for every row with *that row's* history, including drafted tokens, in any order: after a rejection the
    histories get shorter again. The result may depend on the arguments only; anything kept between calls is a cache.
    """

    @abc.abstractmethod
    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        """New logits ``[V]`` for the token after ``history``; ``-inf`` forbids a token."""

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        """How many leading draft tokens could be chosen at all, a count; the rest is cut before verification."""
        return len(draft)

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        """Tokens that spell what must follow ``history``, where only one text can; a draft for the drafter 'forced'.

        Other tokens may spell the same text, and the target decides which it prefers: a wrong answer costs speed only.
        """
        return ()


GREEDY_BELOW = 1e-6
"""Temperatures above 0 and below this are 0, greedy.

Gumbel noise of 32-bit uniforms spans 26 nats (``specdec.sampling.gumbel``), so a token more than ``26 * temperature``
below the best one is never chosen. At 1e-6 those are 2.6e-5 nats, the spacing of float32 numbers near 256: noise could
only decide between logits that differ by rounding. Far below, ``logit / temperature`` overflows a kernel's float32.
"""

_INT32 = 2**31 - 1
SEED = between(0, 2**63 - 1)
"""The validator of ``seed``, up to the largest TOML integer."""

BIASES = each(between(-1e6, 1e6))
"""The validator of ``logit_bias``. Within it, float64 keeps the bits of a logit; ``banned`` forbids a token."""


def _greedy_if_tiny(value: Any) -> Any:
    return 0.0 if isinstance(value, numbers.Real) and 0.0 < float(value) < GREEDY_BELOW else value


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class SamplingSettings:
    """What a configuration and the ``Sampling`` of a sequence have in common."""

    temperature: float = attrs.field(default=0.0, converter=_greedy_if_tiny, validator=between(0.0, 100.0))
    top_k: int = attrs.field(default=0, validator=between(0, _INT32))  # keep the k most probable tokens; 0 keeps all
    # keep the smallest set of the most probable tokens that reaches this probability; 0 would keep no token at all
    top_p: float = attrs.field(default=1.0, validator=between(1e-6, 1.0))
    min_p: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # keep this share of the best one's or more
    # over prompt and output; Keskar et al. 2019, arXiv:1909.05858, section 4.1
    repetition_penalty: float = attrs.field(default=1.0, validator=between(0.01, 100.0))
    presence_penalty: float = attrs.field(default=0.0, validator=between(-100.0, 100.0))  # nats off a generated token
    frequency_penalty: float = attrs.field(default=0.0, validator=between(-100.0, 100.0))  # nats off per occurrence
    banned: tuple[int, ...] = attrs.field(default=(), validator=each(between(0, _INT32)))  # token ids never chosen
    min_new_tokens: int = attrs.field(default=0, validator=between(0, _INT32))  # end tokens are banned until then
    # also report log-probabilities: of the chosen token and of this many best ones
    logprobs: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(0, _INT32)))


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class Sampling(SamplingSettings):
    """How the next token is chosen from the target's logits.

    One order for plain decoding and for every verified row (``specdec.sampling``): bias, penalties over the row's own
    history, bans and processors, temperature, top-k, top-p, min-p. Temperature 0 is greedy, and so is one below
    ``GREEDY_BELOW``, which is stored as 0.

    Raises: ConfigError for a value of the wrong type or out of range.
    """

    seed: int = attrs.field(default=0, validator=SEED)
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, validator=BIASES)  # nats added by token id
    end_tokens: tuple[int, ...] = attrs.field(default=(), validator=each(between(0, _INT32)))  # for min_new_tokens
    processors: tuple[LogitsProcessor, ...] = ()


class DraftNoise(enum.Enum):
    """The randomness a drafter should draw with at temperature above 0."""

    COUPLED = "coupled"
    """The same noise that decides the position, so that drafts agree with the decision far more often."""
    INDEPENDENT = "independent"
    """Separate noise, with the draft's distribution handed over: what a ratio test needs."""


def same_depth(drafter: str, depth: int) -> int:
    """``Context.depth_of`` where the depth is fixed."""
    return depth


@attrs.define(eq=False, repr=False)
class Context(Sequence[int]):
    """A view of the committed tokens, for reading; the last one is pending. Slices are lists.

    Attributes:
        sampling: how tokens are chosen.
        generated_from: position of the first generated token (the prompt's length).
        cycle: number of the cycle, unique within a sequence; part of the noise keys of ratio tests.
        draft_noise: the noise that the verifier wants drafts to be drawn with.
        depth_of: ``DepthPolicy.depth_of``, which a drafter made of several asks for the depth of each; where the depth
            is fixed, it is the one that ``propose`` got.
    """

    _tokens: list[int]
    sampling: Sampling = attrs.field(factory=Sampling)
    generated_from: int = attrs.field(default=0, kw_only=True)
    cycle: int = attrs.field(default=0, kw_only=True)
    draft_noise: DraftNoise = attrs.field(default=DraftNoise.COUPLED, kw_only=True)
    depth_of: Callable[[str, int], int] = attrs.field(default=same_depth, init=False)
    _seen: Seen | None = attrs.field(default=None, init=False)

    def seen(self) -> Seen:
        """The distinct tokens so far; counted once, and then only what is new."""
        seen = self._seen
        if seen is None or not seen.follows(self._tokens, self.generated_from):
            seen = Seen(self.generated_from)
            self._seen = seen
        seen.extend(self._tokens)
        return seen

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


@attrs.frozen(eq=False)
class Choosing:
    """What the tokens of the rows of one pass depend on, beside their logits.

    Attributes:
        drafted: the tokens after the committed ones; row r decides the token after the first ``first + r`` of them.
        context: the committed tokens, and how tokens are chosen, without processors.
        first: see above.
    """

    drafted: Sequence[int]
    context: Context
    first: int = 0

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return self.context.sampling


@attrs.frozen
class Draft:
    """K drafted tokens. ``probs`` ``[K, V]`` float32 are the distributions they were drawn from; None: point masses.

    ``drafter`` names the one of several drafters that made it, for a depth policy that prices them apart.
    """

    tokens: tuple[int, ...] = ()
    probs: Float32 | None = None
    drafter: str = ""


EMPTY_DRAFT = Draft()


@attrs.frozen
class Deviation:
    """How far the committed tokens of a generation are from the target's argmax."""

    count: int = 0  # tokens that are not the argmax although the sampling is greedy
    largest_gap: float = 0.0  # nats between the argmax logit and the token's


@attrs.frozen
class Verdict:
    """A decision: the first ``accepted`` draft tokens stay, and ``next_token``, the new pending token, follows them.

    ``deviations`` lists the accepted tokens that an exact verifier would not have chosen: their lookahead position and
    the gap to the best logit in nats.
    """

    accepted: int
    next_token: int
    deviations: tuple[tuple[int, float], ...] = ()

    def cut(self, kept: int, last: int) -> Verdict:
        """The verdict if only its first ``kept`` tokens stay; the last of them, ``last``, becomes pending."""
        inside = tuple(entry for entry in self.deviations if entry[0] < kept)
        return Verdict(kept - 1, last, inside)


@attrs.define(eq=False)
class PassRequest:
    """A pass that a cycle or a drafter leaves to the engine, which runs those of several sequences as one.

    In a generator, ``yield from PassRequest(model, state, tokens)`` stands for ``model.decode(state, tokens)``.

    Attributes:
        seconds: that the pass took, or this sequence's share of it; whoever runs it says so.
    """

    model: ForwardPass
    state: State
    tokens: Sequence[int]
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """How many passes of the model it takes, by which the time of shared ones is divided."""
        return 1

    def run(self) -> Any:
        """Run it in a pass of its own; returns the output, or what was raised."""
        started = perf_counter()
        try:
            return self._alone()
        except BaseException as error:  # noqa: BLE001 - the generator raises it
            return error
        finally:
            self.seconds = perf_counter() - started

    def _alone(self) -> Any:
        return self.model.decode(self.state, self.tokens)

    @classmethod
    def run_batch(cls, requests: Sequence[Self]) -> Sequence[Any]:
        """Run requests of this kind for one model as one; returns what ``run`` returns for each."""
        return requests[0].model.decode_batch([(request.state, request.tokens) for request in requests])

    def __iter__(self) -> Passes[Any]:
        output = None
        while output is None:
            output = yield self
        if isinstance(output, BaseException):
            raise output
        return output


@attrs.define(eq=False)
class MtpDraft(PassRequest):
    """A draft of the model's MTP head after the pending token, the only one of ``tokens``.

    ``yield from`` stands for ``model.draft_mtp`` with these arguments.
    """

    depth: int = attrs.field(kw_only=True)
    head: DraftHead | None = attrs.field(default=None, kw_only=True)
    choose: Callable[[Logits, Sequence[int]], int | None] | None = attrs.field(default=None, kw_only=True)

    @property
    def steps(self) -> int:
        return max(self.depth, 1)

    def _alone(self) -> tuple[int, ...]:
        return self.model.draft_mtp(self.state, self.tokens[0], self.depth, head=self.head, choose=self.choose)

    @classmethod
    def run_batch(cls, requests: Sequence[Self]) -> Sequence[Any]:
        return requests[0].model.draft_mtp_batch(requests)


Passes: TypeAlias = Generator[PassRequest, Any, R]
"""Work that stops for passes. It is sent the output of each, or what the pass raised; after None it asks again."""


def run_passes(work: Passes[R]) -> R:
    """Run the passes one by one; returns the result of the work."""
    output = None
    try:
        while True:
            output = work.send(output).run()
    except StopIteration as end:
        result: R = end.value
        return result


class Drafter(abc.ABC):
    """Guesses the next tokens of one sequence. One object per sequence; its spec's ``prepare`` holds the heavy parts.

    Tokens are reported once and in order: ``prefill`` for prompt chunks, ``observe`` after each cycle. Those that the
    state held when the drafter was made (of a session that was forked or loaded) are not reported. ``context`` always
    has all tokens, so a drafter catches up from it.
    """

    def prefill(self, context: Context, output: ForwardOutput) -> None:  # noqa: B027
        """See a prompt chunk that the target has just taken in: the last ``output.rows`` tokens of ``context``.

        Only here does ``context`` lack the pending token: it is what the target's state holds.
        """

    @abc.abstractmethod
    def propose(self, context: Context, depth: int) -> Draft:
        """At most ``depth`` tokens to follow ``context``; an empty draft means "no opinion"."""

    def drafting(self, context: Context, depth: int) -> Passes[Draft]:
        """``propose`` for an engine that runs several sequences at once.

        A drafter with a model of its own may leave the passes to the engine (``PassRequest``), and propose by
        ``run_passes(self.drafting(context, depth))``. The default proposes.
        """
        return self.propose(context, depth)
        yield

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:  # noqa: B027
        """See the outcome of the draft.

        ``output`` has a row per verified token (pending, x_1..x_K), of which the first ``verdict.accepted + 1`` were
        committed; ``context`` ends with the accepted tokens and ``verdict.next_token``.
        """

    def rewind(self, length: int) -> None:  # noqa: B027
        """Forget everything after the first ``length`` tokens in the target's state."""

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        """A copy of the drafter's own state that is costly to rebuild; None if there is none.

        It comes back as ``DrafterEnv.saved`` when a session is forked or loaded. A drafter must also work without it:
        it has then seen none of the tokens and reads them from ``context``.
        """
        return None

    def report(self) -> Mapping[str, Any]:
        """What a result reports about this drafter (``stats.draft``), as plain JSON data."""
        return {}


class Verifier(abc.ABC):
    """Decides how much of a draft survives. Stateless and pure: randomness and history are arguments."""

    guarantee: ClassVar[Guarantee]
    bound: float | None = None
    """For a BOUNDED verifier: the largest gap to the best logit, in nats, that a token may have."""
    draft_noise: ClassVar[DraftNoise] = DraftNoise.COUPLED

    @abc.abstractmethod
    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        """Accept a prefix of the draft and choose the token that follows it.

        Args:
            draft: K tokens.
            logits: K+1 rows; row k is conditioned on the committed tokens and x_1..x_k.
            context: the committed tokens, pending token last, with the sampling settings.
        Raises: ShapeError when there are not K+1 rows, the usual off-by-one.
        """


@attrs.frozen
class CycleRecord:
    """One cycle, as observers and policies see it. Seconds are wall-clock.

    Attributes:
        position: committed tokens before the cycle.
        depth: how many tokens the drafter was asked for: the policy's answer, limited to the rows of a pass, the room
            in the state and the tokens left to generate.
        offered: how many it drafted, after unusable ones were cut.
        accepted: how many of those the verifier accepted.
        emitted: the tokens that the cycle committed: the accepted ones and the next one, cut where generation ended.
        draft_seconds: the drafter's share.
        verify_seconds: the share of the target's pass and of the decision.
        commit_seconds: the rest.
        drafted: the draft that was verified, ``offered`` tokens.
        drafter: ``Draft.drafter`` of that draft.
    """

    position: int
    depth: int
    offered: int
    accepted: int
    emitted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    drafted: tuple[int, ...] = ()
    drafter: str = ""


@attrs.define(kw_only=True)
class Stats:
    """Read-only counters of a generation so far. Lists are indexed by lookahead position.

    ``offered[i]``: drafts that had a token at position i. ``reached[i]``: those whose earlier tokens were all
    accepted. ``accepted[i]``: those whose token i was accepted too.
    Conditional rate = accepted / reached; cumulative rate = accepted / offered.
    """

    cycles: int = 0
    tokens: int = 0
    offered: list[int] = attrs.field(factory=list)
    reached: list[int] = attrs.field(factory=list)
    accepted: list[int] = attrs.field(factory=list)

    def count(self, offered: int, accepted: int) -> None:
        """Count one draft of ``offered`` tokens of which ``accepted`` passed."""
        while len(self.offered) < offered:
            self.offered.append(0)
            self.reached.append(0)
            self.accepted.append(0)
        for position in range(offered):
            self.offered[position] += 1
            self.reached[position] += position <= accepted
            self.accepted[position] += position < accepted


class DepthPolicy(abc.ABC):
    """Chooses how many tokens to draft next. One object per sequence."""

    @property
    def reason(self) -> str:
        """Why the depth is 0 at present; empty otherwise. A result quotes it if nothing was drafted."""
        return ""

    @abc.abstractmethod
    def next_depth(self, stats: Stats) -> int:
        """The depth of the next cycle; 0 is plain decoding. It is capped by rows, room and budget."""

    def depth_of(self, drafter: str, depth: int) -> int:
        """The depth for one of several drafters, by name, in a cycle of at most ``depth``; 0: it is not asked."""
        return depth

    def record(self, cycle: CycleRecord) -> None:  # noqa: B027
        """See the result and the cost of the last cycle."""


# --- what plugins register -----------------------------------------------------------------------------------------


@attrs.frozen
class NoConfig:
    """The configuration of a plugin that has no options."""


@attrs.frozen(kw_only=True)
class DrafterEnv:
    """What a drafter is built with: the target, this sequence's state, and what ``prepare`` returned.

    ``saved`` is the ``Drafter.snapshot`` of a drafter of the same name, after a session was forked or loaded.
    """

    target: ForwardPass
    state: State
    shared: Any = None
    saved: DrafterSnapshot | None = None


@attrs.frozen(kw_only=True)
class PrepareEnv:
    """What ``prepare`` of a drafter or a depth policy may use, once per pipeline.

    Attributes:
        target: the loaded target.
        tokenizer: its tokenizer (``specdec.text.Tokenizer``); None where a target comes without one.
        load: loads a second model, ``TargetConfig -> (ForwardPass, tokenizer)``; its notices join the target's.
        costs: what a pass and a draft cost here, ``() -> CostTable``, kept or newly measured; only for a depth policy.
            Raises: UnsupportedError where there is none.
        notices: sentences for the user; append to it.
    """

    target: ForwardPass
    tokenizer: Any = None
    load: Callable[[Any], tuple[ForwardPass, Any]] | None = None
    costs: Callable[[], Any] | None = None
    notices: list[str] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class DrafterSpec:
    """``factory(config, env)`` makes one drafter per sequence; ``prepare(config, env)`` runs once per pipeline.

    ``prepare`` gets a ``PrepareEnv``; its result is every drafter's ``env.shared``. ``needs`` may be a function
    ``needs(config, shared)``, for a head whose checkpoint names the layers it reads.

    ``needs`` also decides in which other engines a drafter runs (``specdec.hosting``). Those give tokens, and call
    ``propose`` and ``rewind`` only: they skip calls, repeat them, and build several drafters for one sequence. So with
    ``Needs.tokens_only`` a draft is a function of the context's tokens and the drafter's configuration.
    """

    name: str
    factory: Callable[[Any, DrafterEnv], Drafter]
    config: type = NoConfig
    needs: Needs | Callable[[Any, Any], Needs] = NO_NEEDS
    prepare: Callable[[Any, PrepareEnv], Any] | None = None
    help: str = ""


@attrs.frozen(kw_only=True)
class VerifierSpec:
    """``factory(config)`` makes a verifier; it is shared by all sequences."""

    name: str
    factory: Callable[[Any], Verifier]
    config: type = NoConfig
    help: str = ""


@attrs.frozen(kw_only=True)
class ProcessorSpec:
    """``factory(config, env)`` makes one logits processor per sequence."""

    name: str
    factory: Callable[[Any, ProcessorEnv], LogitsProcessor]
    config: type = NoConfig
    help: str = ""


@attrs.frozen(kw_only=True)
class ProcessorEnv:
    """What a logits processor is built with: the tokenizer, the vocabulary and where generation starts."""

    tokenizer: Any  # specdec.text.Tokenizer
    vocab_size: int
    end_tokens: tuple[int, ...]
    generated_from: int


@attrs.frozen(kw_only=True)
class DepthPolicySpec:
    """``factory(config)`` makes one policy per generation, or ``factory(config, shared)`` if there is a ``prepare``.

    ``prepare(config, env)`` runs once per pipeline, when the drafter is ready. Its result may carry knowledge from one
    generation to the next; a policy reads it when it is made.
    """

    name: str
    factory: Callable[..., DepthPolicy]
    config: type = NoConfig
    prepare: Callable[[Any, PrepareEnv], Any] | None = None
    help: str = ""


@attrs.frozen(kw_only=True)
class BackendSpec:
    """``factory(config)`` makes a backend; ``available()`` gives None, or why this machine cannot run it.

    ``target.backend = "auto"`` goes by ``preference()``: a number if the backend's hardware is present, usable or not,
    else None. The largest number is tried first (``cpu`` has 0); if that backend is not available, the load says so and
    tries the next.
    """

    name: str
    factory: Callable[[Any], Any]  # specdec.backends.Backend; Any keeps tensor libraries out of this file
    config: type = NoConfig
    available: Callable[[], str | None] = lambda: None
    preference: Callable[[], int | None] = lambda: None
    help: str = ""
