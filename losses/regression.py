"""The losses of predicted outcomes, which a teacher learns by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def regression_losses(
    predicted: Sequence[Tensor], accuracy: Tensor, log_latency: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the losses of predicted outcomes: a cross-entropy of accuracies, and of log-latencies
    −ln N(log-latency | mean, spread²) but for a constant.

    Args:
        predicted: logits of accuracies, means of ln ms and their spreads, [*, C] each.
        accuracy: [*, C], measured, NaN where not profiled.
        log_latency: [*, C], measured, ln ms, NaN where not profiled.
        variance: [*, C], of a cell's measured log-latencies, of which `log_latency` is the mean;
            NaN counts 0.

    Returns:
        [*] each, means over the profiled configurations; 0 where there is none.
    """
    logits, mean, spread = predicted
    profiled = ~accuracy.isnan()
    complete = bool(profiled.all())
    # finite numbers in the place of NaN, which is left out below
    if not complete:
        accuracy = accuracy.nan_to_num()
        log_latency = log_latency.nan_to_num()
    wrong = functional.binary_cross_entropy_with_logits(logits, accuracy, reduction="none")
    # E(x − mean)² = (E x − mean)² + Var x
    square = (log_latency - mean).square() + variance.nan_to_num()
    off = 0.5 * square / spread.square() + spread.log()
    if complete:
        return wrong.mean(-1), off.mean(-1)
    count = profiled.sum(-1).clamp_min(1)
    wrong, off = (torch.where(profiled, loss, 0.0).sum(-1) / count for loss in (wrong, off))
    return wrong, off
