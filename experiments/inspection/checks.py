"""What is looked for in a profile before anything is trained on it: `CHECKS`.

Training refuses one finding: a feature that is a measured latency, to the precision of float32. An
honest profile may show all others.

A profile does not hold when and where a cell was measured. So drift is seen in the order of samples
and of repeats alone, and another machine only where knobs cannot explain a configuration's time.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from knobwise.common.errors import InputError
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import MS
from knobwise.experiments.inspection import (
    cell_checks,
    feature_checks,
    feature_values,
    knob_checks,
    prospects,
    serving_checks,
)
from knobwise.experiments.inspection.measured import Finding, Findings, Measured

FAULT, WARNING = "fault", "warning"


class Check(NamedTuple):
    """Something that is looked for."""

    notices: Callable[[Measured], Findings]
    """Returns what is noticed; its name is that of the check."""
    sentence: str
    """What it looks for."""
    kind: str = FAULT
    """A fault of the measurements, or a warning of what training on them can bring."""
    timed: bool = False
    """Whether it is about clocks and machines, and not for prices and tokens."""

    @property
    def name(self) -> str:
        return self.notices.__name__


CHECKS = (
    Check(feature_checks.copied_outcomes, "a feature equals an outcome, or orders samples as it"),
    Check(feature_checks.predicted_too_well, "features predict outcomes better than any input"),
    Check(feature_checks.order_of_features, "features tell nothing about outcomes in their order"),
    Check(feature_values.numbers_of_samples, "a feature numbers the samples"),
    Check(feature_values.extreme_features, "features are too large or small for a measurement"),
    Check(feature_values.features_in_units, "a feature holds times of day in several units"),
    Check(cell_checks.times_of_day, "latencies are times of day", timed=True),
    Check(cell_checks.usual_time, "all latencies are in another unit", timed=True),
    Check(cell_checks.units_of_samples, "samples or cells are in another unit", timed=True),
    Check(cell_checks.units_of_repeats, "some of a cell's repeats are in another unit", timed=True),
    Check(cell_checks.units_of_configurations, "configurations are in another unit", timed=True),
    Check(cell_checks.percent, "accuracies are a hundredth of others, as per cent beside shares"),
    Check(cell_checks.same_samples, "a sample occurs under several ids"),
    Check(cell_checks.times_of_zero, "latencies are 0", timed=True),
    Check(cell_checks.capped, "the largest latency occurs often, as time-outs do"),
    Check(cell_checks.equal_repeats, "repeats are equal to the last digit", timed=True),
    Check(cell_checks.equal_times, "latencies are equal to the last digit", timed=True),
    Check(cell_checks.later_repeats, "later repeats are slower or faster", timed=True),
    Check(cell_checks.later_samples, "from some sample on, all are slower or faster", timed=True),
    Check(cell_checks.other_machine, "configurations are slower than knobs explain", timed=True),
    Check(knob_checks.reversed_values, "a knob's values were reversed in some samples"),
    Check(knob_checks.value_elsewhere, "one number of a knob was timed on another machine"),
    Check(knob_checks.cold_configurations, "few configurations take far longer than knobs explain"),
    Check(knob_checks.slower_is_worse, "accuracy falls as configurations take longer"),
    Check(knob_checks.contrary_configurations, "a configuration is right where others are wrong"),
    Check(cell_checks.missing_where_slow, "cells are missing where the model is slow"),
    Check(serving_checks.retried, "cells with more measurements than others differ by far"),
    Check(serving_checks.wrong_clock, "single cells take a thousand times as long", timed=True),
    Check(serving_checks.cached, "cells take a small part of their time", timed=True),
    Check(serving_checks.cold_cells, "cells take many times their time", timed=True),
    Check(serving_checks.cold_start, "the first samples take much longer", timed=True),
    Check(serving_checks.cut_answers, "the slowest answers take equally long and are wrong"),
    Check(serving_checks.batches, "samples share all their latencies, as in a batch", timed=True),
    Check(serving_checks.failed_requests, "samples fail fast in all configurations", timed=True),
    Check(serving_checks.shifted_scores, "accuracies fit only if moved by one sample"),
    Check(serving_checks.other_version, "from some sample on, accuracy is another"),
    Check(feature_checks.missing_features, "values of features are missing"),
    Check(feature_checks.constant_features, "features never vary"),
    Check(feature_checks.repeated_features, "features repeat another one"),
    Check(prospects.few_samples, "intervals will be wide", WARNING),
    Check(prospects.few_groups, "intervals will be too narrow", WARNING),
    Check(prospects.holes, "means come from different samples", WARNING),
    Check(prospects.same_accuracy, "accuracy hardly depends on the configuration", WARNING),
    Check(prospects.same_latency, "latency hardly differs between samples", WARNING),
    Check(prospects.little_headroom, "even the oracle gains next to nothing", WARNING),
    Check(prospects.no_features, "a policy sees only the budget", WARNING),
    Check(prospects.useless_knobs, "a knob has one value, or changes nothing", WARNING),
    Check(prospects.few_distinct_budgets, "default budgets are fewer than usual", WARNING),
    Check(prospects.refused_split, "training refuses the split that a file fixes", WARNING),
)
"""What is looked for, in the order in which it is reported."""


def findings_by_check(
    table: ProfileTable, facts: Mapping[str, Any] | None = None
) -> dict[str, list[Finding]]:
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
    """Return the faults of a profile in sentences.

    Raises:
        InputError: training refuses one of them.
    """
    faults = faults_of(table)
    if faults and faults[0].refused:
        raise InputError(f"profile {table.name!r}: {faults[0]}")
    return [in_words(str(fault), table.unit) for fault in faults]
