"""Faults of how a profile was written down or put together: units, values of knobs, errors in the
place of accuracies, and numbers that are no features. Each takes a sound table and draws, and
returns the table with the fault."""

from dataclasses import replace

import torch

from campaign.profiles.served import measured_once, uniform
from knobwise.envs.tables.profile_table import Knob


def scattered(table, draws, low, high):
    """Cells here and there, bool [N, C]: a share between `low` and `high` of them."""
    return uniform(draws, table.mask.shape, 0, 1) < draws.uniform(low, high)


def cells_in_seconds(table, draws):
    factor = torch.where(scattered(table, draws, 0.3, 0.7), 1e-3, 1.0)
    return measured_once(table, table.latency_ms * factor)


def times_of_day(table, draws):
    """The end in the place of the duration, in milliseconds since 1970."""
    now = torch.where(scattered(table, draws, 0.01, 0.5), 1.77e12, 0.0)
    return measured_once(table, table.latency_ms + now)


def repeats_in_seconds(table, draws):
    repeats_ms = table.latency_ms.unsqueeze(2) * torch.tensor([1.0, 1.0, 1e-3])
    return replace(measured_once(table, table.latency_ms), repeats_ms=repeats_ms)


def mirrored(table, knob):
    """For each configuration that with the value of a knob from the other end, int64 [C]; itself
    where that was not measured."""
    codes = table.configurations.clone()
    codes[:, knob] = len(table.knobs[knob].values) - 1 - codes[:, knob]
    places = {tuple(row): place for place, row in enumerate(table.configurations.tolist())}
    return torch.tensor([places.get(tuple(row), i) for i, row in enumerate(codes.tolist())])


def values_reversed(table, draws, knob=None):
    """The values of a knob are reversed in half of the samples."""
    if knob is None:
        knob = draws.integers(len(table.knobs))
    order = mirrored(table, knob)
    rows = uniform(draws, (table.num_samples, 1), 0, 1) < 0.5
    latency_ms = table.latency_ms[:, order].where(rows, table.latency_ms)
    accuracy = table.accuracy[:, order].where(rows, table.accuracy)
    mask = table.mask[:, order].where(rows, table.mask)
    return replace(measured_once(table, latency_ms, accuracy), mask=mask)


def value_on_another_machine(table, draws):
    """One number of a knob, neither its first nor its last, was measured on a faster machine."""
    several = [k for k, knob in enumerate(table.knobs) if numeric(knob) and len(knob.values) > 2]
    if not several:
        return table
    knob = draws.choice(several)
    value = draws.integers(1, len(table.knobs[knob].values) - 1)
    factor = torch.where(table.configurations[:, knob] == value, 0.4, 1.0)
    return measured_once(table, table.latency_ms * factor)


def numeric(knob):
    return all(isinstance(value, int | float) for value in knob.values)


def cold_configurations(table, draws):
    """A few whole configurations were measured before the model was warm."""
    count = table.num_configurations
    cold = torch.from_numpy(draws.permutation(count) < max(1, 0.1 * count))
    return measured_once(table, table.latency_ms * torch.where(cold, 30.0, 1.0))


def cold_cells(table, draws):
    """Here and there the model was not warm."""
    cold = scattered(table, draws, 0.01, 0.03)
    return measured_once(table, table.latency_ms * torch.where(cold, 30.0, 1.0))


def errors_as_accuracy(table, draws):
    return replace(table, accuracy=1 - table.accuracy)


def errors_of_a_configuration(table, draws):
    accuracy = table.accuracy.clone()
    column = draws.integers(table.num_configurations)
    accuracy[:, column] = 1 - accuracy[:, column]
    return replace(table, accuracy=accuracy)


def numbered(table, draws):
    """The sample's number, in the order of the samples or of a shuffled file, is a feature."""
    order = torch.arange(table.num_samples, dtype=torch.float32)
    if draws.random() < 0.5:
        order = order[torch.from_numpy(draws.permutation(len(order)))]
    return replace(table, features=table.features | {"further": order.unsqueeze(1)})


def huge_features(table, draws):
    blocks = {name: block * 1e30 for name, block in table.features.items()}
    return replace(table, features=blocks)


def all_in_microseconds(table, draws):
    return measured_once(table, table.latency_ms * 1e3)


def judged_twice(table, draws):
    """Each answer once as it is, and once by a judge who takes some of the others for right."""
    count = table.num_configurations
    taken = scattered(table, draws, 0.05, 0.5) & table.mask
    accuracy = torch.cat([table.accuracy, table.accuracy.masked_fill(taken, 1.0)], 1)
    judge = torch.arange(2).repeat_interleave(count)[:, None]
    return replace(
        table,
        accuracy=accuracy,
        latency_ms=table.latency_ms.repeat(1, 2),
        mask=table.mask.repeat(1, 2),
        repeats_ms=None,
        first_look_ms=None,
        costs={},
        knobs=(*table.knobs, Knob("filter", ("strict", "lenient"))),
        configurations=torch.cat([table.configurations.repeat(2, 1), judge], 1),
    )


WRITTEN = {
    cells_in_seconds: "units_of_samples",
    times_of_day: "times_of_day",
    repeats_in_seconds: "units_of_repeats",
    values_reversed: "reversed_values",
    value_on_another_machine: "value_elsewhere",
    # two of them with a value in common look like another machine
    cold_configurations: "cold_configurations, other_machine",
    cold_cells: "cold_cells",
    judged_twice: "values_in_equal_times",
    errors_as_accuracy: "slower_is_worse",
    errors_of_a_configuration: "contrary_configurations",
    numbered: "numbers_of_samples",
    huge_features: "extreme_features",
}
"""Fault → the check that should notice it."""
SELDOM = {all_in_microseconds: "usual_time"}
"""These are noticed only in profiles of slow models."""
