"""The config group `profile`: a dataclass for each reader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError, naming
from knobwise.experiments.settings.words import MISSING
from knobwise.testbeds.simulated.settings import SimulatedConfig

# readers import torch, which the command line does without until there is something to read
if TYPE_CHECKING:
    from knobwise.agents.deployed.text import TextEncoder
    from knobwise.agents.training.checkpoint import Loaded
    from knobwise.envs.tables.profile_table import ProfileTable


@dataclass
class BuiltinProfile:
    """The profile that comes with knobwise."""

    format: str = "builtin"
    """The reader."""
    accuracy: str = "accuracy"
    """`accuracy` (exact match) or `soft_score` (share of right tokens)."""


@dataclass
class OCRProfile:
    """The profile of RapidOCR that comes with knobwise."""

    format: str = "ocr"
    """The reader."""


@dataclass
class SmolLMProfile:
    """The profile of SmolLM2 with demonstrations that comes with knobwise."""

    format: str = "smollm"
    """The reader."""


@dataclass
class OriginalProfile:
    """The settings that the formats of the original system share."""

    format: str = MISSING
    """The reader."""
    dataset_name: Any = MISSING
    """Name of the data set, such as text_vqa; for exp5_exp6 also a list of names."""
    features: str | None = None
    """Feature file keyed by sample id; None for a policy that sees the budget only."""
    features_ms: float = 0.0
    """Time to compute the features of a request, in ms; a controller that reads them is charged for
    it."""
    latency: str = "total"
    """The time that the budget limits: total or prefill; for exp5_exp6 also decode, for core_exp
    also vision_prefill."""
    accuracy_unit: str = "share"
    """`share` (0 to 1), or `percent` (0 to 100)."""
    name: str | None = None
    """Name of the profile; None for the data set's name."""


@dataclass
class Exp5Exp6Profile(OriginalProfile):
    """Accuracy and latency files, as the profiler of the original system writes them."""

    format: str = "exp5_exp6"
    exp5_dir: str = MISSING
    """Folder of the accuracy files, or the file of a whole run."""
    exp6_dir: str = MISSING
    """Folder of the latency files, or the file of a whole run."""
    accuracy: str = "score"
    """The value in the exp5 rows that is the accuracy."""
    broadcast_latency: bool = False
    """If latency was not measured per sample, use a configuration's mean latency for all
    samples."""


@dataclass
class CoreExpProfile(OriginalProfile):
    """core_exp folders: one file for each configuration, resolution tiers instead of crops."""

    format: str = "core_exp"
    dataset_name: str = MISSING
    """Name of the data set."""
    directory: str = MISSING
    """Folder of the files, or of folders named after the data sets."""


@dataclass
class LongTables:
    """The settings that all long tables share; they have one row for each sample and
    configuration."""

    format: str = MISSING
    """The reader."""
    id: str | None = None
    """Column of the ids, in the table and in its feature file; None for sample_id."""
    repeat: str | None = None
    """Column that numbers repeated measurements, such as run or trial; None for repeat, if there is
    one."""
    knobs: list[str] | None = None
    """Knob columns; None: every column not recognised as something else."""
    wide: list[str] | None = None
    """Columns of accuracies, one for each configuration, of a table with one row for each sample;
    None for one row per measurement."""
    wide_latency: list[Any] | None = None
    """A latency for each of these columns: a number, or the column that holds it."""
    accuracy: str = "accuracy"
    """Column of the accuracy."""
    right: Any = None
    """For a text accuracy column (ok, timeout, …): the value or values that mean "correct"; all
    others are wrong. None: the column is numeric."""
    accuracy_unit: str = "share"
    """`share` (0 to 1), or `percent` (0 to 100)."""
    latency: str = "latency_ms"
    """Column of the latency, or of another non-negative cost: prefill time, energy, price."""
    unit: str = "ms"
    """Unit of that column; ms leaves it to its name, such as latency_s. Times in ns, us, s, min or
    h are converted: budgets, results and all options are in ms. Any other unit, such as USD, is
    kept, and budgets are in it."""
    costs: list[str] | None = None
    """Columns of further costs, such as usd or energy_j, each in a unit of its own. Results show
    their means, and budget.limits may limit them."""
    missing: str = "unmeasured"
    """What cells without a row are: `unmeasured`; or `failed`, for tools that write no row for a
    request that failed. Then they count as late and wrong, except where a setting was measured for
    no sample of a data set."""
    group: str | None = None
    """Column that says which samples belong together, such as those of a document or a user: they
    stay in one part of the split. None where each sample stands alone."""
    features_from: Any = None
    """`module:function` that turns the texts among the features into numbers, such as an embedding
    model: a list of n texts → [n, d]. It is called once for each text, and its time is charged.
    None: words and short runs of characters, see docs/profiles.md."""
    time: str | None = None
    """Timestamp column, as numbers or as dates and times. Samples are ordered by it, so that drift
    over time can be detected. None: order of the ids."""
    features_ms: float = 0.0
    """Time to compute the features of a request, in ms; a controller that reads them is charged for
    it."""


