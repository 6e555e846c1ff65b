"""What is looked for in a profile before anything is trained on it: `CHECKS`.

Training refuses one finding: a feature that is a measured latency, to the precision of float32. An
honest profile may show all others.

A profile does not hold when and where a cell was measured. So drift is seen in the order of samples
and of repeats alone, and another machine only where knobs cannot explain a configuration's time, or
where workers measured shared cells.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from knobwise.common.errors import InputError
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import MS
from knobwise.experiments.inspection import (
    cell_checks,
    feature_checks,
    knob_checks,
    prospects,
    serving_checks,
)
from knobwise.experiments.inspection.measured import Finding, Findings, Measured

if TYPE_CHECKING:
    from knobwise.experiments.inspection.facts import Facts

FAULT, WARNING = "fault", "warning"


class Check(NamedTuple):
    """Something that is looked for."""

    notices: Callable[[Measured], Findings]
    """Returns what is noticed; its name and its docstring are those of the check."""
    kind: str = FAULT
    """A fault of the measurements, or a warning of what training on them can bring."""
    timed: bool = False
    """Whether it is about clocks and machines, and not for prices and tokens."""

    @property
    def name(self) -> str:
        return self.notices.__name__

    @property
    def sentence(self) -> str:
        """What it looks for: the first paragraph of the docstring."""
        return inspect.cleandoc(self.notices.__doc__ or "").partition("\n\n")[0]


CHECKS = (
    Check(feature_checks.copied_outcomes),
    Check(feature_checks.predicted_too_well),
    Check(feature_checks.order_of_features),
    Check(feature_checks.numbers_of_samples),
    Check(feature_checks.extreme_features),
    Check(feature_checks.features_in_units),
    Check(cell_checks.times_of_day, timed=True),
    Check(cell_checks.usual_time, timed=True),
    Check(cell_checks.units_of_samples, timed=True),
    Check(cell_checks.units_of_repeats, timed=True),
    Check(cell_checks.units_of_configurations, timed=True),
    Check(cell_checks.percent),
    Check(cell_checks.equal_scores),
    Check(cell_checks.same_samples),
    Check(cell_checks.costs_of_zero),
    Check(cell_checks.capped),
    Check(cell_checks.equal_repeats, timed=True),
    Check(cell_checks.equal_times, timed=True),
    Check(cell_checks.later_repeats, timed=True),
    Check(cell_checks.later_samples, timed=True),
    Check(cell_checks.other_machine, timed=True),
    Check(cell_checks.slow_workers, WARNING, timed=True),
    Check(knob_checks.reversed_values),
    Check(knob_checks.value_elsewhere),
    Check(knob_checks.values_in_equal_times, timed=True),
    Check(knob_checks.cold_configurations),
    Check(knob_checks.slower_is_worse),
    Check(knob_checks.contrary_configurations),
    Check(cell_checks.missing_where_slow),
    Check(cell_checks.missing_configurations),
    Check(serving_checks.retried),
    Check(serving_checks.wrong_clock, timed=True),
    Check(serving_checks.cached, timed=True),
    Check(serving_checks.cold_cells, timed=True),
    Check(serving_checks.cold_start, timed=True),
    Check(serving_checks.cut_answers),
    Check(serving_checks.batches, timed=True),
    Check(serving_checks.failed_requests),
    Check(serving_checks.failed_cells),
    Check(serving_checks.shifted_scores),
    Check(serving_checks.other_version),
    Check(feature_checks.missing_features),
    Check(feature_checks.constant_features),
    Check(feature_checks.repeated_features),
    Check(prospects.few_samples, WARNING),
    Check(prospects.few_groups, WARNING),
    Check(prospects.holes, WARNING),
    Check(prospects.scattered_settings, WARNING),
    Check(prospects.same_accuracy, WARNING),
    Check(prospects.same_latency, WARNING),
    Check(prospects.little_headroom, WARNING),
    Check(prospects.no_features, WARNING),
    Check(prospects.useless_knobs, WARNING),
    Check(prospects.few_distinct_budgets, WARNING),
    Check(prospects.refused_split, WARNING),
)
"""What is looked for, in the order in which it is reported."""


def findings_by_check(table: ProfileTable, facts: Facts | None = None) -> dict[str, list[Finding]]:
    """Return what each check notices, by its name.

    Args:
        table: the profile.
        facts: see `inspect_table`; without them there are no warnings.
    """
    measured = Measured(table, facts)
    kinds = (FAULT,) if facts is None else (FAULT, WARNING)
    noticed = {}
    # columns without any value have no mean
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        for check in CHECKS:
            applies = check.kind in kinds and (table.unit == MS or not check.timed)
            noticed[check.name] = list(check.notices(measured)) if applies else []
    return noticed


def faults_of(table: ProfileTable) -> list[Finding]:
    """Return the faults of a profile that are noticed, refused ones first."""
    faults = list(itertools.chain(*findings_by_check(table).values()))
    return sorted(faults, key=lambda fault: not fault.refused)


def warnings_of(table: ProfileTable) -> list[str]:
    """Return the faults of a profile in sentences, and whether it has no features.

    Raises:
        InputError: training refuses one of them.
    """
    faults = faults_of(table)
    if faults and faults[0].refused:
        raise InputError(f"profile {table.name!r}: {faults[0]}")
    sentences = [in_words(str(fault), table.unit) for fault in faults]
    return sentences if table.features else [*sentences, prospects.NO_FEATURES]
