"""transformers under the audit: its answers are its own, and assisted generation is judged."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import torch

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.errors import UnsupportedError
from specdec.measuring.comparison import Comparison
from specdec.measuring.divergences import Verdict
from specdec.measuring.engines.assisted import TransformersEngine
from specdec.measuring.engines.engine import Asked
from specdec.measuring.prompts import Prompt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
DEMO = pathlib.Path(__file__).parents[2] / "specdec" / "demo"
PROMPTS = [
    Prompt(kind="prompts", text=text) for text in ("one two three one two", "def f(x):\n    return x\n\ndef f(x")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, max_position_embeddings=256, initializer_range=0.1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, made)
    return made


def config(folder: pathlib.Path, **changes: Any) -> RunConfig:
    return RunConfig(target=TargetConfig(model=str(folder), dtype="float32"), **changes)


def test_assisted_generation_in_float32_differs_by_ties_at_most(folder: pathlib.Path) -> None:
    plain, assisted = TransformersEngine.pair(config(folder, depth=Choice("fixed", {"depth": 4})))
    assert assisted.name.endswith("prompt lookup of 4 tokens")
    asked = Asked(max_new_tokens=24, ignore_eos=True)
    report = Comparison(plain, assisted, PROMPTS, asked).run()
    assert (report.done, report.tokens) == (2, 48)
    assert report.control.differences == ()
    assert report.limits.tie == report.limits.real == 1e-3
    assert report.speculation.apart < 1e-3
    assert all(one.verdict is Verdict.TIE for one in report.judged())

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([plain._tokenizer.encode(PROMPTS[0].text)])
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    assert [step.token for step in plain.answer(PROMPTS[0].text, asked).steps][: len(expected)] == expected


def test_a_seed_repeats_a_sampled_answer(folder: pathlib.Path) -> None:
    plain, _ = TransformersEngine.pair(config(folder))
    asked = Asked(max_new_tokens=8, temperature=1.0, seed=5)
    assert plain.answer("one", asked) == plain.answer("one", asked)


def test_what_cannot_be_loaded_is_a_sentence(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(UnsupportedError, match="transformers cannot load the model"):
        TransformersEngine.pair(config(tmp_path / "odd"))
