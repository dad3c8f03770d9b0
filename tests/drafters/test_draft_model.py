"""A second model drafts. That its state follows the text, and the output is that of plain decoding, is in clauses D5 to
D17."""

import functools
import pathlib

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.backends.arrays import HostLogits
from specdec.contract import PrepareEnv
from specdec.drafters import draft_model
from specdec.drafters.draft_model import DraftModelConfig
from specdec.drafters.logits import last_row
from specdec.errors import SpecdecError, UnsupportedError
from specdec.registry import Registry
from specdec.testing import TableModel
from tests import tiny
from tests.drafters.composed import LLAMA, composed
from tests.drafters.two_tokenizers import byte_level

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48]


# --- acceptance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_p": 0.8}])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_the_target_itself_as_draft_model_is_always_right(base, folders, sampling, depth):
    """The oracle: same weights, same context, and the noise of the position give the token of the target."""
    lm = composed(base, {"name": "draft_model", "model": folders.target}, (depth,))
    stats = lm.generate(PROMPT, max_new_tokens=50, ignore_eos=True, **sampling).stats
    assert stats.accepted == stats.offered
    assert stats.tokens / stats.cycles > depth
    assert stats.draft["passes"] == sum(stats.offered)


def test_a_draft_model_that_is_reached_by_text_is_right_about_text():
    """The same oracle with both tokenizers between."""
    drafter = {"name": "draft_model", "model": "demo", "tokenizers": "text"}
    stats = specdec.load("demo", drafter=drafter, depth=4).generate("def add(a, b):", max_new_tokens=60).stats
    assert sum(stats.accepted) >= 0.9 * sum(stats.offered), stats
    assert stats.tokens / stats.cycles > 2.2, stats


# --- what the draft model cannot hold --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """``written(vocab=301)``: a Llama draft model with these settings."""

    @functools.cache
    def write(**changes):
        return str(tiny.WRITERS["llama"](tmp_path_factory.mktemp("llama"), **{**LLAMA, **changes}))

    return write


def test_behind_the_draft_model_s_last_position_nothing_is_drafted_and_the_report_says_so(base, written):
    lm = composed(base, {"name": "draft_model", "model": written(max_positions=24)}, (4,))
    session = lm.session()
    result = session.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert result.tokens == base.generate(PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    assert result.stats.draft["skipped"]["capacity"] == 23  # the cycles with 25 to 47 committed tokens
    assert result.stats.inactive_reason == ""
    session.rewind(12)
    again = session.generate(max_new_tokens=8, ignore_eos=True).stats
    assert again.offered[0] == 8 - 1  # the last token of a generation is never drafted for


@pytest.mark.parametrize("vocab", [265, 277, 301])
@pytest.mark.parametrize("verifier", ["strict", "rejection"])
def test_vocabularies_of_one_tokenizer_may_be_padded_differently(base, written, vocab, verifier):
    """The target has 277 rows for 265 tokens; laws are handed over in its width whatever the draft model's is."""
    plain = composed(base, {"name": "none"}, (0,), verifier)
    lm = composed(base, {"name": "draft_model", "model": written(vocab=vocab)}, (4,), verifier)
    settings = {"max_new_tokens": 30, "ignore_eos": True}
    for more in (
        {},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "seed": 0, "logit_bias": {"276": 2.0}, "top_k": 20},
    ):
        result = lm.generate(PROMPT, **settings, **more)
        assert result.stats.offered
        assert not result.stats.inactive_reason
        assert not result.stats.faults
        if verifier == "strict" or "temperature" not in more:
            assert result.tokens == plain.generate(PROMPT, **settings, **more).tokens


@given(
    inner=st.integers(2, 7),
    width=st.integers(2, 7),
    rows=st.integers(1, 3),
    seed=st.integers(0, 99),
    k=st.integers(1, 2),
)
def test_a_row_in_another_width_is_the_last_row_padded_or_cut(inner, width, rows, seed, k):
    """Every cheap view of the logits says what the full row says, ties included."""
    values = np.random.default_rng(seed).integers(-2, 3, (rows, inner)).astype(np.float32)
    row = last_row(HostLogits(values), inner, width)
    padded = np.concatenate([values, np.full((rows, 7), -np.inf, np.float32)], axis=1)[-1:, :width]
    whole = HostLogits(padded)
    assert len(row) == 1
    assert np.array_equal(row.rows(), padded)
    assert row.argmax() == whole.argmax()
    assert row.topk(k) == whole.topk(k)
    assert row.logsumexp() == pytest.approx(whole.logsumexp(), abs=1e-6)


