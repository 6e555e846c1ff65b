"""Notice faults that files of measurements often have, before anything is trained on them.

Each check is a function from `Measured` to the faults that it sees; `CHECKS` lists them. Training
refuses one fault: a feature that is a measured latency, to the precision of float32. All others are
warnings, since an honest profile may look like that.

A profile does not hold when and where a cell was measured. So drift is seen in the order of samples
and of repeats alone, and another machine only where knobs cannot explain a configuration's time.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

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
    serving_checks,
)
from knobwise.experiments.inspection.measured import Fault, Faults, Measured


def faults_by_check(table: ProfileTable) -> dict[str, list[Fault]]:
    """Return what each check notices, by its name."""
    measured = Measured(table)
    # columns without any value have no mean
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        seen = {}
        for check in CHECKS:
            applies = table.unit == MS or check not in OF_TIMES
            seen[check.__name__] = list(check(measured)) if applies else []
        return seen


def faults_of(table: ProfileTable) -> list[Fault]:
    """Return the faults of a profile that are noticed, refused ones first."""
    faults = itertools.chain(*faults_by_check(table).values())
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


CHECKS: tuple[Callable[[Measured], Faults], ...] = (
    feature_checks.copied_outcomes,
    feature_checks.predicted_too_well,
    feature_checks.order_of_features,
    feature_values.numbers_of_samples,
    feature_values.extreme_features,
    cell_checks.units_of_time,
    cell_checks.percent,
    cell_checks.same_samples,
    cell_checks.times_of_zero,
    cell_checks.capped,
    cell_checks.repeated_digits,
    cell_checks.drift,
    cell_checks.other_machine,
    knob_checks.reversed_values,
    knob_checks.value_elsewhere,
    knob_checks.cold_configurations,
    knob_checks.errors_as_accuracy,
    cell_checks.missing_where_slow,
    serving_checks.retried,
    serving_checks.far_off,
    serving_checks.cold_start,
    serving_checks.cut_answers,
    serving_checks.batches,
    serving_checks.failed_requests,
    serving_checks.shifted_scores,
    serving_checks.other_version,
    feature_checks.idle_features,
)
"""What is looked for, in the order in which it is reported."""
OF_TIMES = (
    cell_checks.repeated_digits,
    cell_checks.drift,
    cell_checks.other_machine,
    serving_checks.failed_requests,
)
"""What is about clocks and machines. Prices and tokens are often equal, and do not drift."""
