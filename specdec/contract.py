"""The contracts between the engine and its plugins. Imports no tensor library.

Axes, everywhere: T rows (token positions in one pass), K drafted tokens, V vocabulary, H hidden, L layers.

The invariant that all of them share: *n* tokens are committed, every state holds tokens ``0..n-2``, and token
``n-1`` is **pending**: it rides as row 0 of the next verification pass, so no pass is spent on it alone.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload

import attrs

from specdec.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]


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
    """The output follows the same law as plain decoding."""
    BOUNDED = "bounded"
    """Every committed token is within a stated bound of the target's best."""
    HEURISTIC = "heuristic"
    """No bound; quality is argued by measurement."""


class Need(enum.Enum):
    """What a drafter needs from its target; checked when the pipeline is built."""

    HIDDEN = "hidden"
    """``ForwardOutput.hidden``: the hidden state after the final norm, per row."""
    MTP = "mtp"
    """``prefill_mtp`` and ``decode_mtp``: the checkpoint has a multi-token-prediction head."""


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What a loaded target is; everything a drafter or the engine may ask before the first pass."""

    family: str  # the name its ModelSpec was registered under, such as "qwen3_5"
    vocab_size: int
    hidden_size: int
    max_positions: int  # tokens a sequence may hold, prompt included
    mtp_layers: int  # 0: no MTP head
    max_rows: int  # rows that one decode() takes, the pending token included
    parity: Parity
    parity_reason: str = ""  # how the parity was established, or why it was downgraded
    backend: str = ""
    device: str = ""
    dtype: str = ""
    dtype_reason: str = ""  # why this dtype, when it was chosen automatically
    kernels: str = ""  # which kernels run, and why when they are a fallback
    fingerprint: str = ""  # of config and weights; a saved session fits only the model it came from


class Logits(abc.ABC):
    """The target's logits for T rows, left on the device until somebody asks. Ties go to the lowest id."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """T."""

    @abc.abstractmethod
    def argmax(self) -> list[int]:
        """The best token id of every row, the lowest id where several are equal."""

    @abc.abstractmethod
    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and float32 logits of the k best tokens of every row, best first, equal logits by ascending id."""

    @abc.abstractmethod
    def gather(self, tokens: Sequence[int]) -> list[float]:
        """The logit of ``tokens[t]`` in row t, for the first ``len(tokens)`` rows."""

    def logsumexp(self) -> list[float]:
        """``log(sum_v exp(logits[t, v]))`` of every row: with the best logit, the probability of the best token."""
        import numpy as np

        rows = self.rows().astype(np.float64)
        best = rows.max(axis=1, keepdims=True)
        sums: list[float] = (best[:, 0] + np.log(np.exp(rows - best).sum(axis=1))).tolist()
        return sums

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        """``argmax_v(scale * logits[row, v] + G(seed, position, v))`` on the device, where the backend can.

        G is the noise of ``specdec.sampling.gumbel``. None: not offered, the caller computes it from ``rows()``.
        """
        return None

    @abc.abstractmethod
    def rows(self) -> Float32:
        """All logits on the host, ``[T, V]`` float32. The costly one: a verifier asks only when it must."""


class Hidden(abc.ABC):
    """Hidden states of T rows, opaque: whoever holds them can slice, join and hand them back, nothing else."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """T."""

    @abc.abstractmethod
    def __getitem__(self, rows: slice) -> Hidden:
        """A contiguous run of rows."""

    @abc.abstractmethod
    def join(self, others: Sequence[Hidden]) -> Hidden:
        """These rows followed by those of ``others``."""


class DraftHead(abc.ABC):
    """An output head cut to a draft vocabulary: opaque, but for the ids. Made by ``ForwardPass.draft_head``."""

    @property
    @abc.abstractmethod
    def tokens(self) -> Sequence[int]:
        """The token ids that can be drafted, ascending."""

    @abc.abstractmethod
    def extended(self, tokens: Sequence[int]) -> DraftHead:
        """A head with these ids too; the rows that it has already are shared, not copied.

        Raises: PromptError for ids outside the vocabulary.
        """


@attrs.frozen
class ForwardOutput:
    """What one pass gives: logits of its rows (None where none were asked for) and their hidden states."""

    logits: Logits | None
    hidden: Hidden | None

    def need_logits(self) -> Logits:
        """The logits of a pass that must have them."""
        if self.logits is None:
            raise AssertionError("this pass was asked for no logits")
        return self.logits

    def need_hidden(self) -> Hidden:
        """The hidden states of a pass that must have them."""
        if self.hidden is None:
            raise AssertionError("this pass gives no hidden states")
        return self.hidden


class State(abc.ABC):
    """One sequence's caches. Everything in it is committed or provisional; ``commit`` moves the line."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Committed tokens that the state holds."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Tokens that fit, provisional ones included."""

    @property
    def mtp_length(self) -> int:
        """True (hidden, token) pairs that the MTP cache holds; 0 without a head."""
        return 0

    @property
    def last_hidden(self) -> Hidden | None:
        """The hidden state of the last committed token: what the next true pair starts from."""
        return None

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that the state occupies."""


class ForwardPass(abc.ABC):
    """A causal language model on a device; weights are shared, state is per sequence.

    The engine calls ``prefill`` for all prompt tokens but the last, then cycles of ``decode`` and ``commit``.
    """

    info: ModelInfo
    runs_greedy_cycles: bool = False
    """Whether ``greedy_cycles`` may give something else than None."""
    notices: Sequence[str] = ()
    """What a user should know about the load of another engine's model, one sentence each; results carry them."""

    @abc.abstractmethod
    def new_state(self, capacity: int) -> State:
        """An empty state for up to ``capacity`` tokens.

        Raises: PromptError when ``capacity`` is above ``info.max_positions``.
        """

    @abc.abstractmethod
    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        """Append a prompt chunk of any length, committed at once; gives hidden states and no logits.

        Any chunking leaves the same state: the same bits where parity is BITWISE, for chunks of up to ``info.max_rows``
        tokens at least. A backend that computes longer chunks with other bits says so in ``info.parity_reason``.
        """

    @abc.abstractmethod
    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        """Run 1..max_rows rows after the committed prefix; provisional until ``commit``.

        Calling it again before ``commit`` starts over from the committed prefix.
        """

    @abc.abstractmethod
    def commit(self, state: State, rows: int) -> None:
        """Keep the first ``rows`` (0..T) rows of the last ``decode``; the rest never happened.

        Raises: StateError when there is nothing to commit or ``rows`` is above T.
        """

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:  # noqa: B027
        """Append true pairs to the MTP cache: ``tokens[t]`` is the token after the one whose hidden is ``hidden[t]``.

        Drops provisional entries first. The default does nothing: a model without a head has no such cache.
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

        ``provisional=False``: the pairs are true ones; they replace provisional entries and stay.
        ``provisional=True``: a chained step; the entries go with the next true pair.
        ``head``: compute the logits of its ids only. They are still addressed by token id; every other id has -inf.
        A caller passes only heads that ``draft_head`` of this object made, so a pass without them may leave it out.
        """
        raise no_mtp_head(self.info)

    def draft_greedy(self, state: State, tokens: Sequence[int], hidden: Hidden, depth: int) -> tuple[int, ...] | None:
        """Draft ``depth`` >= 1 tokens greedily in one call, where a pass can do that faster than step by step.

        The same tokens, the same errors and the same state afterwards as ``decode_mtp`` with the true pairs and then
        ``depth - 1`` chained steps, each fed with the argmax of the logits before it and the hidden state of its row.
        None: not offered, for these arguments or at all, and nothing has changed; the caller goes step by step.
        """
        return None

    def greedy_cycles(
        self, state: State, start: GreedyStart, *, stop_tokens: Sequence[int], limit: int
    ) -> GreedyCycles | None:
        """Whole greedy cycles that the device runs without asking the host, where this pass can do that.

        From here on the state belongs to the cycles, until their ``close``. Generation ends on the device after the
        first of ``stop_tokens`` and after ``limit`` >= 1 tokens; later cycles emit nothing and change nothing.
        Tokens, state and drafts are those of ``decode_mtp``, ``decode`` and ``commit`` one after the other.
        None: not offered, for these arguments or at all, and nothing has changed.
        """
        return None

    def draft_head(self, tokens: Sequence[int]) -> DraftHead:
        """The head that ``decode_mtp`` drafts with, cut to ``tokens``: its rows, gathered once into their own memory.

        Source: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856, section 3.
        Raises: UnsupportedError where a pass offers none; PromptError for ids outside the vocabulary.
        """
        raise UnsupportedError(
            f"this {self.info.family} target offers no pruned draft head", try_="the drafter without a draft vocabulary"
        )

    @abc.abstractmethod
    def rewind(self, state: State, length: int) -> int:
        """Go back to at most ``length`` tokens and return the length reached.

        Attention caches reach ``length`` or one token less; a recurrent state reaches the nearest point it kept (0 at
        worst). The caller prefills the tokens in between again.

        Raises: StateError when ``length`` is above the committed length or negative.
        """

    @abc.abstractmethod
    def snapshot(self, state: State) -> Snapshot:
        """A copy of everything committed; independent of what happens to ``state`` later."""

    @abc.abstractmethod
    def restore(self, snapshot: Snapshot) -> State:
        """A new state equal, bit for bit, to the one that ``snapshot`` was taken from."""

    def to_host(self, array: Any) -> Any:
        """An array of a ``Snapshot`` in host memory, of the same dtype, as a torch tensor or as ``torch.as_tensor``
        takes it. The default gives it as it is."""
        return array

    def from_host(self, tensor: Any) -> Any:
        """A torch tensor in host memory as ``restore`` takes it: the inverse of ``to_host``."""
        return tensor


