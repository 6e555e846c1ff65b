"""The settings of a price policy's loss."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least
from knobwise.losses.settings import GRPOConfig


@dataclass
class ServiceLossConfig(GRPOConfig):
    """What is minimised. The reference policy of the KL is the one at the start."""

    group_size: int = 16
    """G, rollouts of each trace."""
    kl_to_ref_coeff: float | None = 0.0
    """β, weight of the k3 KL to the policy at the start."""
    discount: float = 0.99
    """γ, in 0..1, what the utility of the next request counts for the price of this one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("loss.discount", self.discount, 0)
        at_least(f"loss.discount={self.discount}: 1", 1, self.discount)
