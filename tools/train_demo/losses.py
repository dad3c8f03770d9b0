"""Cross entropy to a mixture of labels and a teacher, without keeping the logits.

The gradient is computed in the forward pass, some rows at a time, so that the logits of all rows never exist at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 512  # 512 rows of 4096 float32 logits are 8 MiB: small enough to stay in cache


def row_gradient(logits: Tensor, labels: Tensor, teacher_logits: Tensor, label_share: Tensor) -> tuple[Tensor, Tensor]:
    """Loss ``[N]`` and its gradient ``[N, V]`` by the logits, for the target ``a onehot + (1 - a) teacher``.

    ``label_share`` (a) is a 0-d tensor because torch.compile (2.13) mishandles a Python float that changes between
    calls: the loss was right, but the gradient silently used the older value.
    """
    log_probs = logits.float().log_softmax(-1)
    teacher = teacher_logits.float().softmax(-1) * (1 - label_share)
    picked = log_probs.gather(-1, labels[:, None])[:, 0]
    loss = -(teacher * log_probs).sum(-1) - label_share * picked
    gradient = log_probs.exp() - teacher
    return loss, gradient.scatter_add(-1, labels[:, None], -label_share.expand_as(picked)[:, None])


def label_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`row_gradient` with the labels alone."""
    log_probs = logits.float().log_softmax(-1)
    picked = log_probs.gather(-1, labels[:, None])[:, 0]
    return -picked, log_probs.exp().scatter_add(-1, labels[:, None], torch.full_like(picked, -1.0)[:, None])


class SoftCrossEntropy(torch.autograd.Function):
    """sum_n w_n CE(target_n, softmax(hidden_n weight^T)) / sum_n w_n, and the plain label loss for the log."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        row_weight: Tensor,
        teacher: Tensor | None,
        label_share: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """hidden, teacher ``[N, hidden]``, weight ``[V, hidden]``, labels ``[N]`` int64, row_weight ``[N]``."""
        matrix = weight.to(dtype)
        hidden_low = hidden.to(dtype)
        teacher_low = None if teacher is None else teacher.to(dtype)
        scale = row_weight / row_weight.sum()
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        share = torch.tensor(label_share, device=hidden.device)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            logits = hidden_low[rows] @ matrix.T
            if teacher_low is None:
                loss, gradient = label_gradient(logits, labels[rows])
            else:
                loss, gradient = row_gradient(logits, labels[rows], teacher_low[rows] @ matrix.T, share)
            gradient = (gradient * scale[rows, None]).to(dtype)
            total = total + (loss * scale[rows]).sum()
            hidden_gradient[rows] = (gradient @ matrix).to(hidden.dtype)
            weight_gradient += gradient.T @ hidden_low[rows]
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        weight_out = weight_gradient * grad if ctx.needs_input_grad[1] else None
        return hidden_gradient * grad, weight_out, None, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    row_weight: Tensor,
    dtype: torch.dtype,
    teacher: Tensor | None = None,
    label_share: float = 1.0,
) -> Tensor:
    """Mean loss over ``[B, T]`` rows; shapes as in :class:`SoftCrossEntropy` with leading axes [B, T]."""
    flat_teacher = None if teacher is None else teacher.detach().flatten(0, 1)
    return SoftCrossEntropy.apply(
        hidden.flatten(0, 1), weight, labels.flatten(), row_weight.flatten(), flat_teacher, label_share, dtype
    )
