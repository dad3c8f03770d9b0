"""The weights that a family's ``build`` takes: from a checkpoint, or from a dry run that reads no data.

Only ``build`` names a family's tensors. A dry run calls it to learn their names and shapes, for the weight check of a
checkpoint or for a ``config.json`` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from specdec.backends.ops import Array, Ops
from specdec.checkpoints import StoredWeights, TensorSpec
from specdec.checkpoints.quantised import StoredMatrix
from specdec.checkpoints.weight_check import stripped_head
from specdec.contract import ModelSpec
from specdec.errors import CheckpointError, shown
from specdec.registry import calling

Shape = tuple[int, ...]
# A dry run follows config.json alone, so it ends here. A model may lack the weights of whole layers and still be
# described; DeepSeek-V3 has 46,000 weights.
_MORE_TENSORS = 100_000  # beyond twice those in the files
_MOST_TENSORS = 10**6  # without files
_LARGEST_TENSOR = 2**48  # values


@attrs.frozen
class Weights:
    """Weights by name and shape, as a backend's ops take them.

    Methods that take a name also take the shape that ``config.json`` implies. In a dry run tensors have that shape and
    no data (``device="meta"``): a family may slice, reshape and transpose them but not read their values.

    Attributes:
        ops: the backend's; in a dry run they return their inputs.
        stored: the checkpoint's weights; None in a dry run of a config alone.
        prefix: prepended to every name.
        group: "mtp" for the tensors of an MTP head, without which the model still runs.
        headless: why the MTP head must be left out; "" if it may be used.
        heads: the prefixes of the MTP modules that were asked for,
        reasons: and why each of those left out is.
    """

    ops: Ops
    stored: StoredWeights | None
    prefix: str = ""
    group: str = "model"
    headless: str = ""
    heads: list[str] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)

    def under(self, prefix: str) -> Weights:
        """The weights whose names start with ``prefix``, under the rest of their names."""
        return attrs.evolve(self, prefix=self.prefix + prefix)

    # --- for the ops -----------------------------------------------------------------------------------------------

    def matrix(self, name: str, shape: Shape, *, exact: bool = False) -> Array:
        """A weight as ``Ops.weight`` returns it: a matrix, or a bias.

        ``target.weights`` does not round an ``exact`` one: a router or a gate, which is small and decides much.
        """
        return self.ops.weight(self.host_matrix(name, shape, exact=exact))

    def table(self, name: str, shape: Shape) -> Array:
        """A matrix as ``Ops.table`` returns it. ``target.weights`` does not round it: its rows are read one by one."""
        return self.ops.table(self.host_matrix(name, shape, exact=True))

    def optional(self, name: str, shape: Shape) -> Array | None:
        """``matrix``, or None if the checkpoint has none of that name."""
        return self.matrix(name, shape) if name in self else None

    def vector(self, name: str, shape: Shape, *, plus: float = 0.0) -> Array:
        """A small float32 parameter as ``Ops.vector`` returns it, with ``plus`` added."""
        return self.ops.vector(self.tensor(name, shape), plus=plus)

    def number(self, name: str) -> float:
        """A weight of one value, ``[1]``; 1.0 in a dry run."""
        value = self.tensor(name, (1,))
        return 1.0 if value.is_meta else value.item()

    def split(self, name: str, rows: Sequence[int], *width: int) -> list[Array]:
        """The matrices ``[n, *width]`` that one weight holds, one below the other, for n in ``rows``; or biases."""
        fused, ends = self.host_matrix(name, (sum(rows), *width)), itertools.accumulate(rows)
        return [self.ops.weight(fused[end - count : end]) for count, end in zip(rows, ends, strict=True)]

    def stack(self, names: str | Sequence[str], shape: Shape) -> Array:
        """Matrices as ``Ops.stack`` returns them, from one weight ``[E, N, K]`` or several ``[N, K]``."""
        return self.ops.stack(self.host_matrices(names, shape))

    # --- on the host, for rearranging before they go to the ops -------------------------------------------------------

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """A decoded weight. Raises: CheckpointError if it is missing or cannot be read."""
        return self._stored[self.prefix + name]

    def host_matrix(self, name: str, shape: Shape, *, exact: bool = False) -> torch.Tensor | StoredMatrix:
        """A matrix, packed if the backend computes with its format. Raises: likewise."""
        return self._stored.matrix(self.prefix + name, exact=exact)

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

        A head that the config promises and the files lack is left out.

        Args:
            prefix: of the head's tensors.
            promised: the config says that there is a head; otherwise its tensors decide.
            unusable: why an existing head cannot be used; "" if it can.
        """
        head = attrs.evolve(self.under(prefix), group="mtp")
        self.heads.append(head.prefix)
        if self.stored is None:
            return head
        present = any(name.startswith(head.prefix) for name in self.stored)
        if not present and not promised:
            return None
        reason = self.headless or (unusable if present else stripped_head(self.stored.checkpoint, head.prefix))
        if not reason:
            return head
        self.reasons.append(reason)
        return None

    def head_converted(self, converted: bool) -> bool:
        """Whether mlx-lm converted the MTP head, in a checkpoint of which it ``converted`` the layers or not."""
        stored = None if self.stored is None else self.stored.checkpoint.head.converted
        return converted if stored is None else stored


