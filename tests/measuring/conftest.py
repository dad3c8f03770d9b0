"""A language model whose drafts are written down beforehand."""

import attrs
import pytest

from specdec.registry.parts import DrafterPart
from tests import tiny
from tests.measuring.test_acceptance import PROMPT, Scripted


@pytest.fixture
def scripted(checkpoint, make_target):
    """``scripted([(4, 2), (4, 0)])``: its drafter follows the script; further options are of ``tiny.make_lm``."""
    folder, target = checkpoint("qwen3_5", dtype="float32"), make_target("qwen3_5")

    def lm(script, **options):
        made = tiny.make_lm(folder, target, ignore_eos=True, **options)
        ids = made.tokenizer.encode(PROMPT)
        truth = tiny.plain_run(target, ids, 48)

        def factory(config, env):
            return Scripted(truth, len(ids), script, target.info.vocab_size)

        return attrs.evolve(made, drafter=DrafterPart(spec=attrs.evolve(made.drafter.spec, factory=factory)))

    return lm
