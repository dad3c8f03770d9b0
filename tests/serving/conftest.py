"""One server for the tests of a worker, and the model to compare it with."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


@pytest.fixture(scope="session")
def server():
    from serving import serving

    with serving("-s", "depth.depth=3", "--keep", 40) as made:  # a busy machine must not end speculation
        yield made


@pytest.fixture(scope="session")
def lm():
    """The model as ``specdec generate`` loads it."""
    import specdec

    return specdec.load()
