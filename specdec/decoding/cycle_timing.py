"""Measures what cycles cost on this machine, and keeps the cost tables between processes.

Costs hold for one machine and installation only; another one has a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableSequence, Sequence
from time import perf_counter

import attrs
import torch

from specdec._version import __version__
from specdec.config import Choice
from specdec.contract import Context, Draft, ForwardPass, Guarantee, Logits, Needs, Verdict, Verifier
from specdec.decoding.cycle import run_cycle
from specdec.decoding.parts import Parts
from specdec.decoding.result import RunStats
from specdec.decoding.sequence import prefill
from specdec.decoding.session import Session
from specdec.errors import UnsupportedError
from specdec.files.reading import why
from specdec.logs import get_logger
from specdec.records import machine
from specdec.records.cost_table import CostTable, costs_path, read_costs, write_costs
from specdec.registry import calling
from specdec.registry.parts import make_verifier

log = get_logger(__name__)

DEPTHS = (0, 1, 2, 3, 4, 6, 8)  # measured; depths in between are interpolated
REPEATS = 5
BUDGET_S = 1.0  # start no further depth after this long, once the first and last were measured twice
STEADY = 1.25  # largest ratio of the second smallest time to the smallest
CONTEXT = 32  # tokens before the measured passes
DOUBTED = 2.0  # times what a plain pass takes now: a kept table that says more is measured again
FEWEST, MOST = 4, 16  # sequences at once
PAYS = 0.05  # relative


def cost_identity(lm: Parts) -> dict[str, str | int]:
    """Everything known that the seconds of a table measured with ``lm`` now depend on; the order names its file."""
    config = lm.drafter.config
    options = attrs.asdict(config) if attrs.has(type(config)) else {}
    return {
        "model": lm.info.fingerprint,
        **{name: getattr(lm.info, name) for name in ("backend", "device", "dtype", "kernels")},
        "processor": machine.processor(),
        "libraries": machine.library_versions(),
        "specdec": __version__,
        "drafter": f"{lm.drafter.spec.name} {json.dumps(options, sort_keys=True, default=str)}",
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
    }


def costs_of(lm: Parts, notices: MutableSequence[str]) -> CostTable:
    """The cost table of ``lm`` on this machine: kept by an earlier process, or measured now and kept.

    Problems (a broken file, a folder that cannot be written) are appended to ``notices``. A model without a fingerprint
    is measured every time. A table measured under load is not kept, and a kept one is replaced silently where a plain
    pass takes less than half of what it says. A file that is not used is removed, so that it is reported once.

    Raises: UnsupportedError when costs cannot be measured.
    """
    depths_that_fit(lm)
    identity = cost_identity(lm)
    path = costs_path(identity)
    if path is None:
        return measure_costs(lm)
    found = read_costs(path)
    if isinstance(found, CostTable):
        if found.pass_seconds(1) < DOUBTED * plain_pass(lm):
            return found
        log.info("cost_table_doubted", reason="a pass takes less than half its time now: the machine was busy then")
    table = measure_costs(lm)
    try:
        if isinstance(found, str) and found:
            notices.append(f"{found}: measured again")
        if table.steady:
            write_costs(path, table, identity)
        else:
            log.info("cost_table_not_kept", reason="repeats disagreed: the machine was busy")
            path.unlink(missing_ok=True)
    except OSError as error:
        notices.append(f"the cost table cannot be kept: {why(error)} ({path.parent}); every start measures it")
    return table


def sequences_that_pay(lm: Parts) -> int:
    """Sequences to generate at once: as many as raise the tokens per second of all by ``PAYS`` each, by the cost table.

    From ``FEWEST``, with which a short request seldom waits for a long one, to ``MOST``, since each has a state.

    Raises: UnsupportedError when costs cannot be measured.
    """
    if not lm.info.batch_rows:
        return FEWEST
    costs = costs_of(lm, [])
    rates = {count: count / costs.pass_seconds(count) for count in range(FEWEST, MOST + 1)}
    return next((count for count in range(FEWEST, MOST) if rates[count + 1] < (1 + PAYS) * rates[count]), MOST)


def depths_that_fit(lm: Parts, depths: Sequence[int] = DEPTHS) -> list[int]:
    """The ``depths`` that a session has room for. Raises: UnsupportedError when fewer than two are left."""
    allowed = [depth for depth in depths if depth < min(lm.info.max_rows, lm.capacity - 2)]
    if len(allowed) < 2:
        raise UnsupportedError(
            f"costs cannot be measured: passes of {lm.info.max_rows} rows in a session of {lm.capacity} tokens",
            try_="a larger target.capacity",
        )
    return allowed


def measure_costs(
    lm: Parts, depths: Sequence[int] = DEPTHS, *, repeats: int = REPEATS, budget_s: float = BUDGET_S
) -> CostTable:
    """Measure in a separate session, on arbitrary tokens; keeps the smallest of ``repeats``, since noise only adds.

    Passes are timed by row count, whatever the drafter does. Drafts are timed at the lengths that the drafter returns;
    if it drafts nothing here, ``draft`` stays at 0 seconds. Those of a chain are of the member that gave most lengths.

    Raises: UnsupportedError when a session is too short for a cycle of depth 1.
    """
    began = perf_counter()
    allowed = depths_that_fit(lm, depths)
    measured = _Measured(lm, max(1, min(CONTEXT, lm.capacity - max(allowed) - 2)))
    order = [allowed[0], allowed[-1], *allowed[1:-1]]
    for repeat in range(repeats):
        for number, depth in enumerate(order):
            if max(repeat, number) > 1 and perf_counter() - began > budget_s:
                return measured.table()
            if not repeat:
                measured.cycle(depth, keep=False)  # the first pass of each row count is slow
            measured.cycle(depth)
    return measured.table()


def plain_pass(lm: Parts) -> float:
    """Seconds of a pass of one row now, the faster of two: the first one may be slow."""
    measured = _Measured(lm, 1)
    for _ in range(2):
        measured.cycle(0)
    return measured.table().pass_seconds(1)


def warm_up(lm: Parts, depths: Iterable[int]) -> None:
    """Run a cycle of depth 1 in a separate session or, where ``info.warms_by_rows``, the deepest of these cycles, a
    pass of every number of rows that a cycle has, and an MTP pass of every length that may follow it.

    A slow first pass would distort a short generation and the timings of a policy.
    """
    allowed = [depth for depth in depths if depth < min(lm.info.max_rows, lm.capacity - 2)]
    if not allowed:
        return
    measured = _Measured(lm, 2)  # an MTP head drafts nothing for a single token
    by_rows = lm.info.warms_by_rows
    for depth in allowed if by_rows else ():
        measured.verify(depth + 1)
    measured.cycle(max(allowed) if by_rows else min(1, max(allowed)), keep=False)
    if by_rows and lm.drafter.needs.mtp:
        with calling(("target", lm.info.family), "prefill_mtp"):
            _warm_up_head(lm.target, max(allowed) + 1)


def _warm_up_head(target: ForwardPass, rows: int) -> None:
    room = min(rows * (rows + 1) // 2, target.info.max_positions)  # the pairs stay
    state = target.new_state(room, Needs(mtp=True, final_hidden=True))
    hidden = target.decode(state, [0] * rows).need_hidden()
    for count in range(1, rows + 1):
        target.prefill_mtp(state, [0] * count, hidden[:count])


class _Unrepeated(Verifier):
    """Verifies as ``strict`` does, since a table holds for every verifier, and rejects for a token that is new.

    A look-up finds no match in such a text, so what is timed of a chain is the model that drafts elsewhere.
    """

    guarantee = Guarantee.EXACT

    def __init__(self, vocab_size: int) -> None:
        self._strict, self._size = make_verifier(Choice("strict")), min(vocab_size, 1000)

    def token(self, position: int) -> int:
        return (7 * position + 3) % self._size

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self._strict.verify(draft, logits, context)
        return Verdict(0, self.token(len(context)))


class _Measured:
    """Cycles over one prompt; rewinds to its end when the session is full."""

    def __init__(self, lm: Parts, context: int) -> None:
        verifier = _Unrepeated(lm.info.vocab_size)
        self._session = Session(attrs.evolve(lm, verifier=verifier))
        self._session.feed([verifier.token(position) for position in range(context)])
        self._stats = RunStats()
        prefill(self._session.sequence, self._stats)
        self._context, self._capacity = context, lm.capacity
        self._verify: dict[int, list[float]] = {}
        self._draft: dict[str, dict[int, list[float]]] = {"": {}}  # by drafter of a chain
        self._commit: list[float] = []

    def verify(self, rows: int) -> float:
        """Run a separate pass; returns its seconds."""
        sequence = self._session.sequence
        started = perf_counter()
        sequence.target.decode(sequence.state, [sequence.tokens[-1]] * rows).need_logits().argmax()
        seconds = perf_counter() - started
        sequence.target.commit(sequence.state, 0)
        return seconds

    def cycle(self, depth: int, *, keep: bool = True) -> None:
        """Run one cycle, plus a separate pass if the drafter gave fewer tokens than asked for."""
        session, stats = self._session, self._stats
        if len(session.tokens) + depth + 1 > self._capacity:
            session.rewind(self._context)
            prefill(session.sequence, stats)
        sequence = session.sequence
        record = run_cycle(sequence, depth, lambda emitted: 1, stats)
        seconds = record.verify_seconds
        if record.offered < depth:
            seconds = self.verify(depth + 1)
        if keep:
            self._verify.setdefault(depth + 1, []).append(seconds)
            if record.offered:
                drafts = self._draft.setdefault(record.drafter, {})
                drafts.setdefault(record.offered, []).append(record.draft_seconds)
            self._commit.append(record.commit_seconds)

    def table(self) -> CostTable:
        """The measurements so far."""
        times = [sorted(seconds) for seconds in self._verify.values()]
        drafter, drafts = max(self._draft.items(), key=lambda item: len(item[1]))
        return CostTable(
            verify={rows: min(seconds) for rows, seconds in self._verify.items()},
            draft={0: 0.0, **{tokens: min(seconds) for tokens, seconds in drafts.items()}},
            drafter=drafter,
            commit=min(self._commit),
            steady=all(seconds[1] < STEADY * seconds[0] for seconds in times if len(seconds) > 1),
        )
