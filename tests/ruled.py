"""Controllers that decide by a rule, where it is judging that is tested."""

import numpy as np

from knobwise.agents.calibration.mean_policies import MeanBudgetPolicy
from knobwise.envs.bandit.rule_choice import rule_named


class Ruled:
    """A controller without a teacher whose decisions are those of another policy, or of a function
    of features, limits and mask.

    Args:
        rule: has `choose`, or is one.
        mean: what it is under mean budgets, see `DeployedController.under_mean_budgets`.
    """

    teacher = None

    def __init__(self, rule, mean=None):
        self.decider = self
        self.if_free = self
        self.rule = rule_named("deadline" if mean is None else "mean")
        self._choose = getattr(rule, "choose", rule)
        self._mean = mean

    def choose(self, features, limits, mask=None):
        return self._choose(features, limits, mask)

    def reads_features(self, limits):
        return np.ones(len(limits), bool)

    def decide_index(self, features, budget_ms):
        """Only how long it takes is asked."""
        return 0

    def under_mean_budgets(self):
        assert self._mean is not None
        return self._mean


def ruled_at_means(rule, budgets_ms, values_ms, **guard):
    """A controller for mean budgets whose rule gets the value of a right answer that is calibrated for a budget;
    `guard` as in `MeanBudgetPolicy`."""
    choose = getattr(rule, "choose", rule)

    def decide(features, group, mask):
        return choose(features, np.full(len(mask), float(values_ms[group])), mask)

    return Ruled(rule, MeanBudgetPolicy("controller", decide, budgets_ms, values_ms, **guard))