@attrs.frozen
class GreedyStart:
    """What greedy drafting with an MTP head takes to go on from here.

    Attributes:
        tokens: the tokens after those of ``hidden``; the last one is the pending token.
        hidden: hidden states of the committed positions whose true pairs the MTP cache does not hold yet, at least one.
        head: the head to draft with; None for the full one.
    """

    tokens: tuple[int, ...]
    hidden: Hidden
    head: DraftHead | None = None


@attrs.frozen
class GreedyCycle:
    """What one cycle of ``GreedyCycles`` did.

    Attributes:
        drafted: the K draft tokens; -1 from where the drafting head's logits were not finite.
        accepted: how many of them the target would have chosen itself.
        emitted: the tokens that it committed: accepted ones and the next token, cut where generation ended.
    """

    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


class GreedyCycles(abc.ABC):
    """Cycles in flight: each one drafts greedily, verifies, decides and commits on the device.

    The host may submit a cycle before it has collected the one before, and so hides its own time.
    """

    @abc.abstractmethod
    def submit(self, depth: int) -> None:
        """Start a cycle of ``depth`` >= 1 draft tokens behind those in flight.

        The caller sees to the room: every cycle in flight may append ``depth + 1`` rows.
        """

    @abc.abstractmethod
    def collect(self) -> GreedyCycle:
        """The outcome of the oldest cycle in flight, when it is there.

        Raises: ContractError when the target's logits are not finite.
        """

    @abc.abstractmethod
    def keep(self, tokens: int) -> None:
        """Take back all but the first ``tokens`` >= 1 tokens that the last collected cycle emitted.

        Only while no cycle is in flight. The last token that stays becomes the pending token.
        """

    @abc.abstractmethod
    def close(self) -> Hidden:
        """Give the state back; ``hidden`` of a ``GreedyStart`` that goes on from here. No cycle may be in flight."""


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
        f"this {info.family} model has no MTP head",
        try_='drafter.name = "ngram", or a checkpoint that kept its mtp.* tensors',
    )


