"""Released models: speed, acceptance, equality with plain decoding, and agreement with transformers and llama.cpp.

    python -m benchmarks.released MODEL ... [--draft TARGET DRAFT] [--drafters ngram suffix] [--depths 2 4 8]
        [--per-class 11] [--tokens 200] [--dtype auto] [--transformers] [--peer PYTHON] [--json FILE]
        [--page docs/released-models.md]

MODEL is a GGUF file, a folder or a hub id; ``tools/fetch_models.py`` fetches four files. Prompts are those of
``tasks.jsonl``, in the model's chat template if it has one. Plain decoding, default settings, and every drafter at
every depth take turns on each prompt, with the same weights, after a short run of each that is not counted; DRAFT is a
draft model for the MODEL called TARGET. ``--transformers`` (needs `gguf` and `accelerate`) decodes the weights to
float32 there and asks, with our tokens given, which token is the best at every position. ``--peer`` is the Python of an
environment with llama-cpp-python and numpy, which decodes the same files plainly. The exit status is 1 if a run differs
from plain.
"""

from __future__ import annotations

import argparse
import operator
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

import specdec
from benchmarks.common import Tally, in_turns, llama_cpp, machine, median, save
from benchmarks.released_page import WITH_DRAFT, page
from specdec.checkpoints import locate
from specdec.config import Choice, TargetConfig
from specdec.contract import PrepareEnv
from specdec.measuring import choose_prompts, load_prompts
from specdec.measuring.prompts import Prompt
from specdec.measuring.runs import plain
from specdec.registry.parts import DrafterPart

TASKS = Path(__file__).with_name("tasks.jsonl")
CONTEXT = 4096  # tokens of a prompt and its answer in llama.cpp
LONG_PROMPT = 512  # tokens

LOADING = """
import sys, specdec
from benchmarks.common import resident_bytes, seconds
specdec.load("demo")  # libraries and kernels are not the model's memory
before, kept = resident_bytes(), []
def load():
    kept.append(specdec.load(sys.argv[1], dtype=sys.argv[2]))
    kept[0].generate([1], max_new_tokens=1)
print(seconds(load), resident_bytes() - before)
"""

Texts = list[tuple[list[int], list[int]]]  # prompts, and what plain decoding answers


def measure(model: str, prompts: dict[str, list[Prompt]], options: Any) -> tuple[dict[str, Any], Texts]:
    """What the page says of one model, but for its agreement with transformers, which takes the texts."""
    load_seconds, memory = loading(model, options.dtype)
    lm = specdec.load(model, dtype=options.dtype)
    arms: dict[str, tuple[Any, int | None]] = {"plain": (plain(lm), None), "default": (lm, None)}
    draft = {str(locate(target)): draft for target, draft in options.draft}.get(model)
    if draft:
        arms[WITH_DRAFT] = specdec.load(model, dtype=options.dtype, drafter={"model": draft}), None
    choices = [Choice(name) for name in options.drafters]
    for choice in [*choices, Choice("draft_model", {"model": draft})] if draft else choices:
        drafting = with_drafter(lm, choice)
        arms |= {f"{choice.name} {depth}": (drafting, depth) for depth in options.depths}
    for arm, depth in arms.values():
        arm.generate("once more", max_new_tokens=8, depth=depth)
    theirs = llama_cpp(options.peer, CONTEXT) if options.peer else None
    tasks: dict[str, Any] = {}
    texts: Texts = []
    runs, differing, gaps, their_load = 0, [], [], 0.0
    for task, chosen in prompts.items():
        tallies, waits = {arm: Tally() for arm in (*arms, *["llama.cpp"] * bool(theirs))}, []
        for number, prompt in enumerate(chosen):
            ids, answers = prompt.encode(lm.tokenizer), {}
            for name in arms if number % 2 == 0 else reversed(arms):
                arm, depth = arms[name]
                result, first = generated(arm, ids, max_new_tokens=options.tokens, depth=depth)
                tallies[name].add(result, result.stats.decode_seconds)
                answers[name] = result.tokens
                waits += [first] * (name == "default")
            wanted = answers["plain"]
            differing += [f"{name}, {prompt.name}" for name, tokens in answers.items() if tokens != wanted]
            runs, texts = runs + len(arms) - 1, [*texts, (ids, wanted)]
            if theirs is not None:
                answer = theirs.ask("generate", model, ids, len(wanted))
                tallies["llama.cpp"].tokens += len(wanted)
                tallies["llama.cpp"].seconds += answer["seconds"]
                their_load = answer["load_seconds"]
                if answer["tokens"] != wanted:
                    gaps.append(behind(lm, ids, wanted, answer["tokens"]))
        arms_told = {name: attrs.asdict(tally) for name, tally in tallies.items()}
        tasks[task] = {"prompts": len(chosen), "first_token_seconds": median(waits), "arms": arms_told}
    long: dict[str, float] = {}
    if theirs is not None:
        ids = ([token for pair in texts for part in pair for token in part] * LONG_PROMPT)[:LONG_PROMPT]
        sides = {
            "ours": lambda: generated(arms["plain"][0], ids, max_new_tokens=1)[1],
            "theirs": lambda: theirs.ask("generate", model, ids, 1)["first_seconds"],
        }
        times = in_turns(sides, 3, warm_up=1, measure=operator.call)
        long = {side: median(seconds) for side, seconds in times.items()}
        theirs.close()
    size = file_bytes(locate(model))
    facts = {"bytes": size, "weights": lm.info.weights, "dtype": lm.info.dtype, "family": lm.info.family}
    facts |= {"tokens": options.tokens, "draft_model": Path(draft).name if draft else None}
    facts |= {"load_seconds": load_seconds, "memory_over_file_size": memory / size, "tasks": tasks}
    facts |= {"runs": runs, "differing": differing, "chat": lm.tokenizer.has_chat_template}
    if options.peer:
        facts["llama_cpp"] = {**agreement(len(texts), gaps), "load_seconds": their_load}
        facts["long_prompt_seconds"] = long
    return facts, texts


