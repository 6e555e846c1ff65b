"""Which rule it is: by the settings of a budget, by a name in a file, or the user's own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line
from knobwise.common.progress import say
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.rule_answers import ROUNDING
from knobwise.envs.bandit.rules import Deadline, MeanBudget, Rule
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable

EXAMPLE = "examples.rules:FallingUtility"
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Deadline, MeanBudget)}
"""By the words of `budget.constraint`; beside them the rules of the user's own that the user has
given to this process. No name in a file adds one."""


def rule_of(budget: BudgetConfig) -> Rule:
    """Return the rule that the settings of a budget ask for, which may be code of the user's own.

    Raises:
        InputError: there is none, or it takes no such settings.
    """
    name = budget.constraint
    if ":" not in name:
        one_of("budget.constraint", name, ("deadline", "mean", "module:Class"))
    rule = RULES[name] if name in RULES else take_rule(name, f"budget={name}")
    if ":" in rule.name:
        return own_rule(rule, budget)
    return rule.from_settings(budget)


def take_rule(rule: str | type[Rule], key: str) -> type[Rule]:
    """Make a rule of the user's own known to this process, by its `module:Class` or itself.

    Args:
        key: the setting that names it, for the messages.

    Raises:
        InputError: there is no such class, or it is no rule.
    """
    kind: Any = import_callable(key, rule, "class", EXAMPLE) if isinstance(rule, str) else rule
    if not (isinstance(kind, type) and issubclass(kind, Rule)) or ":" not in kind.name:
        raise InputError(
            f"{key}: is no rule of your own; it must be a subclass of knobwise.envs.bandit.Rule"
        )
    names = {kind.name, rule} if isinstance(rule, str) else {kind.name}
    RULES.update(dict.fromkeys(names, kind))
    return kind


def own_rule(kind: type[Rule], budget: BudgetConfig) -> Rule:
    """Return a rule of the user's own with the settings of a budget."""
    numbers = dict(budget.settings or {})
    known = [each.name for each in dataclasses.fields(kind)[len(dataclasses.fields(Rule)) :]]
    for name in numbers:
        if name not in known:
            raise InputError(
                f"budget.settings: {name}: {kind.name} has no such number; it has "
                f"{', '.join(known) or 'none'}"
            )
        if not isinstance(numbers[name], int | float):
            raise InputError(f"budget.settings: {name}={numbers[name]}: must be a number")
    try:
        return kind(dict(budget.limits or {}), budget.limit_probability, **numbers)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"budget={kind.name}: making one raises {in_a_line(error, kind)}"
        ) from error


def refuse_other_rule(taken: str | type[Rule], rule: Rule) -> None:
    """Refuse a rule that the user gave for something that was trained under another one.

    Args:
        taken: what `take_rule` took.
        rule: what it was trained under.

    Raises:
        InputError: they are not the same.
    """
    kind = RULES[taken] if isinstance(taken, str) else taken
    if type(rule) is not kind:
        raise InputError(
            f"rule={kind.name}: it was trained under the rule {rule.name}; "
            + ("give that one" if rule.is_own else "leave rule out")
        )


def rule_named(name: str, numbers: Mapping[str, Any] | None = None) -> Rule:
    """Return the rule that a file names, without its limits: one of knobwise, or one of the user's
    own that the user has given. Nothing is imported.

    Args:
        numbers: those of a rule of the user's own.

    Raises:
        InputError: the user has not given it.
    """
    kind = RULES.get(name)
    if kind is None and ":" in name:
        # a file may have been moved since
        _, _, named = name.partition(":")
        of_name = [each for each in RULES.values() if each.name.partition(":")[2] == named]
        kind = of_name[-1] if of_name else None
        if kind is not None:
            _note_moved(name, kind.name)
    if kind is None:
        raise InputError(
            f"it was trained under the rule {name}, whose code no file holds; give that one, as "
            f"rule={name} (to train on: budget={name}), or in Python as "
            f"knobwise.load(…, rule={name.rpartition(':')[2]})"
        )
    return own_rule(kind, BudgetConfig(constraint=name, settings=dict(numbers or {})))


