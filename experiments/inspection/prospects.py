"""Checks of what training on a profile can bring, by the facts that `inspect_table` gathers."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import chi2

from knobwise.common.errors import InputError
from knobwise.common.words import format_count, format_number
from knobwise.envs.bandit.budgets import few_budgets
from knobwise.experiments.inspection.measured import Finding, Findings, Measured

FEW_SAMPLES = 200
FEW_CLUSTERS = 100
"""Of fewer clusters the test part holds less than 20."""
NEXT_TO_NOTHING = 0.02
"""A smaller share or variation counts as next to nothing."""
FEWEST_DIFFERENCES = 10
"""Of fewer, between samples of one configuration, not even equal times are certain to be so."""
NO_FEATURES = (
    "No features: a policy sees only the budget, and cannot do better than budget-aware static; "
    "give features by profile.features."
)


def few_samples(measured: Measured) -> Findings:
    """Intervals will be wide."""
    samples = measured.facts["samples"]
    if samples < FEW_SAMPLES:
        yield _certain(f"Only {samples} samples: intervals on a test split of them will be wide.")


def few_groups(measured: Measured) -> Findings:
    """Intervals will be too narrow."""
    table = measured.table
    if not (table.clusters or table.image_ids):
        return
    # splits and intervals go by these
    units = len(set(table.split_keys))
    # images of a single sample each are no fewer than the samples
    if units >= FEW_CLUSTERS or (not table.clusters and units == table.num_samples):
        return
    words = ("groups (profile.group)", "groups") if table.clusters else ("images", "images")
    yield _certain(
        f"Only {units} {words[0]}: the test part holds few of them, and intervals over few "
        f"{words[1]} are too narrow."
    )


def holes(measured: Measured) -> Findings:
    """Means come from different samples."""
    missing = 1 - measured.facts["coverage"]
    if missing > 0:
        yield _certain(
            f"{format_number(missing, '.1%')} of the cells were not profiled: means per "
            "configuration or knob and the best static choice then come from different samples; "
            "compare them with caution."
        )


def scattered_settings(measured: Measured) -> Findings:
    """Hardly any setting was measured on several samples."""
    if measured.facts["scattered"]:
        count = format_count(measured.facts["samples_of_setting"], "sample")
        yield _certain(
            f"Most settings were measured on {count}, as in a random search: which fixed setting "
            "is best, and what choosing per input gains over it, cannot be known; round the values "
            "of the knobs to a grid, so that several samples share a setting."
        )


def same_accuracy(measured: Measured) -> Findings:
    """Accuracy hardly depends on the configuration."""
    if measured.facts["config_dependent_share"] < NEXT_TO_NOTHING:
        yield _certain(
            "Accuracy hardly depends on the configuration: choosing can save time, but not gain "
            "accuracy."
        )


def same_latency(measured: Measured) -> Findings:
    """Latency hardly differs between samples.

    That is certain where the deviation can be no larger, at 95 % confidence: of few samples of the
    same configuration, or of a single one, nobody knows.
    """
    varies = measured.facts["latency_cv_within_configuration"]
    if varies is None or varies >= NEXT_TO_NOTHING:
        return
    # [C] samples of each configuration; all but one of them tell how much they differ
    count = (~np.isnan(measured.log_ms)).sum(0)
    differences = np.maximum(count - 1, 0).sum()
    squares = np.nansum((measured.log_ms - np.nanmean(measured.log_ms, 0)) ** 2)
    most = math.sqrt(squares / chi2.ppf(0.05, differences))
    known = differences >= FEWEST_DIFFERENCES and most < NEXT_TO_NOTHING
    sentence = (
        "Latency hardly differs between samples: the configuration alone determines the time."
    )
    if varies == 0:
        sentence = (
            "Latency is the same for every sample: these look like means per configuration, not "
            "measurements."
        )
    yield Finding(sentence, "certain" if known else "perhaps")


def little_headroom(measured: Measured) -> Findings:
    """Even the oracle gains next to nothing."""
    # static is chosen on the samples that it is judged on: of settings of one sample as the oracle
    if measured.facts["scattered"]:
        return
    headroom = measured.facts["headroom"]
    gains = np.subtract(headroom["oracle"], headroom["budget_aware_static"])
    attainable = measured.facts["attainable"] or {"oracle": 0.0}
    if max(gains.max(), attainable["oracle"]) < NEXT_TO_NOTHING:
        yield _certain(
            "The oracle is hardly better than budget-aware static: choosing per input can gain "
            "next to nothing."
        )


def no_features(measured: Measured) -> Findings:
    """A policy sees only the budget."""
    if not measured.facts["features"]:
        yield _certain(NO_FEATURES)


def useless_knobs(measured: Measured) -> Findings:
    """A knob has one value, or changes nothing."""
    for name, knob in measured.facts["knobs"].items():
        # half a point of accuracy, or a hundredth of the latency, is nothing
        idle = np.ptp(knob["accuracy"]) < 0.005
        idle &= np.ptp(knob["latency_ms"]) < 0.01 * max(knob["latency_ms"])
        if len(knob["values"]) < 2:
            yield _certain(f"Knob {name} has only one value: there is nothing to choose.")
        elif idle:
            yield _certain(f"Knob {name} changes neither accuracy nor latency on average.")


def few_distinct_budgets(measured: Measured) -> Findings:
    """Default budgets are fewer than usual."""
    if measured.facts["default_budgets"]:
        budgets = torch.tensor(measured.facts["headroom"]["budgets_ms"])
        yield from map(_certain, few_budgets(budgets))


def refused_split(measured: Measured) -> Findings:
    """Training refuses the split that a file fixes."""
    if measured.table.parts:
        try:
            measured.table.split()
        except InputError as error:
            yield _certain(f"`train` will refuse this file's split: {error}.")


def _certain(sentence: str) -> Finding:
    return Finding(sentence, "certain")
