"""Which profile: the config group `profile`, a dataclass for each reader."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from knobwise.agents.training.settings import a_seed
from knobwise.common.errors import InputError
from knobwise.envs.readers.joint import join_tables, with_dataset_input
from knobwise.envs.readers.long_table import attach_features, read_long_table
from knobwise.envs.tables.profile_table import ProfileTable


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
    dataset_input: bool = False
    """Of several data sets: which one a sample is from is a feature block, `dataset`."""
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
    dataset_input: bool = False
    """Of several data sets (column `dataset`): which one a sample is from is a feature block, `dataset`."""
    name: str | None = None
    """What the profile is called; None for the file's name."""


@dataclass
class JointProfile:
    """Several profiles with the same knobs as one, each with the data sets in it."""

    format: str = "joint"
    """Which reader."""
    paths: list[str] = MISSING
    """Files as for profile=table: long tables, or `.safetensors` that `ProfileTable.save` wrote. A long table without a
    column `dataset` is a data set of its own, called as the file."""
    features: list[str | None] | None = None
    """Feature files, one for each path (null for a path that has none, or has its own inside); None for none."""
    dataset_input: bool = False
    """Which data set a sample is from is a feature block, `dataset`, which the policy reads."""
    missing_blocks: bool = False
    """Feature blocks that a profile does not have at all are filled in instead of refused."""
    knobs: list[str] | None = None
    """Columns of the long tables that are knobs; None for every column that is not known to be something else."""
    accuracy: str = "accuracy"
    """Column of the accuracy, in 0..1."""
    latency: str = "latency_ms"
    """Column of the latency in ms, or of another cost that is not negative."""
    unit: str = "ms"
    """What that column is in, for reports; budgets are given in it too."""
    name: str = "joint"
    """What the profile is called."""


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

    def __post_init__(self) -> None:
        a_seed("profile.seed", self.seed)


@dataclass
class CalibratedProfile:
    """Simulated data sets of a vision-language model, calibrated to published numbers."""

    format: str = "calibrated"
    """Which reader."""
    datasets: list[str] = field(default_factory=lambda: ["text_vqa", "coco_vqa", "okvqa"])
    """Data sets, out of text_vqa, coco_vqa, okvqa."""
    samples: int = 2276
    """How many samples of each data set."""
    grid: str = "240"
    """Which configurations: 240, 27 or tiers."""
    latency: str = "total"
    """Which time the budget limits: total, prefill or vision_prefill."""
    image_width: int = 768
    """Width of the block image_features; 0 for none."""
    language_width: int = 2048
    """Width of the block language_features; 0 for none."""
    signal: float = 0.5
    """Share of what matters of a sample that features can tell."""
    dataset_input: bool = False
    """Which data set a sample is from is a feature block, `dataset`."""
    seed: int = 0
    """Of everything that is drawn."""

    def __post_init__(self) -> None:
        a_seed("profile.seed", self.seed)


def read_profile(config: Any) -> ProfileTable:
    """Read the profile that a config of group `profile` names.

    Raises:
        InputError: see the readers.
    """
    if isinstance(config, BuiltinProfile):
        from knobwise.envs.readers.builtin import builtin_profile

        return builtin_profile(config.accuracy)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "format"}
    if isinstance(config, SimulatedProfile):
        from knobwise.envs.simulated.kinds import SimulatedConfig, simulate

        return simulate(SimulatedConfig(**settings))
    if isinstance(config, JointProfile):
        return _read_joint(**settings)
    shown = with_dataset_input if settings.pop("dataset_input", False) else lambda table: table
    if isinstance(config, CalibratedProfile):
        from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated

        return shown(simulate_calibrated(CalibratedConfig(**{**settings, "datasets": tuple(settings["datasets"])})))
    if isinstance(config, TableProfile):
        return shown(_read_table(**settings))
    from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6

    return read_core_exp(**settings) if isinstance(config, CoreExpProfile) else shown(read_exp5_exp6(**settings))


def _read_table(path: str, **settings: Any) -> ProfileTable:
    if not path.endswith(".safetensors"):
        return read_long_table(path, **settings)
    table = ProfileTable.load(path)
    return table if settings["features"] is None else attach_features(table, settings["features"])


def _read_joint(
    paths: list[str],
    features: list[str | None] | None,
    dataset_input: bool,
    missing_blocks: bool,
    name: str,
    **settings: Any,
) -> ProfileTable:
    """Read every file, and join them."""
    features = features or [None] * len(paths)
    if len(features) != len(paths):
        raise InputError(
            f"profile.features: {len(features)} files for {len(paths)} paths; give one for each, null where it has none"
        )
    tables = [_read_table(path, features=own, name=None, **settings) for path, own in zip(paths, features, strict=True)]
    return join_tables(tables, name, dataset_input=dataset_input, missing_blocks=missing_blocks)


PROFILES: dict[str, type[Any]] = {
    "builtin": BuiltinProfile,
    "exp5_exp6": Exp5Exp6Profile,
    "core_exp": CoreExpProfile,
    "table": TableProfile,
    "joint": JointProfile,
    "simulated": SimulatedProfile,
    "calibrated": CalibratedProfile,
}
"""The options of the group."""