class LogitsProcessor(abc.ABC):
    """A user's own step between logits and choice (a mask, a bias). One object per sequence.

    It is called for every row with *that row's* history, drafted tokens included, in any order: rows of a rejected
    draft are followed by shorter histories. What it returns may depend on its arguments only; anything it keeps
    between calls is a cache.
    """

    @abc.abstractmethod
    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        """New logits ``[V]`` for the token after ``history``; ``-inf`` forbids a token."""

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        """How many leading tokens of a draft could be chosen at all; the rest is cut before verification."""
        return len(draft)


@attrs.frozen(kw_only=True)
class Sampling:
    """How the next token is chosen from the target's logits.

    One order for plain decoding and for every verified row (``specdec.sampling``): bias, penalties over the row's own
    history, bans and processors, temperature, top-k, top-p, min-p. Temperature 0 is greedy.
    """

    temperature: float = 0.0
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of the most probable tokens that reaches this probability
    min_p: float = 0.0  # keep tokens of at least this share of the best one's probability
    repetition_penalty: float = 1.0  # over prompt and output; Keskar et al. 2019, arXiv:1909.05858, section 4.1
    presence_penalty: float = 0.0  # nats off every token that the output already has
    frequency_penalty: float = 0.0  # nats off per occurrence in the output
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)  # nats added by token id
    banned: tuple[int, ...] = ()  # token ids never chosen
    min_new_tokens: int = 0  # end tokens are banned before this many were generated
    end_tokens: tuple[int, ...] = ()  # what min_new_tokens bans
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None  # also report log-probabilities: of the chosen token, and of so many best ones
    seed: int = 0


