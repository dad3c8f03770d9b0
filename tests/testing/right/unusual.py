"""Right plugins that are unusual: each keeps the contract in a way that a hasty check may take for a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from specdec import (
    Context,
    CycleRecord,
    DepthPolicy,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardOutput,
    Guarantee,
    Logits,
    LogitsProcessor,
    Needs,
    Parity,
    ProcessorSpec,
    Stats,
    Verdict,
    VerifierSpec,
)
from specdec.contract import NO_NEEDS, DraftNoise
from specdec.errors import UnsupportedError
from specdec.testing import TableModel
from specdec.testing.table_model import TableLogits
from specdec.verifiers.strict import StrictVerifier
from tests.testing.broken.drafters import Honest

CORRECT: dict[type[Any], str] = {}


def correct(joint: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its joint."""

    def enter(kind: type[Any]) -> type[Any]:
        CORRECT[kind] = joint
        return kind

    return enter


def spec(kind: type[Any]) -> Any:
    """The public spec of the plugin; of a target the target itself."""
    name = f"unusual-{kind.__name__}"
    match CORRECT[kind]:
        case "drafter":
            return DrafterSpec(name=name, factory=kind, needs=kind.needs, prepare=kind.prepare)
        case "verifier":
            return VerifierSpec(name=name, factory=kind)
        case "policy":
            return DepthPolicySpec(name=name, factory=kind, prepare=kind.prepare)
        case "processor":
            return ProcessorSpec(name=name, factory=kind)
    return kind()


# --- drafters ---------------------------------------------------------------------------------------------------------


class Plain(Drafter):
    """What the drafters below share."""

    needs: ClassVar[Needs] = NO_NEEDS
    prepare: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.env = env
        self.vocab = env.target.info.vocab_size

    def propose(self, context: Context, depth: int) -> Draft:
        return Draft((context[-1],) * depth)


@correct("drafter")
class Sometimes(Plain):
    """Drafts where the number of tokens is a multiple of three."""

    def propose(self, context: Context, depth: int) -> Draft:
        return Draft() if len(context) % 3 else super().propose(context, depth)


@correct("drafter")
class OneHotProbs(Plain):
    """Drafts one fixed token and gives point masses as probabilities, when drafts are to be independent."""

    def propose(self, context: Context, depth: int) -> Draft:
        tokens = (context[0],) * depth
        if context.draft_noise is DraftNoise.COUPLED or not depth:
            return Draft(tokens)
        return Draft(tokens, np.tile(np.eye(1, self.vocab, context[0], dtype=np.float32), (depth, 1)))


@correct("drafter")
class DeepNeeds(Plain):
    """Asks for everything that a target can give and looks at all of it."""

    needs: ClassVar[Needs] = Needs(mtp=True, final_hidden=True, boundaries=(0, 1), prompt_rows="last")
    largest = 0.0

    def look(self, output: ForwardOutput) -> None:
        for hidden in (output.need_hidden(), *output.boundaries.values()):
            self.largest = max(self.largest, float(abs(hidden.rows()).max()))

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self.look(output)

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        self.look(output)

    def propose(self, context: Context, depth: int) -> Draft:
        if not depth or self.env.state.pairs is None:
            return Draft()
        return Draft(self.env.target.draft_mtp(self.env.state, context[-1], depth))


@correct("drafter")
class EndsEarly(Honest):
    """Ends a draft where its distribution is flat, which it knows before it draws."""

    needs: ClassVar[Needs] = NO_NEEDS
    prepare: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(env)

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        before = (context[-1], *draft.tokens)
        kept = next((k for k in range(len(draft.tokens)) if before[k] % 3 == 2), len(draft.tokens))
        return Draft(draft.tokens[:kept], None if draft.probs is None or not kept else draft.probs[:kept])


@correct("drafter")
class EmptySnapshot(Plain):
    """Saves nothing and starts from the text again."""

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return DrafterSnapshot(arrays={})


@correct("drafter")
class LongReport(Plain):
    """Reports nested data with names of any alphabet."""

    def report(self) -> dict[str, Any]:
        return {"größen": {"tokens": 3, "none": None}, "list": [1, 2.5, "drei", True, []]}


# --- verifiers --------------------------------------------------------------------------------------------------------


