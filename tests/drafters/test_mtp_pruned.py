"""The MTP drafter with a draft vocabulary and with gates: the output is that of plain decoding, whatever is kept."""

import itertools

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from specdec.contract import ForwardPass, Needs, PrepareEnv
from specdec.drafters import mtp
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.drafters.mtp import MtpDrafter
from specdec.drafters.pruned_head import PreparedVocabulary, PrunedHeadConfig
from specdec.errors import ContractError, UnsupportedError
from specdec.policies.fixed import FixedConfig, FixedPolicy
from specdec.testing import TableModel
from tests import tiny

VOCAB = 277
GENERATED = 12
KERNELS = tiny.kernels_available()[-1]

ids = st.integers(0, VOCAB - 1)
configs = st.builds(
    PrunedHeadConfig,
    vocabulary=st.just("given"),
    max_miss=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    max_extra=st.sampled_from([0, 1, 5, 2048]),
    min_confidence=st.sampled_from([0.0, 0.0, 0.2, 0.6]),
    min_margin=st.sampled_from([0.0, 0.0, 0.5]),
)
vocabularies = st.one_of(
    st.just(tuple(range(VOCAB))),
    st.lists(ids, min_size=1, max_size=12, unique=True).map(tuple),
    st.just(tuple(range(0, VOCAB, 2))),
)


def model_of(folder, target, config, kept, depth, switches=()):
    """A language model whose drafter is pruned, rows gathered as ``prepare`` does; ``switches``: full head instead."""
    shared = PreparedVocabulary.of(target.draft_head(kept), target.info.vocab_size)

    def make(env):
        drafter = MtpDrafter(config, attrs.evolve(env, shared=shared))
        if switches:
            switched(drafter, switches)
        return drafter

    return tiny.make_lm(folder, target, make, lambda: FixedPolicy(FixedConfig(depth=depth)))


def switched(drafter, switches):
    """Let the drafter take the full head where ``switches`` say so, in turn."""
    follow, turns = drafter._choice.follow, itertools.cycle(switches)

    def switching(context):
        head = follow(context)
        return None if next(turns) else head

    drafter._choice.follow = switching


@settings(max_examples=settings().max_examples // 2)  # sessions over a whole model, four runs each
@given(
    prompts=st.tuples(st.lists(ids, min_size=1, max_size=14), st.lists(ids, min_size=1, max_size=6)),
    config=configs,
    kept=vocabularies,
    depth=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.5]),
    seed=st.integers(0, 2**63 - 1),
    turn=st.sampled_from(["on", "fork", "save", "rewind"]),
    switches=st.lists(st.booleans(), max_size=6),
    extra=st.sampled_from([{}, {}, {"top_k": 4}, {"presence_penalty": 1.0}, {"banned": tuple(range(0, VOCAB, 2))}]),
)
def test_strict_output_is_that_of_plain_decoding(
    checkpoint, make_target, tmp_path_factory, prompts, config, kept, depth, temperature, seed, turn, switches, extra
):
    """Two turns of a session; between them it goes on, is forked, saved and loaded, or goes back.

    The head is pruned or full as misses decide, and at any cycle beside that.
    """
    folder = checkpoint("qwen3_5", **tiny.HYBRID)
    target = make_target("qwen3_5", kernels=KERNELS, **tiny.HYBRID)
    sampling = {"max_new_tokens": GENERATED, "ignore_eos": True, "temperature": temperature, "seed": seed, **extra}
    plain, lm = tiny.make_lm(folder, target).session(), model_of(folder, target, config, kept, depth, switches)
    session = lm.session()
    for number, prompt in enumerate(prompts):
        if number and turn == "fork":
            session = session.fork()
        elif number and turn == "save":
            file = tmp_path_factory.getbasetemp() / "pruned.session"
            session.save(file)
            session = lm.session()
            session.load(file)
        elif number and turn == "rewind":
            length = len(session.tokens) - 7
            session.rewind(length)
            plain.rewind(length)
        ours, theirs = session.generate(prompt, **sampling), plain.generate(prompt, **sampling)
        assert ours.tokens == theirs.tokens
        assert (ours.guarantee, ours.deviation.count) == ("exact", 0)
        assert ours.stats.inactive_reason in ("", "no token was drafted")
        report = ours.stats.draft
        assert report["vocabulary"] == len(kept)
        assert report["head"] in ("pruned", "full")
        assert (report["reason"] != "") == (report["head"] == "full")
        event(f"{report['head']}, accepted: {any(ours.stats.accepted)}, gate: {report.get('gate_stops', 0) > 0}")
    held = tiny.state_arrays(target, session._sequence.state)
    tiny.assert_same_bits(held, tiny.state_arrays(target, plain._sequence.state))


def test_rules_that_leave_no_token_of_the_vocabulary_end_the_draft_only(checkpoint, make_target):
    """Catches: an error that switches drafting off for the rest of the session."""
    folder, target = checkpoint("qwen3_5", **tiny.HYBRID), make_target("qwen3_5", kernels=KERNELS, **tiny.HYBRID)
    kept = (3, 5, 7)
    for gate in ({}, {"min_confidence": 0.01}):
        config = PrunedHeadConfig(vocabulary="given", max_miss=1.0, max_extra=0, **gate)
        for temperature in (0.0, 1.0):
            sampling = {"max_new_tokens": 6, "ignore_eos": True, "banned": kept, "temperature": temperature, "seed": 0}
            session = model_of(folder, target, config, kept, 2).session()
            result = session.generate([3, 9], **sampling)
            assert result.tokens == tiny.make_lm(folder, target).generate([3, 9], **sampling).tokens
            assert result.stats.cycles == 6
            assert result.stats.draft["dead_ends"] == 5  # the last cycle has no room for a draft
            assert not session._sequence.failure


# --- the target's side ------------------------------------------------------------------------------------------------


def test_a_head_belongs_to_its_target(make_target):
    target, other = make_target("qwen3_5", **tiny.HYBRID), make_target("qwen3_5")
    head = target.draft_head([5, 1, 5, 9])
    assert head.extended([]) is head
    state = other.new_state(8, Needs(mtp=True))
    other.prefill(state, [1])
    with pytest.raises(ContractError, match="another object"):
        other.draft_mtp(state, 2, 1, head=head)
    assert state.pairs.fed == 0  # refused before anything ran
    with pytest.raises(UnsupportedError, match="no MTP head"):
        make_target("qwen3").draft_head([1])


def test_prepare_with_a_target_that_prunes_nothing(tmp_path):
    class Plain(TableModel):
        def draft_head(self, tokens):
            return ForwardPass.draft_head(self, tokens)

    file = tmp_path / "v.json"
    DraftVocabulary(tokens=(1,), vocab_size=5).write(file)
    with pytest.raises(UnsupportedError, match="offers no pruned draft head"):
        mtp.prepare(PrunedHeadConfig(vocabulary=str(file)), PrepareEnv(target=Plain.random(5, mtp=True)))
