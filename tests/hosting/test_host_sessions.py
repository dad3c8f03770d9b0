"""A request's session is found by its tokens alone."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.hosting.sessions import HostSession, HostSessions
from tests.hosting.simulated import random_requests, serve
from tests.selection import examples


def arrays(*histories):
    return [None if one is None else np.array(one, np.int64) for one in histories]


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_a_request_keeps_its_session_from_batch_to_batch(seed):
    """Or gets one that knows more of its history, left by an equal request."""
    rng = random.Random(seed)
    sessions = HostSessions(256, HostSession)
    last = []

    def propose(new, histories, lengths, buffer):
        nonlocal last
        found = sessions.find(arrays(*histories))
        assert len({id(one) for one in found}) == len(found)
        for session, history in zip(found, histories, strict=True):
            before = [one for one in last if history[: len(one)] == one]
            after = [one for one in histories if before and one[: len(before[0])] == before[0]]
            if len(before) == len(after) == 1:
                assert len(session) >= len(before[0])
                assert history[: len(session)] == session.tokens
        for session, history in zip(found, histories, strict=True):
            held = list(session.tokens)
            kept = session.follow(np.array(history))
            assert session.tokens == history
            assert kept == len(held) or held[: kept + 1] != history[: kept + 1]
            assert held[:kept] == history[:kept]
        last = histories
        return [[] for _ in histories]

    serve(random_requests(rng), propose, 3, rng)


def test_sessions_expire_by_recency_and_those_of_the_batch_stay():
    sessions = HostSessions(3, HostSession)
    for number in range(10):
        (session,) = sessions.find(arrays([number, 1]))
        session.follow(np.array([number, 1]))
    found = sessions.find(arrays([11, 1], [12, 2], [13, 3], [14, 4]))
    assert len(set(found)) == 4
    assert [len(session) for session in found] == [0] * 4  # none of another text
    for session, history in zip(found, arrays([11, 1], [12, 2], [13, 3], [14, 4]), strict=True):
        session.follow(history)
    assert sessions.find(arrays([14, 4])) == found[3:]
    (again,) = sessions.find(arrays([9, 1]))  # expired, so it takes the place of the one unused for longest
    again.follow(np.array([9, 1]))
    assert sessions.begun == 15
    assert sessions.find(arrays([13, 3])) == found[2:3]


def test_a_conversation_that_goes_back_keeps_its_session_if_more_than_half_stays():
    sessions = HostSessions(8, HostSession)
    (first,) = sessions.find(arrays([1, 2, 3, 4, 5, 6]))
    first.follow(np.array([1, 2, 3, 4, 5, 6]))
    assert sessions.find(arrays([1, 2, 3, 4, 9])) == [first]
    assert sessions.find(arrays([1, 2, 9, 9, 9])) != [first]


def test_a_new_request_does_not_take_the_session_of_one_in_the_same_batch():
    sessions = HostSessions(8, HostSession)
    history = list(range(20))
    (first,) = sessions.find(arrays(history))
    first.follow(np.array(history))
    found = sessions.find(arrays([*range(19), 99], [*history, 5]))
    assert found[1] is first
    assert found[0] is not first
