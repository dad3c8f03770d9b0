"""``Walk``: takes a drafter through a given text by one of several routes, and keeps what it drafted at each position.

What a drafter drafts depends on the tokens before, not on the route by which they came: in cycles or in a prompt, after
detours that were rewound, or over a state that was saved in a file.
"""

from __future__ import annotations

import enum
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import Draft, DrafterSnapshot, DraftNoise, ForwardPass, Sampling, Snapshot, Stats
from specdec.decoding.session_file import SavedSession, read_session, write_session
from specdec.testing.checks import Run, expect, expect_equal
from specdec.testing.scripted_session import Kept, ScriptedSession, drafts_equal, usable
from specdec.testing.strict_pass import StrictForwardPass
from specdec.testing.subjects import DrafterSubject
from specdec.testing.table_model import WIDE, Memory, TableModel, WideModel

if TYPE_CHECKING:
    pass

VOCAB = 40
DEEPEST = 15
BYTE = 256
"""A position from which a walk with detours comes back, with tokens that come again: 8 bits do not hold it."""
LEAST = {VOCAB: 40, WIDE: 10}
"""By vocabulary, tokens of a text that a walk goes through after its prompt, however little time there is."""

SETTINGS: dict[str, tuple[Sampling, DraftNoise]] = {
    "greedy": (Sampling(), DraftNoise.COUPLED),
    "independent": (Sampling(temperature=1.0, seed=2**40 + 11), DraftNoise.INDEPENDENT),
    "sharp": (Sampling(temperature=0.003, seed=2**62 + 5), DraftNoise.INDEPENDENT),
    "flat": (Sampling(temperature=4.0, top_p=0.98, seed=2**33), DraftNoise.INDEPENDENT),
    "filtered": (
        Sampling(temperature=1.1, seed=2**35 + 3, top_k=3, min_p=0.02, frequency_penalty=0.1),
        DraftNoise.INDEPENDENT,
    ),
    "biased": (
        Sampling(temperature=0.7, seed=7, logit_bias={0: 2.0, 3: -1.5, 5: 4.0}, banned=(4,), logprobs=2),
        DraftNoise.INDEPENDENT,
    ),
    "coupled": (
        Sampling(temperature=1.3, seed=2**63 - 1, repetition_penalty=1.2, logit_bias={1: 1.0}),
        DraftNoise.COUPLED,
    ),
}


class Route(enum.Enum):
    """How the tokens of a text come."""

    CYCLES = "cycles"
    """As the engine does it: drafts are verified against the text."""
    STEPS = "steps"
    """One token in each cycle: the engine cuts every draft."""
    MIXED = "mixed"
    """Drafts are cut, others' drafts are verified, tokens come in prompts too; depth 0 is asked for."""
    PROMPT = "prompt"
    """Most of them as one prompt chunk."""
    REWOUND = "rewound"
    """With detours, of any length, that are rewound."""
    RESTORED = "restored"
    """Saved now and then, also in a file, and continued by another drafter, or rewound to before that; the first one
    goes on elsewhere, and so does a third one of the same snapshot."""