class DraftNoise(enum.Enum):
    """The randomness a drafter should draw with at temperature above 0."""

    COUPLED = "coupled"
    """The noise that will decide the position too: drafts agree with the decision far more often."""
    INDEPENDENT = "independent"
    """Noise of its own, and the draft's law handed over with it: what a ratio test needs."""


class Context(Sequence[int]):
    """A read-only view of the committed tokens; the last one is pending. Slices are lists.

    Attributes:
        sampling: how tokens are chosen.
        generated_from: position of the first generated token (the prompt's length).
        cycle: number of the cycle, unique within a sequence; part of the noise keys of ratio tests.
        draft_noise: what the verifier wants drafts to be drawn with.
    """

    __slots__ = ("_tokens", "cycle", "draft_noise", "generated_from", "sampling")

    def __init__(
        self,
        tokens: list[int],
        sampling: Sampling | None = None,
        *,
        generated_from: int = 0,
        cycle: int = 0,
        draft_noise: DraftNoise = DraftNoise.COUPLED,
    ) -> None:
        self._tokens = tokens
        self.sampling = sampling if sampling is not None else Sampling()
        self.generated_from = generated_from
        self.cycle = cycle
        self.draft_noise = draft_noise

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


@attrs.frozen
class Draft:
    """K drafted tokens. ``probs`` is None for a point mass, else the law each was drawn from, ``[K, V]`` float32."""

    tokens: tuple[int, ...] = ()
    probs: Float32 | None = None


EMPTY_DRAFT = Draft()


@attrs.frozen
class Deviation:
    """How far the committed tokens of a verdict are from the target's argmax."""

    count: int = 0  # tokens that are not the argmax although the sampling is greedy
    largest_gap: float = 0.0  # nats between the argmax logit and the token's


NO_DEVIATION = Deviation()