@dataclass
class TableProfile(LongTables):
    """A long table of any system."""

    format: str = "table"
    path: Any = field(default=MISSING, metadata={"kinds": {"text", "a list of texts"}})
    """A table, such as CSV or Parquet; results of promptfoo, inspect-ai or evalscope, as a file or
    folder; or a complete `.safetensors` that `ProfileTable.save` wrote. A list of files of one tool
    is stacked; [scores.csv,times.csv] are joined by ids and knobs."""
    features: Any = None
    """Feature file keyed by sample id; or columns of the table: `auto` for all that are constant
    inside each sample, or a list of names. None for a policy that sees the budget only."""
    name: str | None = None
    """Name of the profile; None for the file's name."""


@dataclass
class JointProfile(LongTables):
    """Several profiles with the same knobs, joined into one."""

    format: str = "joint"
    paths: list[str] = MISSING
    """Files as for profile=table: long tables, or `.safetensors` that `ProfileTable.save` wrote. A
    long table without a column `dataset` is one data set, named after the file."""
    features: list[str | None] | None = None
    """Feature files, one for each path (null if a path has none, or contains its features); None
    for no features."""
    missing_blocks: bool = False
    """Fill in feature blocks that a profile lacks, instead of refusing it."""
    name: str = "joint"
    """Name of the profile."""


@dataclass
class SimulatedProfile(SimulatedConfig):
    """Simulated data sets of a vision-language model, calibrated to published numbers."""

    format: str = "simulated"
    """The reader."""


Profile = (
    BuiltinProfile
    | OCRProfile
    | SmolLMProfile
    | Exp5Exp6Profile
    | CoreExpProfile
    | TableProfile
    | JointProfile
    | SimulatedProfile
)
"""The settings of a profile, of any reader."""


def read_profile(
    config: Profile, loaded: Loaded | None = None, some_cells: bool = False
) -> ProfileTable:
    """Read the profile that a config of group `profile` names.

    Args:
        loaded: a checkpoint that is to decide on the profile. If its controller takes the data set
            as an input, the profile gets that input.
        some_cells: a long table holds a few cells of a profile that is known.

    Raises:
        InputError: see the readers.
    """
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "format"}
    features_ms = settings.pop("features_ms", 0.0)
    if not 0 <= features_ms < math.inf:
        raise InputError(f"profile.features_ms={features_ms}: must be a time in ms")
    features_from = settings.pop("features_from", None)
    if some_cells and isinstance(config, LongTables):
        settings["some_cells"] = True
    network = None
    encoders: Mapping[str, TextEncoder] = {}
    if loaded is not None:
        from knobwise.envs.tables.columns import FEATURES, Column

        network = loaded.network
        encoders = loaded.controller.decider.texts
        if isinstance(config, LongTables):
            texts = list(encoders)
            if features_from is not None:
                # blocks of numbers that were texts
                sizes = network.normaliser.sizes
                texts = [name for name in sizes if name not in (FEATURES, "dataset")]
            known = [Column(name, (), True) for name in texts]
            settings["columns"] = [*network.normaliser.columns, *known]
    table = _read(config, settings)
    if network is not None and not network.normaliser.columns:
        # the checkpoint knows its features by position alone
        table = replace(table, columns=())
    # no reader knows what features cost
    if features_ms:
        table = replace(table, features_ms=features_ms)
    if features_from is not None:
        from knobwise.envs.readers.embeddings import embed_texts

        table = embed_texts(table, features_from)
    if network is not None and network.normaliser.datasets:
        from knobwise.envs.readers.joint import with_dataset_input

        table = with_dataset_input(table, network.normaliser.datasets)
    if encoders:
        from knobwise.agents.evaluation.texts import encoded_by

        table = encoded_by(table, encoders)
    return table


def read_questions(config: Profile) -> dict[str, str]:
    """Return the question of each sample by its id, from the file `samples.parquet` of the profile;
    {} without one."""
    import polars as pl

    from knobwise.common.parquet import read_parquet
    from knobwise.testbeds.profiles import BUILTIN

    path = BUILTIN if isinstance(config, BuiltinProfile) else getattr(config, "path", "")
    if not path or isinstance(path, list):
        # a simulated profile has no files, and only one that knobwise wrote has the questions
        return {}
    try:
        frame = read_parquet(Path(path).with_name("samples.parquet")).select(
            "sample_id", "question"
        )
        return dict(frame.cast(pl.String).iter_rows())
    except (OSError, ValueError, pl.exceptions.PolarsError):
        # there is no such file, or it is damaged, or another one of that name
        return {}


