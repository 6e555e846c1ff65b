"""A rule of your own: `budget=examples.rules:FallingUtility`.

knobwise train budget=examples.rules:FallingUtility budget.settings='{tau_ms: 5}' name=falling
knobwise evaluate checkpoint=runs/controller/falling rule=examples.rules:FallingUtility

`knobwise.envs.bandit.rules.Rule` says what a rule may say; all else is that of deadlines.
"""

from dataclasses import dataclass

from torch import Tensor

from knobwise.envs.bandit.rules import Rule


@dataclass(frozen=True)
class FallingUtility(Rule):
    """A late answer is worth less the later it comes, instead of nothing: accuracy ·
    exp(−lateness/τ), the mean over the repeats of a cell."""

    tau_ms: float = 5.0
    """An answer that is so late is worth 37 % of one in time."""

    def utility(self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
        lateness_ms = (latency_ms - budget_ms).clamp_min(0)
        return accuracy * (-lateness_ms / self.tau_ms).exp()