@attrs.frozen
class Verdict:
    """A decision: the first ``accepted`` draft tokens stay, ``next_token`` follows them (the new pending token).

    ``deviations`` names the accepted tokens that an exact verifier would not have chosen: lookahead position and gap in
    nats to the best logit. By position, so that a block which is cut keeps only its own.
    """

    accepted: int
    next_token: int
    deviations: tuple[tuple[int, float], ...] = ()

    @property
    def deviation(self) -> Deviation:
        """The deviations in two numbers."""
        if not self.deviations:
            return NO_DEVIATION
        return Deviation(len(self.deviations), max(gap for _, gap in self.deviations))

    def cut(self, kept: int, last: int) -> Verdict:
        """The verdict when only the first ``kept`` of its tokens stay: the last of them, ``last``, becomes pending."""
        inside = tuple(entry for entry in self.deviations if entry[0] < kept)
        return Verdict(kept - 1, last, inside)


class Drafter(abc.ABC):
    """Guesses the next tokens of one sequence. One object per sequence; heavy parts live in its spec's ``prepare``.

    The engine reports every token once and in order: ``prefill`` for prompt chunks, ``observe`` after each cycle.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()

    def prefill(self, context: Context, output: ForwardOutput) -> None:  # noqa: B027
        """See a prompt chunk that the target has just taken in: the last ``len(output.hidden)`` tokens of ``context``.

        Here, and only here, ``context`` has no pending token: it is what the target's state holds.
        """

    @abc.abstractmethod
    def propose(self, context: Context, depth: int) -> Draft:
        """At most ``depth`` tokens to follow ``context``; an empty draft means "no opinion"."""

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:  # noqa: B027
        """See what became of the draft.

        ``output`` has a row per verified token (pending, x_1..x_K), of which the first ``verdict.accepted + 1`` were
        committed; ``context`` ends with the accepted tokens and ``verdict.next_token``.
        """

    def hand_over(self, context: Context) -> GreedyStart | None:
        """What the target needs to draft as this drafter would, all by itself (``ForwardPass.greedy_cycles``).

        A drafter that says so drafts greedily with the target's MTP head, and does nothing but that, under the settings
        in ``context``. It is not called again before ``take_back``. None, the default: ``propose`` goes on being asked.
        """
        return None

    def take_back(self, hidden: Hidden) -> None:  # noqa: B027
        """Go on after cycles that the target ran: ``hidden`` is what ``GreedyCycles.close`` gave."""

    def rewind(self, length: int) -> None:  # noqa: B027
        """Forget everything after the first ``length`` tokens that the target's state holds."""

    def settle(self, context: Context) -> None:  # noqa: B027
        """Move what must survive a snapshot into the target's state; called before one is taken.

        A drafter built later over the restored state, after seeing the same tokens, must propose the same drafts.
        """

    def snapshot(self) -> DrafterSnapshot | None:
        """A copy of the drafter's own state that is costly to build again, after ``settle``; None where there is none.

        It comes back as ``DrafterEnv.saved`` when a session is forked or loaded. A drafter must also work without it.
        """
        return None

    def report(self) -> Mapping[str, Any]:
        """What a result should tell about this drafter (``stats.draft``): plain JSON data since it was built."""
        return {}


class Verifier(abc.ABC):
    """Decides how much of a draft survives. Stateless and pure: randomness and history are arguments."""

    guarantee: ClassVar[Guarantee]
    bound: float | None = None
    """What a BOUNDED verifier promises per token: the largest gap, in nats, to the best logit."""
    draft_noise: ClassVar[DraftNoise] = DraftNoise.COUPLED
    greedy_is_argmax: ClassVar[bool] = False
    """Whether, at temperature 0 and without filters, it accepts what equals the target's argmax and goes on with that:
    the one decision that a device may take by itself."""

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
    """One cycle as observers and policies see it; seconds are wall-clock."""

    position: int  # committed tokens before the cycle
    depth: int  # tokens asked for
    offered: int  # tokens drafted, after the engine cut what cannot be used
    accepted: int
    emitted: tuple[int, ...]  # committed by this cycle
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    whole: bool = False  # run by the device, which does not tell phases apart: verify_seconds has all of its time
    drafted: tuple[int, ...] = ()  # the draft as verified


