"""What a load promises on a device: bits only where they were probed, and sessions that fit its memory."""

import attrs
import pytest
import torch

from specdec import pipeline
from specdec.backends.cuda.kernels import attention
from specdec.backends.cuda.ops import CudaOps
from specdec.config import Choice, RunConfig
from specdec.contract import Needs
from specdec.errors import UnsupportedError
from specdec.models.causal_lm import CACHE_SHARE, CausalLM
from tests.backends.cuda.test_models import _short_caches, build  # noqa: F401  (fixtures)

pytestmark = pytest.mark.interpreter


def test_the_probe_at_a_load_reaches_a_second_split(new_device):
    """What lies there is found: ``tests/records/test_parity.py``."""
    assert CudaOps(new_device(), torch.float32).capabilities.probed_context > attention.FINE.value


@pytest.mark.parametrize("mtp", [False, True])
def test_the_most_tokens_are_those_that_memory_holds(
    build,  # noqa: F811
    monkeypatch,
    mtp,
):
    """The caches of a state that is full take at most their share, and a quarter more tokens would take more."""
    target, needs = build("qwen3_5", max_positions=4000), Needs(mtp=mtp)
    monkeypatch.setattr(type(target.ops), "free_bytes", lambda self: 500_000)
    most = target.most_tokens(needs)
    assert 500 < most < 4000

    def taken(tokens):
        state = target.new_state(tokens, needs)
        caches = [*state.caches, *([state.mtp] if mtp else [])]
        for cache in caches:
            cache.make_room(tokens, 16)
        return sum(cache.nbytes() for cache in caches)

    assert taken(most) <= CACHE_SHARE * 500_000 < taken(most + most // 4)
    monkeypatch.setattr(type(target.ops), "free_bytes", lambda self: 1000)
    assert target.most_tokens(needs) == 0
    monkeypatch.setattr(type(target.ops), "free_bytes", lambda self: 2**40)
    assert target.most_tokens(needs) == 4000
    monkeypatch.setattr(type(target.ops), "free_bytes", lambda self: None)
    assert target.most_tokens(needs) is None


def load(monkeypatch, answer, **target):
    monkeypatch.setattr(CausalLM, "most_tokens", lambda self, needs: answer)
    config = RunConfig(drafter=Choice("none"))
    return pipeline.build(attrs.evolve(config, target=attrs.evolve(config.target, **target)))


def test_a_session_takes_what_fits(monkeypatch):
    lm = load(monkeypatch, 40)
    assert lm.capacity == 40
    (notice,) = (one for one in lm.notices if "session" in one)
    assert notice.startswith(f"a session holds 40 of the model's {lm.info.max_positions} tokens: ")
    result = lm.generate("abc", max_new_tokens=60, ignore_eos=True)
    assert result.finish_reason == "context"
    assert len(result.tokens) + result.prompt_tokens == 40


@pytest.mark.parametrize(("room", "capacity", "remedy"), [(40, 41, "target.capacity = 40"), (0, None, "a smaller")])
def test_what_does_not_fit_is_refused(monkeypatch, room, capacity, remedy):
    with pytest.raises(UnsupportedError, match="does not fit the free memory") as refused:
        load(monkeypatch, room, capacity=capacity)
    assert refused.value.facts["fits"] == f"{room} tokens beside the weights"
    assert str(refused.value.facts["try"]).startswith(remedy)
