"""The engine's thread: which requests it takes, and when it sends text."""

import asyncio
import contextlib
import types

import pytest

from specdec.errors import NoMemoryError
from specdec.serving import engine
from specdec.serving.engine import Engine
from specdec.serving.metrics import Metrics
from specdec.serving.refusal import Refusal
from specdec.serving.requests import CompletionRequest, parsed, prepared


@pytest.fixture(scope="module")
def ready(lm):
    return prepared(parsed(CompletionRequest, {"prompt": [1, 2, 3], "max_tokens": 5}), lm, None, 4096)


def test_a_request_is_refused_while_its_tokens_do_not_fit_memory(lm, ready, monkeypatch):
    state = lm.session().sequence.state
    least = 8 * state.nbytes() / state.capacity / engine.MEMORY_SHARE

    async def answer(made):
        with contextlib.closing(made.turn(streamed=False)) as turn:
            made.start(turn, ready)
            return await turn.next(), await turn.next()  # the engine's thread looks at no clock after the result

    async def both():
        made = Engine(lm, Metrics(), most_waiting=0, parallel=1, kept_bytes=0)
        monkeypatch.setattr(engine, "memory", lambda: (0, 0.9 * least))
        with pytest.raises(Refusal, match="no memory") as refused:
            await answer(made)
        monkeypatch.setattr(engine, "memory", lambda: (0, 1.1 * least))
        return refused.value, await answer(made)

    refusal, (piece, result) = asyncio.run(both())
    assert (refusal.status, refusal.code) == (429, "no_memory")
    assert int(refusal.headers["retry-after"]) >= 1
    assert piece.text == result.text


def test_a_state_that_does_not_fit_memory_is_refused_likewise(lm, ready, monkeypatch):
    async def answer():
        made = Engine(lm, Metrics(), most_waiting=0, parallel=1, kept_bytes=0)
        with contextlib.closing(made.turn(streamed=False)) as turn:
            made.start(turn, ready)
            await turn.next()

    def new_state(capacity, needs):
        raise NoMemoryError("there is no memory")

    monkeypatch.setattr(lm.target, "new_state", new_state)
    with pytest.raises(Refusal) as refused:
        asyncio.run(answer())
    assert (refused.value.status, refused.value.code) == (429, "no_memory")


@pytest.mark.parametrize(
    ("milliseconds", "sent"),
    [
        (range(0, 40, 8), ["0", "8", "16", "24", "32"]),  # the next one would come too late
        (range(0, 21, 3), ["0", "3 6 9", "12 15 18"]),
        ([0, 1, 30, 31], ["0", "1 30"]),
    ],
)
def test_text_waits_for_more_only_if_that_comes_soon(lm, ready, monkeypatch, milliseconds, sent):
    pieces = []
    turn = types.SimpleNamespace(cycles=False, streamed=True, gone=False, runs=id, send=pieces.append)
    clock = iter([0.0, *(100 + each / 1e3 for each in milliseconds)])
    monkeypatch.setattr(engine, "perf_counter", lambda: next(clock))
    generation = engine._Generation(turn, ready, lm.session(), None)
    for each in milliseconds:
        generation.add(f"{each} ")
    assert [piece.text.strip() for piece in pieces] == sent
