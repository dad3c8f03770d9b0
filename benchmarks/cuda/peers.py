"""Compare with transformers' ``generate`` on the same shapes and weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from importlib import util
from time import perf_counter
from typing import Any

import torch

from benchmarks.cuda.models import Model, prompt_of
from benchmarks.cuda.shapes import Shape
from benchmarks.cuda.timing import Lab
from benchmarks.cuda.weights import MadeWeights
from specdec.measuring.runs import generate

SETTINGS: dict[str, dict[str, Any]] = {
    "static cache, compiled": {"cache_implementation": "static"},
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}
"""Settings to try ``generate`` with, most promising first; the fastest counts."""
SKIPPED_STEPS = 4  # uncounted first steps: prompt and graph warm-up


def hf_model(shape: Shape, lab: Lab, dtype: torch.dtype) -> Any:
    """transformers' model of a shape with our weights in it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(shape.config)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device(lab.place):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)  # type: ignore[no-untyped-call]
    weights = MadeWeights(shape, lab.place, dtype=dtype)
    filled = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            canonical = name.removeprefix("model.")
            parameter.copy_(weights[canonical])
            filled.add(canonical)
    left = {name for name in weights if not name.startswith("mtp.")} - filled
    if left - {"lm_head.weight"}:
        raise AssertionError(f"transformers has no place for {sorted(left)[:3]}")
    return model.eval()


class Theirs:
    """``generate`` at one setting; seconds per token from a timestamp after every step."""

    def __init__(self, model: Any, lab: Lab, settings: dict[str, Any]) -> None:
        from transformers import StoppingCriteria

        class Stamps(StoppingCriteria):
            """Never stops; records the time of every step."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                lab.synchronise()
                self.times.append(perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        self._model, self._lab, self._settings, self._stamps = model, lab, settings, Stamps

    def run(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Tokens per second after the first steps, and the tokens."""
        stamps = self._stamps()
        ids = torch.tensor([list(prompt)], device=self._lab.place)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                stopping_criteria=[stamps],
                pad_token_id=0,
                eos_token_id=None,
                **self._settings,
            )
        skipped = min(SKIPPED_STEPS, len(stamps.times) - 2)
        counted = stamps.times[skipped:]
        return (len(counted) - 1) / (counted[-1] - counted[0]), out[0, len(prompt) :].tolist()


def beside_transformers(
    model: Model, depth: int, out: dict[str, Any], write: Callable[[], None], *, tokens: int, repeats: int
) -> None:
    """Our tokens per second, plain and speculative, and ``generate``'s at each setting, interleaved."""
    import transformers

    shape, lab = model.shape, model.lab
    prompt = prompt_of(shape, shape.context)
    capacity = shape.context + tokens + 24
    ours = {
        "plain": model.pipeline("none", 0, capacity=capacity),
        "speculative": model.pipeline("mtp", depth, capacity=capacity),
    }
    theirs = hf_model(shape, lab, model.dtype)
    out |= {
        "transformers": transformers.__version__,
        "depth": depth,
        "tokens": tokens,
        "context": shape.context,
        "kernel_packages": {name: util.find_spec(name) is not None for name in ("fla", "causal_conv1d", "kernels")},
        "settings": {},
        "skipped": {},
    }
    for setting, options in SETTINGS.items():
        if "compiled" in setting and not lab.real:
            out["skipped"][setting] = "compiling takes minutes, and its speed without a device says nothing"
            continue
        began = perf_counter()
        arm = Theirs(theirs, lab, options)
        try:
            for _ in range(2 if lab.real else 1):
                arm.run(prompt, tokens)
        except Exception as error:  # noqa: BLE001  a setting that this model does not support
            out["skipped"][setting] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        warm_up = perf_counter() - began
        rates: dict[str, list[float]] = {"plain": [], "speculative": [], "theirs": []}
        for _ in range(repeats):
            for name in ("plain", "speculative", "theirs", "theirs", "speculative", "plain"):
                if name == "theirs":
                    rate, generated = arm.run(prompt, tokens)
                else:
                    run = generate(ours[name], prompt, max_new_tokens=tokens)
                    rate = run.rate
                    if name == "plain":
                        expected = list(run.tokens)
                rates[name].append(rate)
        middle = {name: statistics.median(values) for name, values in rates.items()}
        out["settings"][setting] = {
            "warm_up_seconds": warm_up,
            "tokens_per_second": middle,
            "spread": {name: [min(values), max(values)] for name, values in rates.items()},
            "ratio": {name: middle[name] / middle["theirs"] for name in ours},
            "same_tokens": sum(a == b for a, b in zip(expected, generated, strict=False)) / max(1, len(generated)),
        }
        write()
    if out["settings"]:
        best = max(out["settings"], key=lambda name: out["settings"][name]["tokens_per_second"]["theirs"])
        out["best_setting"] = best
        out["ratio"] = out["settings"][best]["ratio"]
    write()