# --- bad input -------------------------------------------------------------------------------------------------------


def with_one_more_token(written):
    """A draft model whose tokenizer has a token that the target's lacks."""
    folder = pathlib.Path(written(seed=7))
    core = tiny._tokenizer(folder).core
    core.add_special_tokens(["<|extra|>"])
    core.save(str(folder / "tokenizer.json"))
    return str(folder)


BAD = {
    "no model": (lambda **_: {}, ["drafter.model", "required and missing"]),
    "empty model": (lambda **_: {"model": ""}, ["drafter.model"]),
    "no such folder": (
        lambda **_: {"model": "./nowhere"},
        ["there is no folder './nowhere'", "drafter.model", "config.json"],
    ),
    "another tokenizer": (
        lambda folders, **_: {"model": folders.other},
        ["5 token ids differ between the draft model and the target", "258 is 'in'", 'drafter.tokenizers = "text"'],
    ),
    "more tokens": (
        lambda written, **_: {"model": with_one_more_token(written)},
        ["1 token ids differ", "265 is no token to the target and '<|extra|>' to the draft model"],
    ),
    "no such mode": (lambda **_: {"model": "demo", "tokenizers": "texts"}, ["drafter.tokenizers", "'text'"]),
    "no such weights": (lambda **_: {"model": "demo", "weights": "int3"}, ["drafter.weights", "'int3'"]),
    "unknown key": (lambda **_: {"model": "demo", "min_margn": 1.0}, ["drafter.min_margn", "min_margin"]),
    "no such backend": (
        lambda folders, **_: {"model": folders.llama, "backend": "tpu"},
        ["'tpu'", 'drafter.backend = "cpu"'],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_draft_model_that_cannot_be_used_is_refused_with_what_would_work(base, folders, written, case, monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")
    monkeypatch.setattr("specdec.registry.lookup._current", Registry(entry_points=()))
    make, words = BAD[case]
    options = {"name": "draft_model", **make(folders=folders, written=written)}
    with pytest.raises(SpecdecError) as caught:
        specdec.load(folders.target, drafter=options, depth=2)
    for word in words:
        assert word in str(caught.value)


def test_a_draft_model_without_a_loader_says_what_it_needs():
    spec = draft_model.specdec_drafters()[0]
    with pytest.raises(UnsupportedError, match="no loader is available here"):
        spec.prepare(DraftModelConfig(model="demo"), PrepareEnv(target=TableModel.random(5)))


def test_tokens_that_only_the_target_knows_need_rows_in_the_draft_model():
    env = PrepareEnv(target=TableModel.random(5), tokenizer=byte_level(("in",)))  # 258 tokens
    info = TableModel.random(5).info
    found = [(257, "<|end|>", None)]
    draft_model.check_vocabularies(found, env, attrs.evolve(info, vocab_size=258), "drafter.model = 'x'")
    assert env.notices == ["the draft model does not know 1 tokens of the target: 257 '<|end|>'"]
    with pytest.raises(UnsupportedError, match="a vocabulary of 257, and the target's tokenizer has 258 tokens"):
        draft_model.check_vocabularies(found, env, attrs.evolve(info, vocab_size=257), "drafter.model = 'x'")


def test_text_between_equal_vocabularies_and_ids_that_the_draft_model_lacks_are_notices(base, folders, written):
    same = composed(base, {"name": "draft_model", "model": folders.llama, "tokenizers": "text"})
    assert any('drafter.tokenizers = "ids"' in notice for notice in same.notices)
    less = pathlib.Path(written(seed=8))
    file = less / "tokenizer.json"
    file.write_text(file.read_text().replace(tiny.IM_START, "<|im_stort|>"))
    assert tiny.IM_START not in file.read_text()
    with pytest.raises(UnsupportedError, match="1 token ids differ"):
        composed(base, {"name": "draft_model", "model": str(less)})
