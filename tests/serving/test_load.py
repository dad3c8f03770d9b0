"""A server under load, for less than a minute: `benchmarks.serve_load` does the same for ten."""

import pytest


@pytest.mark.slow
def test_eight_clients_with_cancellations_and_malformed_bodies():
    from benchmarks.serve_load import load

    found = load("demo", minutes=0.25, clients=8)
    assert found["wrong"] == []
    assert min(found["requests"][what] for what in ("compared", "cancelled", "malformed")) > 0
    assert found["alive"]
    assert found["longest_queue"] <= 8
    assert found["waiting_at_the_end"] == found["threads_and_files_left"] == 0
    assert found["memory_growth"] < 0.3, found  # kept sessions are still being made
