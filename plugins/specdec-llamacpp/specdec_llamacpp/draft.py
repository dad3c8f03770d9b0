"""``SpecdecDraft``: a draft model of llama-cpp-python that runs a drafter of specdec.

``Llama`` verifies: it draws its own token at every position and keeps a draft token if it drew the same. It calls its
draft model with all tokens, and with nothing else; the vocabulary is that of the ``Llama`` that calls.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from specdec.config import Choice
from specdec.errors import ConfigError, UnsupportedError, shown
from specdec.hosting import HostedDrafter, chosen_drafter, chosen_tokenizer, host_info, named_part, supported

from specdec_llamacpp.rollback import check_rollback

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel
    from numpy.typing import NDArray
else:
    LlamaDraftModel = object  # Llama only calls it; importing the host would load its library

HOST = "llama-cpp-python"
FIRST, END = "0.3.36", "0.4"


class SpecdecDraft(LlamaDraftModel):  # type: ignore[misc]
    """A drafter for one ``Llama``, as its ``draft_model``.

    Args:
        drafter: a name, or a mapping with ``name`` and options; None for what the environment names.
        depth: draft tokens per pass, at most.
        tokenizer: the model's tokenizer, for drafters with a model of their own: a ``specdec.text.Tokenizer``, or the
            folder of a ``tokenizer.json``.
        trace: a file to record drafts and commits in.
        **options: the drafter's options.

    Raises: the errors of an unknown name or wrong options, and UnsupportedError for a version of llama-cpp-python that
        is not supported and for a drafter that needs more than tokens. What depends on the model is checked at the
        first draft.
    """

    def __init__(
        self,
        drafter: str | Mapping[str, Any] | None = None,
        *,
        depth: int = 8,
        tokenizer: Any = None,
        trace: str | Path | None = None,
        **options: Any,
    ) -> None:
        supported(["llama-cpp-python"], FIRST, END, "this adapter is written for other versions")
        if type(depth) is not int or depth < 1:
            raise ConfigError(f"depth is how many tokens to draft at most, 1 or more, got {shown(depth)}")
        named = chosen_drafter(drafter)
        self._choice = Choice(named.name, {**named.options, **options})
        named_part(self._choice, host_info(HOST, 1, 1))
        self._depth, self._trace = depth, trace
        self._tokenizer = chosen_tokenizer(tokenizer)
        self._hosted: HostedDrafter | None = None
        self._llm: weakref.ref[Any] | None = None

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Draft tokens after ``input_ids`` [T]: at most ``depth``, all of the vocabulary.

        Raises: UnsupportedError at the first draft, for a ``Llama`` that cannot verify drafts; a drafter's own errors
            are logged and never raised.
        """
        llm = sys._getframe(1).f_locals.get("self")  # nothing else says which Llama calls
        if self._llm is None or self._llm() is not llm:
            self._begin(llm)
        if self._hosted is None:
            if llm is None or llm.n_tokens < 2:  # nothing to try a rollback with
                return np.zeros(0, np.intc)
            self._hosted = self._made(llm)
        return np.array(self._hosted.one(input_ids, self._depth), np.intc)

    def report(self) -> dict[str, Any]:
        """Acceptance by position, what was cut, and why nothing was drafted; empty before the first draft."""
        return {} if self._hosted is None else self._hosted.report()

    def close(self) -> None:
        """End the recording."""
        if self._hosted is not None:
            self._hosted.close()

    def _begin(self, llm: Any) -> None:
        """Belong to the ``Llama`` that calls. Raises: UnsupportedError if another one has this object already."""
        if getattr(llm, "draft_model", None) is not self:
            raise UnsupportedError(
                "SpecdecDraft was called by something else than the Llama whose draft_model it is",
                try_="Llama(..., draft_model=SpecdecDraft(...))",
            )
        if self._llm is not None and self._llm() is not None:
            raise UnsupportedError("SpecdecDraft belongs to another Llama", try_="a SpecdecDraft for each Llama")
        self.close()
        self._hosted, self._llm = None, weakref.ref(llm)

    def _made(self, llm: Any) -> HostedDrafter:
        vocab_size, context = int(llm.n_vocab()), int(llm.n_ctx())
        if len(llm.scores) < context:
            raise UnsupportedError(
                f"Llama keeps logits of {len(llm.scores)} tokens and decodes texts of {context}; with a draft model it "
                "needs those of all",
                try_="Llama(..., logits_all=True)",
            )
        check_rollback(llm, self._depth)
        return HostedDrafter(
            self._choice,
            host_info(HOST, vocab_size, context),
            tokenizer=self._tokenizer,
            sessions=8,
            trace=self._trace,
            model=Path(llm.model_path).name,
        )
