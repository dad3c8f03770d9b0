"""The weights that a family's ``build`` takes: from a checkpoint, or from a dry run that reads no data.

Only ``build`` names a family's tensors. A dry run calls it to learn their names and shapes, for the weight check of a
checkpoint or for a ``config.json`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from specdec.backends.ops import Array, Ops
from specdec.checkpoints import StoredWeights, TensorSpec
from specdec.checkpoints.quantised import StoredMatrix
from specdec.checkpoints.weight_check import converted_by_mlx_lm, promised_head
from specdec.contract import ModelSpec

Shape = tuple[int, ...]


@attrs.frozen
class Weights:
    """Weights by name and shape, as a backend's ops take them.

    Methods that take a name also take the shape that ``config.json`` implies. In a dry run tensors have that shape and
    no data (``device="meta"``): a family may slice, reshape and transpose them but not read their values.

    Attributes:
        ops: the backend's; in a dry run they return their inputs.
        stored: the checkpoint's weights; None in a dry run of a config alone.
        prefix: prepended to every name.
        group: "mtp" for the tensors of an MTP head, whose absence has its own explanation.
    """

    ops: Ops
    stored: StoredWeights | None
    prefix: str = ""
    group: str = "model"

    def under(self, prefix: str) -> Weights:
        """The weights whose names start with ``prefix``, under the rest of their names."""
        return attrs.evolve(self, prefix=self.prefix + prefix)

    # --- for the ops -----------------------------------------------------------------------------------------------

    def matrix(self, name: str, shape: Shape) -> Array:
        """A weight as ``Ops.weight`` returns it: a matrix, or a bias."""
        return self.ops.weight(self.host_matrix(name, shape))

    def optional(self, name: str, shape: Shape) -> Array | None:
        """``matrix``, or None if the checkpoint has none of that name."""
        return self.matrix(name, shape) if name in self else None

    def vector(self, name: str, shape: Shape, *, plus: float = 0.0) -> Array:
        """A small float32 parameter as ``Ops.vector`` returns it, with ``plus`` added."""
        return self.ops.vector(self.tensor(name, shape), plus=plus)

    def stack(self, names: str | Sequence[str], shape: Shape) -> Array:
        """Matrices as ``Ops.stack`` returns them, from one weight ``[E, N, K]`` or several ``[N, K]``."""
        return self.ops.stack(self.host_matrices(names, shape))

    # --- on the host, for rearranging before they go to the ops -------------------------------------------------------

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """A decoded weight. Raises: CheckpointError if it is missing or cannot be read."""
        return self._stored[self.prefix + name]

    def host_matrix(self, name: str, shape: Shape) -> torch.Tensor | StoredMatrix:
        """A matrix, packed if the backend computes with its format. Raises: likewise."""
        return self._stored.matrix(self.prefix + name)

    def host_matrices(self, names: str | Sequence[str], shape: Shape) -> Sequence[Any]:
        """The matrices of a stack, tensors or ``StoredMatrix``. Raises: likewise."""
        prefix = self.prefix
        return self._stored.matrices(prefix + names if isinstance(names, str) else [prefix + name for name in names])

    @property
    def _stored(self) -> StoredWeights:
        assert self.stored is not None, "only a dry run has no checkpoint"
        return self.stored

    # --- contents of the checkpoint -----------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a weight of that name; False in a dry run of a config alone."""
        return self.stored is not None and self.prefix + name in self.stored

    def shape_of(self, name: str) -> Shape | None:
        """The decoded shape of a weight in the checkpoint; None if there is none."""
        return self._stored.shape(self.prefix + name) if name in self else None

    def mtp_head(self, prefix: str, *, promised: bool = True, unusable: str = "") -> Weights | None:
        """The weights of the MTP head under ``prefix``, or None if the model is built without one.

        If the config promises a head and the files lack it, the weight check fails, unless mlx-lm converted the
        checkpoint: it always drops heads.

        Args:
            prefix: of the head's tensors.
            promised: the config says that there is a head; otherwise its tensors decide.
            unusable: why an existing head cannot be used; "" if it can.
        """
        head = attrs.evolve(self.under(prefix), group="mtp")
        if self.stored is None:
            return head
        present = any(name.startswith(head.prefix) for name in self.stored)
        if not present and not promised:
            return None
        reason = unusable if present else ""
        if not present and converted_by_mlx_lm(self.stored.formats):
            reason = f"{promised_head(self.stored.checkpoint, head.prefix)}; mlx-lm leaves them out"
        if not reason:
            return head
        self._leave_out_head(reason)
        return None

    def _leave_out_head(self, reason: str) -> None:
        """Record, in a dry run, why the head is left out."""


@attrs.frozen
class _Recorder(Weights):
    """Records requested names and shapes, and returns tensors without data."""

    tensors: dict[str, TensorSpec] = attrs.field(factory=dict)
    headless: list[str] = attrs.field(factory=list)

    def _note(self, name: str, shape: Shape) -> None:
        self.tensors[self.prefix + name] = TensorSpec(shape, self.group)

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        self._note(name, shape)
        return torch.empty(shape, device="meta")

    host_matrix = tensor

    def host_matrices(self, names: str | Sequence[str], shape: Shape) -> Sequence[torch.Tensor]:
        if isinstance(names, str):
            return self.tensor(names, shape).unbind()
        for name in names:
            self._note(name, shape)
        return [torch.empty(shape, device="meta")] * len(names)

    def _leave_out_head(self, reason: str) -> None:
        self.headless.append(reason)


class _NoOps:
    """Returns its inputs."""

    def weight(self, tensor: Any) -> Any:
        return tensor

    stack = weight

    def vector(self, tensor: Any, *, plus: float = 0.0) -> Any:
        return tensor


@attrs.frozen
class DryRun:
    """What ``build`` needs.

    Attributes:
        tensors: canonical name -> spec.
        headless: why the MTP head that the config promises is left out; "" otherwise.
    """

    tensors: Mapping[str, TensorSpec]
    headless: str = ""


def dry_run(spec: ModelSpec, config: Any, stored: StoredWeights | None = None) -> DryRun:
    """Build a family's model without data.

    Args:
        spec: the family's.
        config: the result of ``spec.parse``.
        stored: a checkpoint's weights, whose names decide between layouts; the family's usual layout without them.
    """
    ops: Any = _NoOps()
    weights = _Recorder(ops, stored)
    spec.build(config, weights)
    return DryRun(weights.tensors, "".join(weights.headless))
