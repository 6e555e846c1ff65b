"""Which profile: the config group `profile`, a dataclass for each reader."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import MISSING

from knobwise.envs.profiles import read_long_table
from knobwise.envs.table import ProfileTable


@dataclass
class BuiltinProfile:
    """The profile that comes with knobwise."""

    format: str = "builtin"
    """Which reader."""
    accuracy: str = "accuracy"
    """`accuracy` (exact match) or `soft_score` (share of right tokens)."""


@dataclass
class Exp5Exp6Profile:
    """Accuracy files and latency files as the profiler of the original system writes them."""

    format: str = "exp5_exp6"
    """Which reader."""
    exp5_dir: str = MISSING
    """Folder of the accuracy files."""
    exp6_dir: str = MISSING
    """Folder of the latency files."""
    dataset_name: Any = MISSING
    """Name of the data set, such as text_vqa; or a list of names."""
    features: str | None = None
    """Feature file keyed by sample id; None for a policy that sees the budget only."""
    latency: str = "total"
    """Which time the budget limits: total, prefill or decode."""
    accuracy: str = "score"
    """Which value of the exp5 rows is the accuracy."""
    exp6_accuracy: bool = False
    """Take the accuracy that the latency files recorded themselves."""
    broadcast_latency: bool = False
    """Give a configuration's mean latency to all its samples where nothing finer was measured."""
    name: str | None = None
    """What the profile is called; None for the data set's name."""


@dataclass
class CoreExpProfile:
    """core_exp folders: one file for each configuration, resolution tiers instead of crops."""

    format: str = "core_exp"
    """Which reader."""
    directory: str = MISSING
    """Folder of the files, or of folders called as the data sets."""
    dataset_name: str = MISSING
    """Name of the data set."""
    latency: str = "total"
    """Which time the budget limits: total, prefill or vision_prefill."""
    features: str | None = None
    """Feature file keyed by sample id; None for a policy that sees the budget only."""
    name: str | None = None
    """What the profile is called; None for the data set's name."""


@dataclass
class TableProfile:
    """A long table of any system: one row for each sample and configuration."""

    format: str = "table"
    """Which reader."""
    path: str = MISSING
    """CSV, Parquet or JSON lines; or a `.safetensors` that `ProfileTable.save` wrote, with all the rest inside."""
    features: str | None = None
    """Feature file keyed by sample id; None for a policy that sees the budget only."""
    knobs: list[str] | None = None
    """Columns that are knobs; None for every column that is not known to be something else."""
    accuracy: str = "accuracy"
    """Column of the accuracy, in 0..1."""
    latency: str = "latency_ms"
    """Column of the latency in ms, or of another cost that is not negative: prefill time, energy, price."""
    unit: str = "ms"
    """What that column is in, for reports; budgets are given in it too."""
    name: str | None = None
    """What the profile is called; None for the file's name."""


@dataclass
class SimulatedProfile:
    """A profile drawn from a model instead of measured, for comparing ways of choosing."""

    format: str = "simulated"
    """Which reader."""
    kind: str = "router"
    """Which kind: router, encoder, portfolio, noisy_labels, heavy_tails, weak_features, few_samples, low_headroom,
    no_headroom, unattainable or wide_knobs."""
    samples: int | None = None
    """How many samples; None for the kind's own number."""
    seed: int = 0
    """Of everything that is drawn."""


def read_profile(config: Any) -> ProfileTable:
    """Read the profile that a config of group `profile` names.

    Raises:
        InputError: see the readers.
    """
    if isinstance(config, BuiltinProfile):
        from knobwise.envs.builtin import builtin_profile

        return builtin_profile(config.accuracy)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "format"}
    if isinstance(config, SimulatedProfile):
        from knobwise.envs.simulator import SimulatedConfig, simulate

        return simulate(SimulatedConfig(**settings))
    if isinstance(config, TableProfile):
        path = settings.pop("path")
        return ProfileTable.load(path) if path.endswith(".safetensors") else read_long_table(path, **settings)
    from knobwise.envs.exp_files import read_core_exp, read_exp5_exp6

    return read_core_exp(**settings) if isinstance(config, CoreExpProfile) else read_exp5_exp6(**settings)


PROFILES: dict[str, type[Any]] = {
    "builtin": BuiltinProfile,
    "exp5_exp6": Exp5Exp6Profile,
    "core_exp": CoreExpProfile,
    "table": TableProfile,
    "simulated": SimulatedProfile,
}
"""The options of the group."""
