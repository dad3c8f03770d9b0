"""transformers' multi-token-prediction layer as the head of specdec's drafter ``mtp``.

``transformers.modeling_layers.MtpModel`` builds, for a config with ``num_mtp_layers`` = K, K layers of
``eh_proj [enorm(embedding); hnorm(hidden)]``, the family's decoder layer and a norm, over the model's own embedding
and head. Layer k drafts token k + 1, reads a hidden state after the final norm, and returns one after its own norm.
With K = 1 this matches specdec's heads: the pair (h_j, x_{j+1}) is at position j + 1, and a chained step feeds back the
layer's own output. With K > 1 each layer is trained for one draft position and cannot be chained, so such a head is not
used, and a notice says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from specdec.errors import CheckpointError
from torch import Tensor

from specdec_transformers.model import Model, one_line


class MtpHead:
    """One MTP layer over a model's embedding and head.

    Attributes:
        template: a used cache: the layout of saved ones.
    """

    def __init__(self, model: Model, layers: Any) -> None:
        self._model = model
        self._layers = layers
        self.template = self.new_cache()
        hidden = torch.zeros(
            1,
            model.network.config.get_text_config(decoder=True).hidden_size,
            dtype=model.network.dtype,
            device=model.device,
        )
        self.run(self.template, [0], hidden, 0)

    def new_cache(self) -> Any:
        """An empty cache of true pairs."""
        from transformers.cache_utils import MtpCache

        return MtpCache(config=self._model.network.config.get_mtp_config())

    @torch.no_grad()
    def run(self, cache: Any, tokens: Sequence[int], hidden: Tensor, held: int) -> Tensor:
        """Append pairs to a cache of ``held`` pairs, in place; returns hidden states ``[T, H]`` after the layer's norm.

        Args:
            tokens: T token ids; ``tokens[t]`` follows the token whose hidden state is ``hidden[t]``.
            hidden: ``[T, H]``, after the model's final norm.
        """
        device = self._model.device
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
        positions = torch.arange(held + 1, held + 1 + len(tokens), device=device)[None]
        after: Tensor = self._layers.forward_layer(0, hidden[None], positions, cache, input_ids=ids)
        return after[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[T, V]`` of hidden states ``[T, H]`` after the layer's norm."""
        logits: Tensor = self._layers._project_to_logits(hidden[None])[0]
        return logits


def load_head(model: Model, names: Iterable[str], folder: Any) -> tuple[MtpHead | None, str]:
    """The head of a loaded model, or the reason why there is none although the config names one.

    Raises: CheckpointError that names the missing tensors of an incomplete head.
    """
    network = model.network
    count = layers_named(network.config)
    pattern = head_pattern(network.config)
    stored = sorted(name for name in names if pattern.search(name))
    if not count:
        kind = network.config.model_type
        unused = f"the MTP head of the checkpoint ({stored[0]}, ...) was not used" if stored else ""
        return None, unused and f"{unused}: transformers has no MTP layer for {kind}"
    if not stored:
        return None, f"the config names {count} MTP layer(s), the checkpoint has no tensor of them"
    if count > 1:
        return None, f"the {count} MTP layers were not used: they draft one token each, specdec drives one layer"
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        return None, "the MTP layer was not used: this version of transformers has no MtpModel (5.23 has)"
    # transformers finds the tensors by the layer numbers of the published sizes; use the number in this config instead
    listed = network._keys_to_ignore_on_load_unexpected
    network._keys_to_ignore_on_load_unexpected = [pattern.pattern]
    try:
        layers: Any = MtpModel.from_pretrained(network, device_map={"": model.device})
    except Exception as error:
        missing = _missing_of(str(error))
        raise CheckpointError(
            f"the MTP head of this checkpoint is not complete: {missing}"
            if missing
            else f"transformers cannot load the MTP head of this checkpoint: {one_line(error)}",
            folder=folder,
            found=f"{len(stored)} tensors of it, such as {stored[0]}",
            try_="the complete checkpoint, or one without any tensor of the head (it then loads without it)",
        ) from error
    finally:
        network._keys_to_ignore_on_load_unexpected = listed
    layers.eval()
    return MtpHead(model, layers), ""


def layers_named(config: Any) -> int:
    """The number of MTP layers that a config names in transformers' terms; 0 if it has no such field."""
    return int(getattr(config.get_text_config(decoder=True), "num_mtp_layers", None) or 0)


def head_pattern(config: Any) -> re.Pattern[str]:
    """Matches the checkpoint's names of MTP tensors: layers after the last one, or under ``mtp``."""
    text = config.get_text_config(decoder=True)
    first, count = getattr(text, "num_hidden_layers", None), layers_named(config)
    if not isinstance(first, int):
        return re.compile(r"(^|\.)mtp\.")
    numbers = "|".join(str(number) for number in range(first, first + max(count, 1)))
    return re.compile(rf"^((model|language_model)\.)*layers\.({numbers})\.|(^|\.)mtp\.")


def _missing_of(text: str) -> str:
    found = re.search(r"weights are missing from .*?: (\[.*\])", text, re.DOTALL)
    return f"it lacks {found.group(1)}" if found else ""