@attrs.frozen
class Recorder(Weights):
    """Records requested names and shapes, and returns tensors without data."""

    tensors: dict[str, TensorSpec] = attrs.field(factory=dict)

    def _noted(self, name: str, shape: Shape, *, rounds: bool = False, plus: float = 0.0) -> torch.Tensor:
        self.tensors[self.prefix + name] = TensorSpec(shape, self.group, rounds, plus)
        most = _MOST_TENSORS if self.stored is None else 2 * len(self.stored) + _MORE_TENSORS
        if len(self.tensors) > most:
            held = "" if self.stored is None else f", and the files hold {len(self.stored)}"
            raise CheckpointError(
                f"config.json describes a model of more than {most} weights{held}",
                try_="config.json and weights of one and the same model",
            )
        if math.prod(shape) > _LARGEST_TENSOR:
            raise CheckpointError(f"config.json implies the shape {shown(list(shape))} for the tensor {name}")
        return torch.empty(shape, device="meta")

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self._noted(name, shape)

    def vector(self, name: str, shape: Shape, *, plus: float = 0.0) -> Array:
        return self._noted(name, shape, plus=plus)

    def host_matrix(self, name: str, shape: Shape, *, exact: bool = False) -> torch.Tensor:
        return self._noted(name, shape, rounds=not exact)

    def host_matrices(self, names: str | Sequence[str], shape: Shape) -> Sequence[torch.Tensor]:
        if isinstance(names, str):
            return self._noted(names, shape, rounds=True).unbind()
        return [self._noted(name, shape, rounds=True) for name in names]


class NoOps:
    """Returns its inputs."""

    def weight(self, tensor: Any) -> Any:
        return tensor

    stack = table = weight

    def vector(self, tensor: Any, *, plus: float = 0.0) -> Any:
        return tensor


@attrs.frozen
class DryRun:
    """What ``build`` needs.

    Attributes:
        tensors: canonical name -> spec.
        headless: why the MTP head that the config promises is left out; "" otherwise.
        head_prefixes: what the names of the MTP head's tensors begin with; none for a model without one.
    """

    tensors: Mapping[str, TensorSpec]
    headless: str = ""
    head_prefixes: tuple[str, ...] = ()


def dry_run(spec: ModelSpec, config: Any, stored: StoredWeights | None = None, *, headless: str = "") -> DryRun:
    """Build a family's model without data.

    Args:
        spec: the family's.
        config: the result of ``spec.parse``.
        stored: a checkpoint's weights, whose names decide between layouts; the family's usual layout without them.
        headless: why the MTP head must be left out.
    """
    ops: Any = NoOps()
    weights = Recorder(ops, stored, headless=headless)
    with calling(spec, "build"):
        spec.build(config, weights)
    return DryRun(weights.tensors, "".join(weights.reasons[:1]), tuple(weights.heads))