@correct("verifier")
class AcceptsNothing(StrictVerifier):
    """Chooses the next token itself, always: plain decoding with a drafter beside it."""

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        verdict = super().verify(draft, logits, context)
        return Verdict(0, draft.tokens[0]) if verdict.accepted else verdict


@correct("verifier")
class GreedyOnly(StrictVerifier):
    """Exact where it decides, and refuses to sample."""

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if context.sampling.temperature > 0:
            raise UnsupportedError("this verifier decodes greedily", hint="set generation.temperature to 0")
        return super().verify(draft, logits, context)


@correct("verifier")
class ModestlyExact(StrictVerifier):
    """Exact, and promises no more than the distribution."""

    guarantee: ClassVar[Guarantee] = Guarantee.DISTRIBUTION


# --- targets ----------------------------------------------------------------------------------------------------------


class Table(TableModel):
    """What the targets below share: a chain of 40 tokens, made without arguments."""

    vocabulary, options = 40, dict[str, Any]()

    def __init__(self) -> None:
        super().__init__(self.table(), tilt=0.5, **self.options)

    def table(self) -> Any:
        return np.random.default_rng(3).dirichlet(np.full(self.vocabulary, 0.5), self.vocabulary)


@correct("target")
class EightPositions(Table):
    """Holds eight tokens."""

    options: ClassVar[dict[str, Any]] = {"max_positions": 8}


@correct("target")
class OneToken(Table):
    """Has one token in its vocabulary."""

    vocabulary = 1


@correct("target")
class TwoRows(Table):
    """Passes of two rows at most."""

    options: ClassVar[dict[str, Any]] = {"max_rows": 2}


@correct("target")
class Numeric(Table):
    """Declares numeric parity, and passes of several rows have other last bits."""

    def __init__(self) -> None:
        super().__init__()
        reason = "passes of several rows add in another order"
        self.info = attrs.evolve(self.info, parity=Parity.NUMERIC, parity_reason=reason)

    def decode(self, state: Any, tokens: Sequence[int]) -> ForwardOutput:
        output = super().decode(state, tokens)
        if len(tokens) == 1:
            return output
        rows = output.need_logits().rows() * np.float32(1 + 2**-22)
        return attrs.evolve(output, logits=TableLogits(rows))


@correct("target")
class AllEqual(Table):
    """Likes every token equally well, everywhere."""

    def _row(self, point: Any) -> Any:
        return np.zeros(self.vocabulary, np.float32)


@correct("target")
class PaddedVocabulary(Table):
    """Its last 30 ids are padding: their logits are -inf."""

    def table(self) -> Any:
        table = super().table()
        table[:, -30:] = 0
        return table / table.sum(-1, keepdims=True)


@correct("target")
class ReachesEighths(Table):
    """Goes back to multiples of eight tokens only."""

    def rewind(self, state: Any, length: int) -> int:
        return super().rewind(state, length if not 0 <= length <= state.held else length // 8 * 8)


# --- depth policies ---------------------------------------------------------------------------------------------------


class Fixed(DepthPolicy):
    """What the policies below share."""

    prepare: ClassVar[Callable[..., Any] | None] = None
    depth = 1

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.records = 0

    def next_depth(self, stats: Stats) -> int:
        return self.depth

    def record(self, cycle: CycleRecord) -> None:
        self.records += 1


@correct("policy")
class ThousandDeep(Fixed):
    """A thousand tokens, always."""

    depth = 1000


@correct("policy")
class NeverSpeculates(Fixed):
    """No draft at all, for a reason."""

    depth = 0

    @property
    def reason(self) -> str:
        return "this policy never drafts"


# --- logits processors ------------------------------------------------------------------------------------------------


@correct("processor")
class AllButOne(LogitsProcessor):
    """Allows one token, which the history decides."""

    def __init__(self, config: Any, env: Any) -> None:
        self.vocab = env.vocab_size

    def allowed(self, history: Sequence[int]) -> int:
        return (sum(history[-3:]) * 7 + len(history)) % self.vocab

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        only = np.full_like(logits, -np.inf)
        only[self.allowed(history)] = 0
        return only

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        for at, token in enumerate(draft):
            if token != self.allowed([*history, *draft[:at]]):
                return at
        return len(draft)
