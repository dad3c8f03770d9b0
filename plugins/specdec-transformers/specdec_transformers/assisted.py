"""Assisted generation with specdec's drafters: ``with candidates("suffix").on(model): model.generate(...)``.

transformers verifies: its own loop, its own sampling, its own cache. A drafter gets the tokens and, if it needs them,
hidden states of the rows that transformers has just computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from specdec.config import Choice
from specdec.contract import ForwardOutput, Needs
from specdec.errors import UnsupportedError
from specdec.hosting import HostedDrafter, chosen_drafter, chosen_tokenizer, host_info, supported
from specdec.logs import get_logger
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from specdec_transformers.arrays import TorchHidden
from specdec_transformers.loading import max_positions

log = get_logger(__name__)

FIRST, END = "5.20", "6"  # versions of transformers whose assisted generation this drives


def candidates(
    drafter: str | Mapping[str, Any] = "ngram",
    *,
    depth: int = 5,
    tokenizer: Any = None,
    trace: str | Path | None = None,
    **options: Any,
) -> Assisted:
    """A drafter for assisted generation.

    Args:
        drafter: a name, or a mapping with ``name`` and options.
        depth: draft tokens per pass, at most.
        tokenizer: the model's tokenizer, for drafters with a model of their own: a ``specdec.text.Tokenizer``, or the
            folder of a ``tokenizer.json``.
        trace: a file to record drafts and commits in.
        **options: the drafter's options.

    Raises: ConfigError for wrong options; UnsupportedError for a version of transformers that is not supported.
    """
    supported(["transformers"], FIRST, END, "its assisted generation is another one")
    choice = chosen_drafter(drafter)
    return Assisted(Choice(choice.name, {**choice.options, **options}), depth, chosen_tokenizer(tokenizer), trace)


class Assisted:
    """What ``candidates`` returns. ``on(model)`` makes the model's ``generate`` use it.

    Attributes:
        hosted: the drafter with its counters, from ``on``; None before.
    """

    def __init__(self, choice: Choice, depth: int, tokenizer: Any, trace: str | Path | None) -> None:
        self._choice, self._depth, self._tokenizer, self._trace = choice, depth, tokenizer, trace
        self.hosted: HostedDrafter | None = None

    def report(self) -> dict[str, Any]:
        """Acceptance by position, what was cut, and why nothing was drafted; empty before ``on``."""
        return {} if self.hosted is None else self.hosted.report()

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[Assisted]:
        """Let ``model.generate`` verify drafts, within the ``with`` block, for a batch of one.

        Raises: UnsupportedError for a model whose cache cannot take rows back, and for a drafter that needs what
        transformers does not give; and the drafter's own errors.
        """
        if getattr(model, "_is_stateful", False):
            raise UnsupportedError(
                f"{type(model).__name__} keeps a recurrent state, which assisted generation cannot take back",
                try_="model.generate(..., custom_generate=specdec_transformers.generate)",
            )
        config = model.config.get_text_config(decoder=True)
        layers = int(getattr(config, "num_hidden_layers", 0) or 0)
        info = host_info(
            "transformers",
            int(config.vocab_size),
            max_positions(model.config),
            hidden_size=int(config.hidden_size),
            layers=max(layers - 1, 0),  # the last boundary comes after the final norm only
            gives_hidden=True,
        )
        name = getattr(model.config, "_name_or_path", "")
        hosted = HostedDrafter(self._choice, info, tokenizer=self._tokenizer, trace=self._trace, model=name, sessions=8)
        self.hosted = hosted

        def generator(generation_config: Any, *arguments: Any, **named: Any) -> CandidateGenerator:
            return Generator(hosted, hosted.needs, layers, self._depth, int(generation_config.max_length))

        missing = object()
        own = model.__dict__.get("_get_candidate_generator", missing)
        before = model.generation_config.prompt_lookup_num_tokens
        model.__dict__["_get_candidate_generator"] = generator
        model.generation_config.prompt_lookup_num_tokens = self._depth  # selects assisted generation
        try:
            yield self
        finally:
            model.generation_config.prompt_lookup_num_tokens = before
            if own is missing:
                del model.__dict__["_get_candidate_generator"]
            else:
                model.__dict__["_get_candidate_generator"] = own
            if not hosted.asked:
                log.warning(
                    "drafter_unused",
                    drafter=hosted.name,
                    reason="generate was not called, or not for assisted generation",
                )
            hosted.close()


class Generator(CandidateGenerator):  # type: ignore[misc]
    """One call of ``generate``."""

    def __init__(self, hosted: HostedDrafter, needs: Needs, layers: int, depth: int, max_length: int) -> None:
        self._hosted, self._needs, self._layers = hosted, needs, layers
        self._depth, self._max_length = depth, max_length
        self._first = True
        self.requires_model_outputs = needs.hidden
        wanted = [*needs.boundaries, *([layers] if needs.final_hidden else [])]
        self.model_kwargs_overrides = {"output_hidden_states": wanted} if needs.hidden else {}

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: Any = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: Any = 0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        history = input_ids[0].tolist()
        if self._needs.hidden:
            if model_outputs is None:  # the first pass takes in the prompt
                self._hosted.forget()
                return input_ids, None
            accepted = int(n_last_matches)
            self._hosted.passed(history, *self._outputs(model_outputs, len(history), accepted))
        depth = min(self._depth, self._max_length - len(history) - 1)
        drafted = self._hosted.one(history, max(depth, 0))
        if not drafted:
            return input_ids, None
        draft = torch.tensor([drafted], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, draft], dim=1), None

    def _outputs(self, outputs: Any, length: int, accepted: int) -> tuple[ForwardOutput, int, ForwardOutput | None]:
        """The rows of the last pass as ``HostedDrafter.passed`` takes them."""
        states = {k: outputs.hidden_states[k][0] for k in self._needs.boundaries}
        final = outputs.hidden_states[self._layers][0] if self._needs.final_hidden else None
        rows = next(iter(states.values())).shape[0] if states else 0 if final is None else final.shape[0]
        before = length - 1 - accepted - 1  # rows of the prompt before the token that was pending
        first = before > 0 and rows > before and self._first
        self._first = False

        def part(start: int, end: int) -> ForwardOutput:
            return ForwardOutput(
                rows=end - start,
                hidden=None if final is None else TorchHidden(final[start:end]),
                boundaries={k: TorchHidden(array[start:end]) for k, array in states.items()},
            )

        if not first:
            return part(0, rows), accepted, None
        return part(before, rows), accepted, part(0, before)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing: what was accepted follows from the tokens."""
