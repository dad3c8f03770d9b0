"""specdec's loop for a model of transformers: ``model.generate(ids, custom_generate=specdec_transformers.generate)``.

``generate`` of transformers prepares everything (processors, stopping criteria, settings); then specdec drafts,
verifies, decides and commits on the model, with any drafter and verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from specdec.config import Choice, RunConfig, TargetConfig, structure_options
from specdec.contract import Context, LogitsProcessor, PrepareEnv, Sampling
from specdec.decoding.cycle import run_cycle
from specdec.decoding.result import RunStats
from specdec.decoding.sequence import LiveSequence, prefill
from specdec.errors import ConfigError, UnsupportedError, shown
from specdec.hosting import TraceWriter
from specdec.models.loading import load_target
from specdec.registry.parts import DrafterPart, make_verifier
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec_transformers.forward_pass import TransformersPass
from specdec_transformers.loading import model_info
from specdec_transformers.model import Model
from specdec_transformers.probe import prove

if TYPE_CHECKING:
    from specdec.contract import Float32, ForwardPass

_FACTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@attrs.define(eq=False)
class _Wrapped:
    """A model as specdec's target, and the drafters prepared for it."""

    target: TransformersPass
    parts: dict[str, DrafterPart] = attrs.field(factory=dict)


_KEPT = "_specdec_target"  # in the model's own dictionary, so that it lives as long as the model


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    drafter: str | Mapping[str, Any] = "ngram",
    verifier: str | Mapping[str, Any] = "strict",
    depth: int = 4,
    report: dict[str, Any] | None = None,
    trace: str | Path | None = None,
    text_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The callable for ``custom_generate``: specdec's loop on ``model``, for a batch of one.

    Args:
        drafter, verifier: a name, or a mapping with ``name`` and options.
        depth: draft tokens per cycle, at most.
        report: a dictionary that receives the counters of the run.
        trace: a file to record drafts and commits in.
        text_tokenizer: a ``specdec.text.Tokenizer`` of the model, for drafters with a model of their own.
        logits_processor, stopping_criteria, generation_config, model_kwargs: from ``model.generate``. The processors
            include temperature, top-k and all others, and run on every verified row. Sampling noise is specdec's; its
            seed comes from torch's generator, so that ``torch.manual_seed`` repeats a run.

    Raises: UnsupportedError or ConfigError, with the reason, for what this loop cannot do.
    """
    _check(input_ids, generation_config, model_kwargs, depth)
    target, part = _prepared(model, _choice(drafter, "drafter"), text_tokenizer)
    chosen = make_verifier(_choice(verifier, "verifier"))
    prompt: list[int] = input_ids[0].tolist()
    sample = bool(generation_config.do_sample)
    sampling = Sampling(
        temperature=1.0 if sample else 0.0,
        seed=int(torch.randint(2**62, (1,)).item()) if sample else 0,
        processors=(Processors(logits_processor, input_ids.device),) if logits_processor else (),
    )
    limit = min(target.info.max_positions, int(generation_config.max_length or target.info.max_positions))
    state = target.new_state(max(limit, len(prompt) + 1), part.needs)
    tokens = list(prompt)
    sequence = LiveSequence(
        target=target,
        state=state,
        drafter=part.make(target, state),
        verifier=chosen,
        tokens=tokens,
        context=Context(tokens, sampling, generated_from=len(prompt), draft_noise=chosen.draft_noise),
    )
    stats = RunStats(drafter=part.spec.name)
    ended = False

    def cut(emitted: Sequence[int]) -> int:
        nonlocal ended
        for taken in range(1, len(emitted) + 1):
            so_far = torch.tensor([[*tokens, *emitted[:taken]]], device=input_ids.device)
            if stopping_criteria is not None and bool(stopping_criteria(so_far, None).all()):
                ended = True
                return taken
        return len(emitted)

    writer, request = None, 0
    if trace is not None:
        name = str(getattr(model.config, "_name_or_path", ""))
        choice = _choice(drafter, "drafter")
        writer = TraceWriter(
            trace, host="specdec on transformers", drafter=choice, vocab_size=target.info.vocab_size, model=name
        )
        request = writer.begin(prompt)
    prefill(sequence, stats)
    while not ended and len(tokens) < limit:
        record = run_cycle(sequence, max(0, min(depth, target.info.max_rows - 1, limit - len(tokens) - 1)), cut, stats)
        if writer is not None:
            writer.cycle(request, record)
    stats.inactive_reason = sequence.failure
    if writer is not None:
        writer.close()
    if report is not None:
        report.update(stats.to_dict(), guarantee=chosen.guarantee.value, notices=list(target.notices))
    sequences = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


class Processors(LogitsProcessor):
    """transformers' logits processors on one row; they see the row's own history."""

    def __init__(self, processors: Any, device: torch.device) -> None:
        self._processors, self._device = processors, device

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        scores = torch.from_numpy(logits.copy())[None].to(self._device)
        ids = torch.tensor([list(history)], device=self._device)
        changed: Float32 = self._processors(ids, scores)[0].float().cpu().numpy()
        return changed


def _check(input_ids: Tensor, settings: Any, model_kwargs: Mapping[str, Any], depth: object) -> None:
    if (settings.num_beams or 1) > 1 or (settings.num_return_sequences or 1) > 1:
        raise UnsupportedError("specdec's loop decodes one sequence: no beams, one return sequence")
    if input_ids.shape[0] != 1:
        raise UnsupportedError(
            f"specdec's loop takes a batch of 1, got {input_ids.shape[0]} rows", try_="one call per prompt"
        )
    if type(depth) is not int or depth < 0:
        raise ConfigError(f"depth is how many tokens to draft at most, 0 or more, got {shown(depth)}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError(
            "the prompt is padded, which specdec's loop does not read", try_="a prompt without padding"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise UnsupportedError("past_key_values is filled, and specdec's loop keeps a cache of its own")
    asked = [name for name in _FACTS if settings.return_dict_in_generate and getattr(settings, name, False)]
    if asked:
        raise UnsupportedError(f"specdec's loop does not give {asked[0]}", try_=f"{asked[0]}=False")


def _choice(given: str | Mapping[str, Any], table: str) -> Choice:
    return structure_options({"name": given} if isinstance(given, str) else given, Choice, table)


def _prepared(model: Any, choice: Choice, tokenizer: Any) -> tuple[TransformersPass, DrafterPart]:
    """The model as a target, and the drafter; both are kept for the next call."""
    wrapped: _Wrapped | None = model.__dict__.get(_KEPT)
    if wrapped is None:
        own = Model(model)
        with torch.no_grad():
            template, _ = prove(own)
        wrapped = model.__dict__[_KEPT] = _Wrapped(TransformersPass(model_info(own), own, template, None, ()))
    target = wrapped.target
    key = repr((choice.name, sorted(choice.options.items(), key=str), id(tokenizer)))
    part = wrapped.parts.get(key)
    if part is None:
        part = DrafterPart.of(choice).prepared(PrepareEnv(target=target, tokenizer=tokenizer, load=_load))
        unmet = part.needs.unmet(target.info)
        if unmet is not None:
            raise UnsupportedError(f"the drafter {choice.name!r} cannot run here: it needs {unmet}")
        wrapped.parts[key] = part
    return target, part


def _load(asked: TargetConfig) -> tuple[ForwardPass, Any]:
    loaded = load_target(RunConfig(target=asked))
    return loaded.target, loaded.tokenizer
