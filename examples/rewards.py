"""A reward for another aim than utility, to copy and to change; run it in the folder above.

    knobwise train policy=utility reward=function reward.function=examples.rewards:late_answers
    loss.kl_to_ref_coeff=0

A reward gets accuracy, latency_ms, budget_ms, float tensors of one shape, and for each knob a
tensor of its values, and returns the reward of each of these decisions. docs/results.md
says what training on this one and two others gained.
"""

from collections.abc import Mapping

from torch import Tensor

LONGEST = 4.0
"""An answer counts as late by at most this many budgets, and is given up then."""


def late_answers(
    accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, knobs: Mapping[str, Tensor]
) -> Tensor:
    """Reward late answers too, at a cost that rises faster the longer one waits."""
    late = (latency_ms / budget_ms - 1).clamp(0, LONGEST)
    return accuracy - 0.5 * late - 0.5 * late**2
