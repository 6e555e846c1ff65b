"""From a profile and settings to the problem that a controller is trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knobwise.agents.problem import Problem
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.envs.bandit.budgets import subsample
from knobwise.envs.bandit.rule_choice import allowed_cells, check_limits, rule_of, try_rule
from knobwise.envs.bandit.rules import Rule
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable, Split

if TYPE_CHECKING:
    from knobwise.agents.deployed.text import TextEncoder

MAX_JUDGED = 1 << 16
"""Test samples that policies are judged on; of a larger test part these are spread evenly."""


def judged_part(split: Split) -> Split:
    """Return a split whose test part has at most `MAX_JUDGED` samples; if it had more, a message
    says so."""
    test = subsample(split.test, MAX_JUDGED)
    if len(test) < len(split.test):
        say(f"judged is a sample: {len(test):,} of {len(split.test):,} test samples")
    return split._replace(test=test)


def problem_of(
    facts: ProfileTable,
    split: Split,
    budget: BudgetConfig | None = None,
    unprofiled: str = "predict",
    encoders: Mapping[str, TextEncoder] | None = None,
) -> Problem:
    """Return the problem of a profile under a budget.

    Args:
        facts: the profile, its texts encoded.
        split: beliefs and limits are fitted on its training and validation samples.
        budget: the settings; None for deadlines without limits.
        unprofiled: `predict` what was not measured, or `forbid` to choose it.
        encoders: what encoded the texts.

    Raises:
        InputError: `unprofiled` is another word, or cells that were drawn with unequal
            probabilities cannot do without predictions; or see `check_limits`.
    """
    one_of("unprofiled", unprofiled, ("predict", "forbid"))
    if unprofiled == "forbid":
        _check_equally_drawn(facts, split.fitted)
    budget = budget or BudgetConfig()
    rule = rule_of(budget)
    check_limits(facts, budget)
    beliefs = None
    values = facts
    if unprofiled == "predict" and not facts.mask.all():
        # most profiles are whole, and what predicts takes long to import
        from knobwise.agents.teacher.beliefs import fit_beliefs

        beliefs = fit_beliefs(facts, split)
        values = facts if beliefs is None else beliefs.filled
    if rule.is_own:
        try_rule(rule, values)
    return Problem(
        facts=facts,
        split=split,
        rule=rule,
        beliefs=beliefs,
        encoders=encoders or {},
        allowed=_allowed_cells(values, facts, split, rule),
    )


def _check_equally_drawn(table: ProfileTable, rows: Tensor) -> None:
    """Refuse samples, int64 [n], of which some were likelier to be measured with a configuration
    than others: means of what was measured are not means of all of them."""
    if table.sampling_weight is None:
        return
    weight, mask = table.sampling_weight[rows], table.mask[rows]
    least = weight.masked_fill(~mask, torch.inf).amin(0)
    most = weight.masked_fill(~mask, -torch.inf).amax(0)
    for c in (most > 1.001 * least).nonzero().flatten().tolist():
        raise InputError(
            f"unprofiled=forbid: of samples with {table.label(c)}, some stand for "
            f"{least[c]:.3g} and others for {most[c]:.3g} (sampling_weight), so means of what was "
            "measured mislead; take unprofiled=predict, which weighs them"
        )


def _allowed_cells(
    values: ProfileTable, facts: ProfileTable, split: Split, rule: Rule
) -> Tensor | None:
    """Return which cells samples may have, by the rule and within limits by what is expected of
    them, bool [N, C]; None for all that have values.

    Args:
        values: the table with values in all cells that may be chosen otherwise.
        facts: what was measured.
    """
    by_rule = allowed_cells(rule, values)
    if rule.limits:
        # most budgets have none, and need nothing that predicts costs
        from knobwise.agents.evaluation.limits import within_limits

        mask = values.mask if by_rule is None else by_rule
        return within_limits(mask, facts, split, rule)
    return by_rule