def _read(config: Profile, settings: dict[str, Any]) -> ProfileTable:
    """Call the reader of a config with its settings."""
    if isinstance(config, SimulatedProfile):
        from knobwise.testbeds.simulated.calibrated import simulate

        return simulate(config)
    if isinstance(config, OriginalProfile):
        from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6

        core = isinstance(config, CoreExpProfile)
        return read_core_exp(**settings) if core else read_exp5_exp6(**settings)
    if isinstance(config, TableProfile):
        return _read_table(**settings)
    if isinstance(config, JointProfile):
        return _read_joint(**settings)
    from knobwise.testbeds.profiles import builtin_profile, ocr_profile, smollm_profile

    shipped: dict[str, Callable[..., ProfileTable]] = {
        "builtin": builtin_profile,
        "ocr": ocr_profile,
        "smollm": smollm_profile,
    }
    return shipped[config.format](**settings)


def _read_joint(
    paths: list[str],
    features: list[str | None] | None,
    name: str,
    missing_blocks: bool,
    **settings: Any,
) -> ProfileTable:
    """Read several tables and join them; `settings` are those of all long tables."""
    from knobwise.envs.readers.joint import join_tables

    files = features or [None] * len(paths)
    if len(files) != len(paths):
        raise InputError(
            f"profile.features: {len(files)} files for {len(paths)} paths; give one for each, "
            "null where it has none"
        )
    tables = [
        _read_table(path, features=file, name=None, **settings)
        for path, file in zip(paths, files, strict=True)
    ]
    return join_tables(tables, name, missing_blocks=missing_blocks)


def _read_table(path: Any, **settings: Any) -> ProfileTable:
    from knobwise.envs.readers.failures import MISSING_CELLS, cells_as_failed
    from knobwise.envs.readers.feature_files import attach_features
    from knobwise.envs.readers.layouts import Layout
    from knobwise.envs.readers.long_table import read_long_table
    from knobwise.envs.tables.copies import with_copies_together
    from knobwise.envs.tables.profile_table import ProfileTable

    features = settings["features"]
    if isinstance(features, (bool, int, float, dict)):
        raise InputError(f"profile.features={features}: must be a file, auto, or names of columns")
    if isinstance(features, str) and features != "auto" and not Path(features).is_file():
        raise InputError(
            f"profile.features={features}: no such file; give one, auto, or names of columns, as "
            "in [a,b]"
        )
    files = path if isinstance(path, list) else [path]
    if not all(isinstance(each, str) and each for each in files) or not files:
        raise InputError(f"profile.path={path}: must be a file or folder, or a list of them")
    if not any(each.endswith(".safetensors") for each in files):
        return read_long_table(path, **settings)
    if len(files) > 1:
        raise InputError(
            f"profile.path={path}: a .safetensors is a whole table and cannot be joined; "
            "profile=joint puts several data sets together"
        )
    (path,) = files
    of_columns = ["costs", "group", "time", "right", "wide", "wide_latency"]
    if features is None:
        of_columns += ["id", "repeat"]
    by_column = features == "auto" or isinstance(features, list)
    if by_column or any(settings[name] is not None for name in of_columns):
        raise InputError(
            f"{path}: holds no columns, only what it was written with; leave out "
            f"{', '.join(f'profile.{name}' for name in of_columns)}, and a profile.features that "
            "names columns"
        )
    table = ProfileTable.load(path)
    if settings["unit"] not in ("ms", table.unit):
        raise InputError(
            f"{path}: is in {table.unit}, as it was written; leave out profile.unit="
            f"{settings['unit']}"
        )
    one_of("profile.missing", settings["missing"], MISSING_CELLS)
    if settings["missing"] == "failed":
        with naming(path):
            table = cells_as_failed(table)
    if features is None:
        return with_copies_together(table)
    layout = Layout(id=settings["id"], repeat=settings["repeat"])
    return attach_features(table, features, settings.get("columns", ()), layout)


PROFILES: dict[str, type[Profile]] = {
    "builtin": BuiltinProfile,
    "ocr": OCRProfile,
    "smollm": SmolLMProfile,
    "exp5_exp6": Exp5Exp6Profile,
    "core_exp": CoreExpProfile,
    "table": TableProfile,
    "joint": JointProfile,
    "simulated": SimulatedProfile,
}
"""The choices of the group, by name."""
