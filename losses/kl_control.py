"""Keep a measured KL inside a band by changing a coefficient: its weight, or a temperature."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class KLControl:
    """Multiply a coefficient when the KL leaves its band.

    The rule is that of Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4,
    with a band in the place of a target.
    """

    coefficient: Tensor
    """A single number, which is changed in place."""
    lowest: float
    """Below this KL, in nats, the coefficient is divided by `factor`."""
    highest: float
    """Above this KL, in nats, it is multiplied by `factor`."""
    factor: float
    """Above 1 for a coefficient that lowers the KL when it grows, below 1 for the reverse."""
    least: float
    """The coefficient never falls below this."""
    most: float
    """The coefficient never rises above this."""

    def step(self, kl: float) -> None:
        """Adapt the coefficient to the KL of the last iteration, in nats."""
        # one step towards the band, then inside the ends
        if kl > self.highest:
            self.coefficient.mul_(self.factor)
        elif kl < self.lowest:
            self.coefficient.div_(self.factor)
        self.coefficient.clamp_(self.least, self.most)


def weight_control(weight: Tensor, band: tuple[float, float]) -> KLControl:
    """Return the control of β, the weight of the KL: it grows where the KL is too high."""
    lowest, highest = band
    return KLControl(
        coefficient=weight, lowest=lowest, highest=highest, factor=1.5, least=1e-3, most=10.0
    )


def temperature_control(temperature: Tensor, band: tuple[float, float]) -> KLControl:
    """Return the control of τ, the temperature of the draws: it falls where the KL is too high."""
    lowest, highest = band
    return KLControl(
        coefficient=temperature, lowest=lowest, highest=highest, factor=1 / 1.1, least=0.5, most=2.0
    )