@attrs.define(kw_only=True)
class Stats:
    """Counters of a generation so far: the engine's own, to be read. Lists run over lookahead positions.

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
        """Why the depth is 0 at present; what a result says when no token was drafted for that reason."""
        return ""

    @abc.abstractmethod
    def next_depth(self, stats: Stats) -> int:
        """The depth of the next cycle; 0 is plain decoding. The engine caps it by rows, room and budget."""

    def record(self, cycle: CycleRecord) -> None:  # noqa: B027
        """See what the last cycle did and cost."""


# --- what plugins register -----------------------------------------------------------------------------------------


@attrs.frozen
class NoConfig:
    """The configuration of a plugin that takes none."""


@attrs.frozen(kw_only=True)
class DrafterEnv:
    """What a drafter is built with: the target, this sequence's state, and what ``prepare`` returned.

    ``saved`` is what ``Drafter.snapshot`` of a drafter of the same name gave, when a session was forked or loaded.
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
        costs: what a pass and a draft cost here, ``(file=None) -> CostTable``: the table in ``file``, or the
            kept or newly measured one; only for a depth policy. Raises: UnsupportedError where there is none.
        notices: sentences that the user should read; append to it.
    """

    target: ForwardPass
    tokenizer: Any = None
    load: Callable[[Any], tuple[ForwardPass, Any]] | None = None
    costs: Callable[..., Any] | None = None
    notices: list[str] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class DrafterSpec:
    """``factory(config, env)`` makes one drafter per sequence; ``prepare(config, env)`` runs once per pipeline.

    ``prepare`` gets a ``PrepareEnv``; what it returns is every drafter's ``env.shared``.
    """

    name: str
    factory: Callable[[Any, DrafterEnv], Drafter]
    config: type = NoConfig
    needs: frozenset[Need] = frozenset()
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
    """``factory(config)`` makes one policy per generation, or ``factory(config, shared)`` where there is a ``prepare``.

    ``prepare(config, env)`` runs once per pipeline, when the drafter is ready. What it returns may carry knowledge from
    one generation to the next; a policy reads it when it is made.
    """

    name: str
    factory: Callable[..., DepthPolicy]
    config: type = NoConfig
    prepare: Callable[[Any, PrepareEnv], Any] | None = None
    help: str = ""


@attrs.frozen(kw_only=True)
class BackendSpec:
    """``factory(config)`` makes a backend; ``available()`` gives None, or why this machine cannot run it.

    ``preference()`` is what ``target.backend = "auto"`` goes by: a number where the hardware that the backend is for is
    here, usable or not, else None. The largest number is taken first (``cpu`` has 0); where that backend is not
    available, the load says so and goes on with the next.
    """

    name: str
    factory: Callable[[Any], Any]  # specdec.backends.Backend; Any keeps tensor libraries out of this file
    config: type = NoConfig
    available: Callable[[], str | None] = lambda: None
    preference: Callable[[], int | None] = lambda: None
    help: str = ""


class FamilyConfig(Protocol):
    """What specdec reads of any family's config, whatever else the family keeps in it."""

    @property
    def vocab_size(self) -> int:
        """Token ids, V."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def layers(self) -> int:
        """Decoder layers, the MTP head's left out."""

    @property
    def max_positions(self) -> int:
        """Tokens that a sequence may hold."""

    @property
    def mtp_layers(self) -> int:
        """Layers of the MTP head; 0 without one."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""

    @property
    def expert_share(self) -> float:
        """The share of routed experts that one row reads; 1.0 for dense models."""

    def state_bytes(self, width: int, *, mtp: bool = True) -> tuple[int, int]:
        """Bytes of state per token, the MTP head's included with ``mtp``, and per sequence.

        ``width`` is the bytes of an activation.
        """


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A family: which ``model_type`` values it reads and what builds it over a backend's ops."""

    name: str
    model_types: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], FamilyConfig]  # config.json -> the family's own attrs class
    build: Callable[[Any, Any], Any]  # (family config, specdec.models.weights.Weights) -> DecoderModel
    help: str = ""