def text(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Tokens that repeat earlier ones in stretches of all lengths, with runs of one token and of consecutive ids."""
    rng = np.random.default_rng([seed, 4])
    tokens = [int(token) for token in rng.integers(0, vocab, 3)]
    while len(tokens) < length:
        stretch, kind = int(2 ** rng.uniform(0, 5)), int(rng.integers(10))
        if kind < 6:
            start = int(rng.integers(len(tokens)))
            tokens += tokens[start : start + stretch]
        elif kind == 6:
            tokens += [tokens[-1]] * min(stretch, 6)
        elif kind == 7:  # consecutive ids, up to the last one
            first = vocab - 1 - int(rng.integers(0, 4))
            tokens += range(max(first, 0), vocab)
        else:
            tokens += [int(token) for token in rng.integers(0, vocab, stretch)]
    return tokens[:length]


def model_for(subject: DrafterSubject, memory: Memory = Memory.ATTENTION, *, vocab: int = VOCAB) -> StrictForwardPass:
    """A strict model for long texts."""
    if vocab == WIDE:
        return StrictForwardPass(WideModel(np.full((4, 4), 0.25), WIDE))
    made = TableModel.random(
        vocab, memory=memory, tilt=0.7, mtp=subject.needs.mtp, layers=subject.layers, max_positions=8192
    )
    return StrictForwardPass(made)


@attrs.define(kw_only=True)
class Walk:
    """One way through a text.

    Attributes:
        drafts: by position, copies of what was drafted there.
        handed: the drafts themselves, and the copies.
        look: called with the session and each draft.
        outputs: weak references to the outputs of the passes.
    """

    subject: DrafterSubject
    setting: str
    route: Route
    seed: int
    run: Run
    vocab: int = VOCAB
    memory: Memory = Memory.ATTENTION
    sealed: bool = False
    hostile: bool = False
    ask: bool = False  # for reports and snapshots, now and then
    cycle: int = 0  # added to the number of every cycle
    model: ForwardPass | None = None
    look: Callable[[ScriptedSession, Draft, int], None] | None = None
    drafts: dict[int, Draft] = attrs.field(factory=dict)
    handed: list[tuple[Draft, Draft]] = attrs.field(factory=list)
    outputs: list[weakref.ref[Any]] | None = None
    sibling: ScriptedSession | None = None  # over the same snapshot

    def through(self, tokens: Sequence[int]) -> Walk:
        """Walk through ``tokens``; returns itself."""
        rng = np.random.default_rng([self.seed, list(Route).index(self.route)])
        depths = np.random.default_rng([self.seed, 5]).choice([1, 2, 3, 4, 5, 7, 8, 13, 15], len(tokens) + 1)
        sampling, noise = SETTINGS[self.setting]
        sampling = attrs.evolve(sampling, logit_bias=dict(sampling.logit_bias))
        session = ScriptedSession.start(
            self.subject,
            model=self.model or model_for(self.subject, self.memory, vocab=self.vocab),
            sampling=sampling,
            noise=noise,
            sealed=self.sealed,
        )
        session.outputs = self.outputs
        turns = twins = 0
        crossed = False
        if self.route is Route.RESTORED:
            session.keep()  # of a sequence without tokens
        prompt = self.route is Route.PROMPT
        first = len(tokens) * 2 // 3 if prompt else int(rng.integers(1, 4))
        session.feed(tokens[: max(first, 1)], chunk=len(tokens) if prompt else int(2 ** rng.uniform(0, 7)))
        session.generated_from = 1  # whatever the route
        least = len(session.tokens) + LEAST[self.vocab]
        while len(session.tokens) < len(tokens) and (len(session.tokens) < least or not self.run.spent):
            at, chance = len(session.tokens), rng.random()
            if self.route is Route.REWOUND and not crossed and BYTE - 64 <= at < BYTE:
                crossed = True
                session.feed([*text(self.seed + 1, BYTE - at, self.vocab), *tokens[at : at + 64]])
                session.rewind(at)
                session.feed([])
            if self.route is Route.REWOUND and chance < 0.06 and turns < 40:
                turns += 1
                self._detour(session, tokens[at:], rng)
                continue
            if self.route is Route.REWOUND and chance > 0.95 and twins < 12 and at > 1:
                twins += 1
                self._twin(session, int(depths[at]), rng)
            if self.route is Route.RESTORED and chance < 0.04 and turns < 25:
                turns += 1
                session = self._restored(session, tokens[at:], rng)
                continue
            if self.route is Route.MIXED and chance < 0.08:
                some = int(2 ** rng.uniform(0, 6))
                session.feed(tokens[at : at + some], chunk=int(2 ** rng.uniform(0, 5)))
                continue
            if self.ask and chance > 0.8:
                session.drafter.report()
                session.drafter.snapshot(session.context())
            self._cycle(session, tokens, int(depths[at]), rng)
            if self.sibling is not None and at % 7 == 6:
                _elsewhere(self.sibling, np.random.default_rng([self.seed, at]), [])
                self.sibling = None
        expect_equal(session.sampling, attrs.evolve(SETTINGS[self.setting][0]), "the settings were changed")
        return self

    def _cycle(self, session: ScriptedSession, tokens: Sequence[int], depth: int, rng: np.random.Generator) -> None:
        at = len(session.tokens)
        session.cycles = at - 1 + self.cycle
        mixed = self.route is Route.MIXED
        if mixed and rng.random() < 0.1:
            expect_equal(tuple(session.drafter.propose(session.context(), 0).tokens), (), "depth 0 drafts tokens")
        draft = session.propose(depth)
        self.drafts[at] = copy = Draft(draft.tokens, None if draft.probs is None else np.array(draft.probs))
        self.handed.append((draft, copy))
        if self.look is not None:
            self.look(session, draft, depth)
        kept = usable(draft, depth, session.model.info.vocab_size)
        if mixed and rng.random() < 0.3:  # another drafter's draft
            kept = Draft(tuple(tokens[at : at + int(rng.integers(0, 5))]))
        room = len(tokens) - at - 1
        cut = min(room, 0 if self.route is Route.STEPS else int(rng.integers(0, 6)) if mixed else depth)
        kept = Draft(kept.tokens[:cut], None if kept.probs is None else kept.probs[:cut])
        accepted = 0
        while accepted < len(kept.tokens) and kept.tokens[accepted] == tokens[at + accepted]:
            accepted += 1
        session.finish(kept, accepted, tokens[at + accepted])
        if self.hostile and isinstance(draft.probs, np.ndarray) and rng.random() < 0.5:
            self.handed.pop()
            if draft.probs.flags.writeable:
                draft.probs[...] = -1.0

    def _detour(self, session: ScriptedSession, ahead: Sequence[int], rng: np.random.Generator) -> None:
        """Go on with other tokens, in a prompt or in cycles, and back; sometimes further back than it came from."""
        here = len(session.tokens)
        _elsewhere(session, rng, ahead)
        back = here if rng.random() < 0.6 else max(1, here - int(2 ** rng.uniform(0, 8)))
        session.rewind(1 if rng.random() < 0.05 else back)
        session.feed([])
        if rng.random() < 0.5:  # to where it is
            session.drafter.rewind(session.state.length)

    def _twin(self, session: ScriptedSession, depth: int, rng: np.random.Generator) -> None:
        """Draft over another text of the same length with the same last tokens, as a fresh drafter, and go back."""
        tokens, vocab = list(session.tokens), session.model.info.vocab_size
        kept = min(int(2 ** rng.uniform(0, 3)), len(tokens) - 1)
        changed = min(int(2 ** rng.uniform(0, 4)), len(tokens) - kept)
        start, end = len(tokens) - kept - changed, len(tokens) - kept
        self._retell(
            session, max(start, 1), [int(token) for token in rng.integers(0, vocab, end - max(start, 1))], tokens[end:]
        )
        session.cycles = len(tokens) - 1 + self.cycle
        expected, got = session.fresh().propose(depth), session.propose(depth)
        what = "after a rewind and as many other tokens, the draft is not that of a fresh drafter"
        expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=session.tokens)
        session.finish(usable(got, depth, vocab), 0, int(rng.integers(vocab)))
        self._retell(session, max(start, 1), tokens[max(start, 1) :])

    @staticmethod
    def _retell(session: ScriptedSession, length: int, *parts: Sequence[int]) -> None:
        """Go back to ``length`` tokens, and on with others."""
        session.rewind(length)
        session.feed([token for part in parts for token in part])

    def _restored(self, session: ScriptedSession, ahead: Sequence[int], rng: np.random.Generator) -> ScriptedSession:
        kept = session.keep()
        saved = kept.drafter
        if saved is not None and rng.random() < 0.7:
            saved = filed(saved, kept, session.model)
        _elsewhere(session, rng, ahead)
        if self.hostile and saved is not kept.drafter and kept.drafter is not None:
            for array in kept.drafter.arrays.values():
                if isinstance(array, np.ndarray) and array.flags.writeable:
                    array[...] = 0
        other = session.restored(kept, saved if rng.random() < 0.8 else None)
        self.sibling = session.restored(kept, saved)
        other.outputs = self.outputs
        if rng.random() < 0.3:  # to before what was saved
            other.rewind(max(1, len(other.tokens) - int(2 ** rng.uniform(0, 8))))
            other.feed([])
        return other


def _elsewhere(session: ScriptedSession, rng: np.random.Generator, ahead: Sequence[int]) -> None:
    """Other tokens than those ``ahead``: what was there before or what will come, with another end, or any."""
    vocab = session.model.info.vocab_size
    some, kind = int(2 ** rng.uniform(0, 7)), rng.random()
    if kind < 0.4 and session.tokens:
        start = int(rng.integers(len(session.tokens)))
        session.feed([*session.tokens[start : start + some], int(rng.integers(vocab))], chunk=9)
    elif kind < 0.7:
        session.feed([*ahead[:some], int(rng.integers(vocab))], chunk=9)
    else:
        session.feed([int(token) for token in rng.integers(0, vocab, some)], chunk=9)
    for _ in range(int(rng.integers(1, 6))):
        session.cycle(int(rng.integers(0, 6)), int(rng.integers(0, 6)), int(rng.integers(vocab)))


def filed(saved: DrafterSnapshot, kept: Kept, target: ForwardPass) -> DrafterSnapshot:
    """What a session's file gives back for ``saved``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        state = Snapshot(kept.state.length, kept.state.capacity, {}, {})
        described = SavedSession(
            tokens=tuple(kept.tokens),
            cycle=kept.cycles,
            stats=Stats(),
            snapshot=state,
            drafter="under test",
            drafter_snapshot=saved,
        )
        write_session(path, described, target)
        read = read_session(path, target).drafter_snapshot
    return DrafterSnapshot({}) if read is None else read


def expect_same(walk: Walk, other: Walk, what: str) -> None:
    """Raises: Broken for the first position at which both drafted, and not the same."""
    for at in sorted(walk.drafts.keys() & other.drafts.keys()):
        got, expected = walk.drafts[at], other.drafts[at]
        if not drafts_equal(got, expected):
            case: dict[str, object] = {"position": at, "setting": walk.setting, "route": walk.route.value}
            expect(False, what, got=got, expected=expected, **case)