def loading(model: str, dtype: str) -> tuple[float, float]:
    """Seconds to the first token and bytes of a load in a process of its own, the second time: the first may measure
    costs."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", LOADING, model, dtype], check=True, stdout=subprocess.PIPE)
    seconds, added = map(float, done.stdout.split())
    return seconds, added


def with_drafter(lm: Any, choice: Choice) -> Any:
    """``lm`` with another drafter, over the same weights."""

    def load(asked: TargetConfig) -> tuple[Any, Any]:
        draft = specdec.load(asked.model, drafter="none")
        return draft.target, draft.tokenizer

    env = PrepareEnv(target=lm.target, tokenizer=lm.tokenizer, load=load)
    return attrs.evolve(lm, drafter=DrafterPart.of(choice).prepared(env))


def generated(lm: Any, ids: list[int], **settings: Any) -> tuple[Any, float]:
    """The result of a greedy generation, and the seconds to its first token."""
    cycles: list[float] = []
    started = perf_counter()
    stream = lm.stream(ids, **settings)
    stream.on_cycle = lambda cycle: cycles.append(perf_counter())
    return stream.result, cycles[0] - started


def file_bytes(path: Path) -> int:
    """Bytes of a GGUF file, or of a folder's weights."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))


def agreement(texts: int, gaps: Sequence[float]) -> dict[str, Any]:
    """How many texts are equal, and the gaps in nats where the others part."""
    return {"texts": texts, "agree": texts - len(gaps), "gaps_at_the_first_difference": list(gaps)}


def behind(lm: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far the first other token is below ours, by our probabilities, in nats."""
    at = next(index for index, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other)
    every = lm.generate([*prompt, *ours[:at]], max_new_tokens=1, logprobs=lm.info.vocab_size).logprobs[0]
    logprob = dict(every.top)
    return float(logprob[ours[at]] - logprob[theirs[at]])


def first_gaps(path: Path, texts: Texts) -> Iterator[float]:
    """How far the first token that is not transformers' best is below it, text by text; 0 if there is none."""
    from transformers import AutoModelForCausalLM

    named = {"gguf_file": path.name} if path.is_file() else {}
    model = AutoModelForCausalLM.from_pretrained(path.parent if named else path, dtype=torch.float32, **named)
    for prompt, tokens in texts:
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        gaps = rows.amax(1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        yield next((float(gap) for gap in gaps if gap > 0), 0.0)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--draft", nargs=2, action="append", default=[], metavar=("TARGET", "DRAFT"))
    parser.add_argument("--drafters", nargs="*", default=["ngram", "suffix"], metavar="NAME")
    parser.add_argument("--depths", nargs="+", type=int, choices=range(1, 9), default=[2, 4, 8], metavar="N")
    parser.add_argument("--per-class", type=int, default=11, metavar="N")
    parser.add_argument("--tokens", type=int, default=200, metavar="N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--peer", type=Path, metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    options.machine = machine()
    prompts = choose_prompts(load_prompts(TASKS, chat=True), per_class=options.per_class)
    for model in options.models:
        specdec.inspect_checkpoint(model)  # a model that cannot be read ends the run before it takes hours
    models: dict[str, Any] = {}
    for model in options.models:
        path = locate(model)
        models[path.name], texts = measure(str(path), prompts, options)
        if options.transformers:
            gaps = [gap for gap in first_gaps(path, texts) if gap > 0]
            models[path.name]["transformers"] = agreement(len(texts), gaps)
    save({"models": models}, options)
    if options.page is not None:
        options.page.write_text(page(options.machine, models), encoding="utf-8")
    if any(model["differing"] for model in models.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
