"""Which faults of a profile `knobwise inspect` notices, by hand:
`python -m campaign.profiles.faults [table features …]`. Prints a table: 20 random instances of
each fault, made from sound profiles, and how many of the sound profiles raise the same alarm.

The sound profiles are those that come with knobwise, five simulated ones, and the pairs of a long
table and its features that the arguments name. An instance has at most 500 samples of a profile. It
is noticed if the check for this fault reports more than it does without the fault.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from campaign import ROOT
from campaign.profiles.served import SERVED, UNNOTICED, measured_once, normal, uniform
from campaign.profiles.written import SELDOM, WRITTEN
from knobwise.envs.readers.long_table import read_long_table
from knobwise.envs.tables.profile_table import Knob, ProfileTable, median_of
from knobwise.experiments.inspection.checks import findings_by_check
from knobwise.testbeds.profiles import builtin_profile, ocr_profile
from knobwise.testbeds.simulated.calibrated import simulate
from knobwise.testbeds.simulated.settings import SimulatedConfig

MEASURED = ROOT / "experiments/studies/measured"
SMALL = {"image_width": 24, "language_width": 24, "samples": 500}
INSTANCES = 20


def sound_tables(paths=()):
    tables = [builtin_profile(), builtin_profile("soft_score"), ocr_profile()]
    tables += map(ProfileTable.load, sorted(MEASURED.glob("*.safetensors")))
    kinds = [{"datasets": (name,), "grid": "27"} for name in ("text_vqa", "coco_vqa", "okvqa")]
    kinds.append({"datasets": ("okvqa",), "grid": "240"})
    kinds.append({"grid": "tiers", "latency": "prefill"})
    tables += [simulate(SimulatedConfig(**kind, **SMALL)) for kind in kinds]
    for path, features in zip(paths[::2], paths[1::2], strict=True):
        tables.append(read_long_table(path, features=features, name=Path(path).parent.name))
    return tables


def part_of(table, rows, **further):
    """The table of these samples, in their order, with further changes."""
    changes = {}
    for name, axes in table.AXES.items():
        value = getattr(table, name)
        if axes.startswith("N") and torch.is_tensor(value):
            changes[name] = value[rows]
        elif axes == "N" and value:
            changes[name] = tuple(value[row] for row in rows)
    return replace(table, features=table.blocks(rows), **changes | further)


def timed(table, factor):
    """The table with all times multiplied by a factor [N, C] or what expands to it."""
    changes = {"latency_ms": table.latency_ms * factor}
    for name in ("repeats_ms", "first_look_ms"):
        value = getattr(table, name)
        if value is not None:
            changes[name] = value * (factor[..., None] if value.ndim == 3 else factor)
    return replace(table, **changes)


def with_feature(table, *columns):
    return replace(table, features=table.features | {"further": torch.stack(columns, 1)})


def reordered(table, order):
    return replace(table, features={name: block[order] for name, block in table.features.items()})


def column_of(values, draws):
    """A random column of outcomes that is known everywhere and varies."""
    values = values.where(~values.isnan(), values.nanmedian())
    good = (values != values.median(0).values).sum(0).numpy() >= 10
    return values[:, draws.choice(np.flatnonzero(good))] if good.any() else values[:, 0]


def some(count, draws, low=0.2, high=0.8):
    """A random part of the numbers below `count`, as bool."""
    return torch.from_numpy(draws.permutation(count) < draws.uniform(low, high) * count)


# -- the faults ------------------------------------------------------------------------------------


def a_latency(table, draws):
    return with_feature(table, column_of(table.latency_ms, draws))


def a_scaled_outcome(table, draws):
    values = column_of((table.latency_ms, table.accuracy)[draws.integers(2)], draws)
    return with_feature(table, draws.uniform(0.1, 10) * values + draws.uniform(-1, 1))


def a_mean_outcome(table, draws):
    return with_feature(table, table.accuracy.nanmean(1))


def a_sum(table, draws):
    values = column_of(table.latency_ms, draws).log()
    part = normal(draws, values.shape) * values.std()
    return with_feature(table, values - part, part)


def a_noisy_latency(table, draws):
    values = column_of(table.latency_ms, draws)
    noise = normal(draws, values.shape)
    return with_feature(table, (values.log() + 0.001 * noise).exp())


def features_shifted(table, draws):
    return reordered(table, np.roll(np.arange(table.num_samples), draws.choice([-1, 1])))


def features_shuffled(table, draws):
    return reordered(table, draws.permutation(table.num_samples))


def all_in_seconds(table, draws):
    return timed(table, torch.full((1, 1), 1e-3))


def samples_in_seconds(table, draws):
    return timed(table, torch.where(some(table.num_samples, draws), 1e-3, 1.0)[:, None])


def configurations_in_microseconds(table, draws):
    return timed(table, torch.where(some(table.num_configurations, draws), 1e3, 1.0)[None])


def samples_in_percent(table, draws):
    rows = some(table.num_samples, draws)
    return replace(table, accuracy=table.accuracy * torch.where(rows, 0.01, 1.0)[:, None])


def one_cache_for_two_models(table, draws):
    """The second of two models was never asked: its scores are those of the first."""
    first, second = draws.choice(table.num_configurations, 2, replace=False)
    latency_ms = table.latency_ms[:, [first, second]]
    accuracy = table.accuracy[:, [first, first]]
    mask = table.mask[:, [first, second]].all(1, keepdim=True).expand(-1, 2)
    knobs = (Knob("model", ("large", "small")),)
    configurations = torch.tensor([[0], [1]])
    changed = {"knobs": knobs, "configurations": configurations, "mask": mask}
    once = {"repeats_ms": None, "first_look_ms": None, "costs": {}, "sampling_weight": None}
    outcomes = {
        "accuracy": accuracy.masked_fill(~mask, torch.nan),
        "latency_ms": latency_ms.masked_fill(~mask, torch.nan),
    }
    return replace(table, **changed, **once, **outcomes)


def copied_samples(table, draws):
    copies = draws.integers(table.num_samples, size=max(2, table.num_samples // 20))
    rows = np.concatenate([np.arange(table.num_samples), copies])
    return part_of(table, rows, sample_ids=tuple(map(str, range(len(rows)))), image_ids=())


def measured_twice(table, draws):
    """The same inputs under other ids, measured anew."""
    doubled = copied_samples(table, draws)
    noise = normal(draws, doubled.latency_ms.shape)
    return timed(doubled, (0.03 * noise).exp())


def slowest(table, share):
    return table.latency_ms > table.latency_ms[table.mask].quantile(1 - share)


def time_outs_as_zero(table, draws):
    late = slowest(table, draws.uniform(0.01, 0.1))
    return measured_once(table, table.latency_ms.masked_fill(late, 0.0))


def capped_times(table, draws):
    late = slowest(table, draws.uniform(0.02, 0.1))
    limit = float(table.latency_ms[~late].nan_to_num().max())
    return measured_once(table, table.latency_ms.masked_fill(late, limit))


def copied_repeats(table, draws):
    once = measured_once(table, table.latency_ms)
    return replace(once, repeats_ms=once.latency_ms[..., None].expand(-1, -1, 3).clone())


def coarse_timer(table, draws):
    step = table.latency_ms[table.mask].median() * draws.uniform(0.3, 1)
    return measured_once(table, (table.latency_ms / step).ceil() * step)


def slower_from_a_sample_on(table, draws):
    later = torch.arange(table.num_samples) > draws.uniform(0.1, 0.9) * table.num_samples
    return timed(table, torch.where(later, draws.choice([1 / 3, 3.0]), 1.0)[:, None].float())


def slower_repeats(table, draws):
    noise = normal(draws, (*table.latency_ms.shape, 3))
    slower = torch.tensor([1.0, 1.0, draws.uniform(1.5, 3)])
    repeats_ms = table.latency_ms[..., None] * (0.03 * noise).exp() * slower
    return replace(measured_once(table, median_of(repeats_ms)), repeats_ms=repeats_ms)


def another_machine(table, draws):
    factor = float(draws.uniform(2, 3))
    return timed(table, torch.where(some(table.num_configurations, draws), factor, 1.0)[None])


def missing_where_slow(table, draws):
    late = slowest(table, draws.uniform(0.03, 0.2))
    # every sample and configuration keeps a cell
    ranks = table.latency_ms.nan_to_num(torch.inf)
    late &= (ranks > ranks.amin(1, keepdim=True)) & (ranks > ranks.amin(0))
    return measured_once(table, table.latency_ms.masked_fill(late, torch.nan))


def missing_where_a_configuration_failed(table, draws):
    """The tool wrote no row for what failed: requests of one configuration."""
    column = draws.integers(table.num_configurations)
    lost = uniform(draws, table.mask.shape, 0, 1) < draws.uniform(0.3, 0.6)
    lost &= torch.arange(table.num_configurations) == column
    lost &= table.mask.sum(1, keepdim=True) > 1
    return measured_once(table, table.latency_ms.masked_fill(lost, torch.nan))


def idle_features(table, draws):
    block = list(table.features.values())[draws.integers(len(table.features))]
    column = block[:, draws.integers(block.shape[1])]
    holes = column.masked_fill(some(len(column), draws), torch.nan)
    return with_feature(table, (column, holes, torch.ones(len(column)))[draws.integers(3)])


NOTICED_BY = {
    a_latency: "copied_outcomes",
    a_scaled_outcome: "copied_outcomes",
    a_mean_outcome: "copied_outcomes",
    a_sum: "predicted_too_well",
    a_noisy_latency: "copied_outcomes, predicted_too_well",
    features_shifted: "order_of_features",
    features_shuffled: "order_of_features",
    all_in_seconds: "usual_time",
    samples_in_seconds: "units_of_samples",
    configurations_in_microseconds: "units_of_configurations",
    samples_in_percent: "percent",
    one_cache_for_two_models: "equal_scores",
    copied_samples: "same_samples",
    measured_twice: "same_samples",
    time_outs_as_zero: "costs_of_zero",
    capped_times: "capped",
    copied_repeats: "equal_repeats",
    coarse_timer: "equal_times",
    slower_from_a_sample_on: "later_samples",
    slower_repeats: "later_repeats",
    another_machine: "other_machine",
    missing_where_slow: "missing_where_slow",
    missing_where_a_configuration_failed: "missing_configurations",
    idle_features: "missing_features, constant_features, repeated_features",
    **SERVED,
    **WRITTEN,
}
"""Fault → the check that should notice it."""


def instance(fault, tables, draws):
    """A random sound table and the same with the fault."""
    table = tables[draws.integers(len(tables))]
    rows = np.sort(draws.permutation(table.num_samples)[:500])
    sound = part_of(table, rows)
    return sound, fault(sound, draws)


def main(paths):
    tables = sound_tables(paths)
    sound = [(table.name, findings_by_check(table)) for table in tables]
    print(f"| fault | noticed by | found in {INSTANCES} | false alarms on {len(tables)} |")
    print("|---|---|---|---|")
    for number, fault in enumerate([*NOTICED_BY, *SELDOM, *UNNOTICED]):
        draws = np.random.default_rng(number)
        seen = 0
        # some have several signs
        check = (NOTICED_BY | SELDOM).get(fault, "")
        checks = check.split(", ") if check else [*sound[0][1]]
        for _ in range(INSTANCES):
            before, after = map(findings_by_check, instance(fault, tables, draws))
            seen += any(len(after[name]) > len(before[name]) for name in checks)
        false = [name for name, faults in sound if check and any(map(faults.get, checks))]
        words = fault.__name__.replace("_", " ")
        print(f"| {words} | {check} | {seen} | {len(false)} {', '.join(false)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