@functools.cache
def _note_moved(name: str, taken: str) -> None:
    """Say once that a rule has the name of the class in a file, and another module."""
    say(f"trained under the rule {name}; taken for it is {taken}")


def as_rule(rule: Rule | str) -> Rule:
    """Return a rule as it is, or the one of knobwise with this name."""
    return rule_named(rule) if isinstance(rule, str) else rule


def try_rule(rule: Rule, table: ProfileTable) -> None:
    """Ask a rule of the user's own about all cells of a table, under three budgets.

    Raises:
        InputError: see `_values_of`; `allowed` raises or returns something else than what may
            be chosen; or a utility falls as the budget grows.
    """
    key = f"budget={rule.name}"
    median_ms = table.latency_ms.nanmedian().clamp_min(MIN_LATENCY_MS)
    before = torch.zeros(())
    for factor in (0.5, 1.0, 2.0):
        limit = factor * median_ms
        worth = rule.mean_utility(table.accuracy, table.measurements_ms, limit)
        rule.mean_reward(table.accuracy, table.latency_ms, limit)
        if (worth < before - ROUNDING).any():
            raise InputError(
                f"{key}: utility: an answer is worth less under a larger budget (at "
                f"{float(limit):g}); it must not be"
            )
        before = worth
    try:
        allowed = rule.allowed(table)
    except Exception as error:
        raise InputError(f"{key}: allowed: raises {in_a_line(error, type(rule))}") from error
    right = isinstance(allowed, Tensor) and allowed.dtype == torch.bool
    if not right or allowed.shape != table.mask.shape:
        raise InputError(f"{key}: allowed: must return bool {[*table.mask.shape]}")
    rows = (~(allowed & table.mask).any(1)).nonzero()
    if len(rows):
        raise InputError(
            f"{key}: allowed: leaves {len(rows)} samples without any configuration, the first "
            f"{table.sample_ids[int(rows[0])]!r}"
        )


def check_limits(table: ProfileTable, budget: BudgetConfig) -> None:
    """Raise InputError for a limit on a cost that the table lacks, one that is not positive, or one
    beside a mean budget."""
    known = ", ".join(table.costs) or "none; profile.costs=[…] names the columns that are"
    for name, limit in (budget.limits or {}).items():
        if name not in table.costs:
            raise InputError(
                f"budget.limits: {name}: profile {table.name!r} has no such cost; its further "
                f"costs are {known}"
            )
        number = isinstance(limit, Real) and not isinstance(limit, bool)
        if not (number and 0 < limit < math.inf):
            raise InputError(f"budget.limits: {name}={limit}: must be a positive number")
    if budget.limits and not rule_of(budget).late:
        raise InputError(
            f"budget.limits: are for deadlines; budget={budget.constraint} has none, so leave them "
            "out"
        )


def allowed_cells(rule: Rule, table: ProfileTable) -> Tensor | None:
    """Return which cells a rule of the user's own allows, bool [N, C]; None for all that the table
    has, as under the rules of knobwise."""
    if not rule.is_own:
        return None
    allowed = rule.allowed(table) & table.mask
    return None if bool((allowed == table.mask).all()) else allowed


def counted_cells(table: ProfileTable, budget: BudgetConfig) -> Cells:
    """Return what counts of a table under the settings of a budget, see `Rule.counted`.

    Where there are limits on further costs, a training leaves out what is expected to exceed them
    (`Problem.allowed`). Here nothing is predicted, so any configuration may be chosen.

    Raises:
        InputError: see `check_limits` and `try_rule`.
    """
    check_limits(table, budget)
    rule = rule_of(budget)
    if rule.is_own:
        try_rule(rule, table)
    return rule.counted(table, allowed_cells(rule, table))
