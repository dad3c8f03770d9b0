"""``walk``: takes a drafter through a given text by one of several routes, and gives what it drafted at each position.

What a drafter drafts depends on the tokens before, not on the route by which they came: in cycles or in a prompt, after
detours that were rewound, beside other sequences, or over a state that was saved in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from specdec.contract import Context, Draft, DraftNoise, Sampling
from specdec.testing.checks import Faults
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, target_for
from specdec.testing.subjects import PluginSubject
from specdec.testing.table_model import Memory

VOCAB = 40
DEPTHS = (1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 8, 13, 15)  # up to the rows of a pass; most are short

_INDEPENDENT = DraftNoise.INDEPENDENT
SETTINGS: Mapping[str, tuple[Sampling, DraftNoise]] = {
    "greedy": (Sampling(), DraftNoise.COUPLED),
    "independent": (Sampling(temperature=1.0, seed=2**40 + 11), _INDEPENDENT),
    "coupled": (Sampling(temperature=1.3, seed=2**63 - 1, repetition_penalty=1.2), DraftNoise.COUPLED),
    "sharp": (Sampling(temperature=0.003, seed=2**62 + 5), _INDEPENDENT),
    "flat": (Sampling(temperature=4.0, top_p=0.98, seed=2**33), _INDEPENDENT),
    "filtered": (Sampling(temperature=1.1, seed=2**35, top_k=3, min_p=0.02, frequency_penalty=0.1), _INDEPENDENT),
    "biased": (Sampling(temperature=0.7, seed=7, logit_bias={0: 2.0, 3: -1.5, 5: 4.0}, banned=(4,)), _INDEPENDENT),
}


def text(seed: int, length: int) -> list[int]:
    """Tokens that repeat earlier ones in stretches of all lengths, with runs of one token and of consecutive ids."""
    rng = np.random.default_rng([seed, 4])
    if seed % 4 == 0:  # one token over and over
        return [2, *[1] * length][:length]
    tokens = [int(token) for token in rng.integers(0, VOCAB, 3)]
    while len(tokens) < length:
        stretch, kind = int(2 ** rng.uniform(0, 5)), int(rng.integers(10))
        if kind < 6:
            start = int(rng.integers(len(tokens)))
            tokens += tokens[start : start + stretch]
        elif kind == 6:
            tokens += [tokens[-1]] * min(stretch, 6)
        elif kind == 7:  # consecutive ids, up to the last one
            tokens += range(max(VOCAB - 1 - int(rng.integers(0, 4)), 0), VOCAB)
        else:
            tokens += [int(token) for token in rng.integers(0, VOCAB, stretch)]
    return tokens[:length]


@attrs.define(kw_only=True)
class Walk:
    """One way through a text.

    Attributes:
        route: "steps" with one token in each cycle; "prompt" with most of it as one chunk; "mixed" with chunks, cut and
            others' drafts; "rewound" with detours; "restored" through copies and files, "rebuilt" without what the
            drafter saved; "beside" another sequence; "reported" with a report after every cycle.
        cycle: added to the number of every cycle.
        drafts: by position, copies of what was drafted there, and the depths.
        session: the last one.
    """

    subject: PluginSubject
    setting: str
    route: str = "cycles"
    seed: int = 0
    memory: Memory = Memory.ATTENTION
    cycle: int = 0
    faults: Faults = attrs.field(factory=Faults)
    drafts: dict[int, Draft] = attrs.field(factory=dict)
    depths: list[int] = attrs.field(factory=list)
    session: ScriptedSession = attrs.field(init=False)
    rng: np.random.Generator = attrs.field(init=False)
    other: ScriptedSession | None = None

    def through(self, tokens: Sequence[int]) -> Walk:
        """Walk through ``tokens``; returns itself."""
        self.rng = rng = np.random.default_rng([self.seed, *self.route.encode()])
        self.depths = np.random.default_rng([self.seed, 5]).choice(DEPTHS, 2000).tolist()
        sampling, noise = SETTINGS[self.setting]
        sampling = attrs.evolve(sampling, logit_bias=dict(sampling.logit_bias))
        context = Context([], sampling, generated_from=1, draft_noise=noise)  # whatever the route
        model = target_for(self.subject, self.memory, vocab=VOCAB)
        self.session = session = ScriptedSession(self.subject, model, context, faults=self.faults)
        if self.route in ("restored", "rebuilt"):
            session.snapshot()  # of a sequence without tokens
        if self.route == "reported":
            session.report()
        first = len(tokens) * 2 // 3 if self.route == "prompt" else int(rng.integers(1, 4))
        session.feed(tokens[: max(first, 1)], chunk=len(tokens) if self.route == "prompt" else 2)
        while len(session.tokens) < len(tokens):
            at, chance = len(session.tokens), rng.random()
            if self.route == "mixed" and chance < 0.08:
                session.feed(tokens[at : at + int(2 ** rng.uniform(0, 6))], chunk=int(2 ** rng.uniform(0, 5)))
                continue
            if self.route == "rewound" and chance < (0.3 if 192 <= at < 256 else 0.08):  # 8 bits do not hold 256
                self._detour(tokens[at:])
            if self.route in ("restored", "rebuilt") and chance < 0.04:
                self._restore(tokens[at:])
            if self.route == "beside":
                if self.other is None or chance < 0.05:
                    self.other = session.another()
                self._elsewhere(self.other, tokens[at:], 1)
            session = self.session
            if len(session.tokens) < len(tokens):
                self._cycle(tokens, self.depths[len(session.tokens)])
            if self.route == "reported":
                session.report()
        for report, then in session.reports:
            same = json.dumps(dict(report)) == then
            self.faults.note("D18", same, "an earlier report was changed later", got=report, expected=then)
        for draft, copy in session.drafts:
            same = drafts_equal(draft, copy)
            self.faults.note("D19", same, "an earlier draft was changed later", got=draft, expected=copy)
        return self

    def _cycle(self, tokens: Sequence[int], depth: int) -> None:
        session, rng, mixed = self.session, self.rng, self.route == "mixed"
        at = len(session.tokens)
        session.stats.cycles = at - 1 + self.cycle
        if mixed and rng.random() < 0.1:
            nothing = session.drafter.propose(session.context, 0)
            self.faults.note("D4", not nothing.tokens, "a draft of depth 0 has tokens", got=nothing)
        draft = session.propose(depth)
        self.drafts[at] = session.drafts[-1][1]
        verified = draft.tokens
        if mixed and rng.random() < 0.3:  # another drafter's draft
            verified = tuple(tokens[at : at + int(rng.integers(0, 5))])
        cut = min(len(tokens) - at - 1, int(rng.integers(0, 6)) if mixed else 0 if self.route == "steps" else depth)
        accepted = 0
        while accepted < len(verified[:cut]) and verified[accepted] == tokens[at + accepted]:
            accepted += 1
        session.finish(verified[:cut], accepted, tokens[at + accepted])

    def _detour(self, ahead: Sequence[int]) -> None:
        """Go on with other tokens, from here or from further back, and return."""
        session, rng, tokens = self.session, self.rng, list(self.session.tokens)
        here = len(tokens)
        back = here if rng.random() < 0.4 else max(1, here - int(2 ** rng.uniform(0, 8)))
        session.replace(back, [])
        if rng.random() < 0.5:
            self._elsewhere(session, ahead, int(rng.integers(1, 6)))
        else:  # a text of the same length with the same last tokens
            same = min(int(2 ** rng.uniform(0, 3)), here - back)
            session.feed([*rng.integers(0, VOCAB, here - back - same).tolist(), *tokens[here - same :]])
        session.cycle(5, 0, int(rng.integers(VOCAB)))
        session.replace(back, [])
        session.feed(tokens[back:])
        if rng.random() < 0.3:  # to where it is
            session.drafter.rewind(session.state.length)

    def _restore(self, ahead: Sequence[int]) -> None:
        """Let another drafter continue over a copy; the first one, and a third of the same copy, go elsewhere."""
        session, rng = self.session, self.rng
        tokens, (copied, copy) = list(session.tokens), session.snapshot()
        saved = None if self.route == "rebuilt" else copy
        arrays = {} if copy is None else copy.arrays
        before = {name: torch.as_tensor(array).clone() for name, array in arrays.items()}
        if saved is not None and rng.random() < 0.7:
            saved = attrs.evolve(saved, arrays=before)  # as a session's file gives it back
        self._elsewhere(session, ahead, 2)
        session.replace(len(tokens) // 2 + 1, [])
        self._elsewhere(session, ahead, 2)
        changed = [name for name, array in before.items() if not torch.equal(array, torch.as_tensor(arrays[name]))]
        self.faults.note("D17", not changed, "arrays of a snapshot changed when the text went on", got=changed)
        self.session = session.another(tokens, copied=copied, saved=saved)
        self.session.drafts = session.drafts
        self._elsewhere(session.another(tokens, copied=copied, saved=saved), ahead, 2)
        if rng.random() < 0.3:  # to before what was saved
            length = max(1, len(tokens) - int(2 ** rng.uniform(0, 8)))
            self.session.replace(length, [])
            self.session.feed(tokens[length:])

    def _elsewhere(self, session: ScriptedSession, ahead: Sequence[int], cycles: int) -> None:
        """Other tokens than those ``ahead``: what was there before or what will come, with another end, or any."""
        rng = self.rng
        some, kind = int(2 ** rng.uniform(0, 7)), int(rng.integers(3))
        if len(session.tokens) + some + 99 > session.state.capacity:
            return
        start = int(rng.integers(len(session.tokens))) if session.tokens else 0
        parts = (session.tokens[start : start + some], ahead[:some], rng.integers(0, VOCAB, some).tolist())
        session.feed([*parts[kind], int(rng.integers(VOCAB))], chunk=9)
        for _ in range(cycles):
            session.cycle(int(rng.integers(0, 6)), int(rng.integers(0, 6)), int(rng.integers(VOCAB)))


def note_difference(clause: str, walk: Walk, other: Walk, what: str) -> None:
    """Note the first position at which both drafted, and not the same."""
    for at in sorted(walk.drafts.keys() & other.drafts.keys()):
        got, expected = walk.drafts[at], other.drafts[at]
        walk.faults.note(clause, drafts_equal(got, expected), what, got=got, expected=expected, position=at)
