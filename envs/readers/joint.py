"""Joining several profiles of the same knobs into one table.

The table's `datasets` tell where each sample is from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.readers.frames import knob_of
from knobwise.envs.tables.columns import FEATURES, Column
from knobwise.envs.tables.profile_table import Knob, KnobValue, ProfileTable

DATASET = "dataset"
"""The feature block that says which data set a sample is from."""


def join_tables(
    tables: Sequence[ProfileTable], name: str = "joint", *, missing_blocks: bool = False
) -> ProfileTable:
    """Join tables into one of all samples, with the configurations of all tables.

    Cells that were not profiled in their table stay so. The values of a knob may differ, and a data
    set may be spread over several tables. `missing_blocks` fills in feature blocks that a table
    lacks as missing (NaN). Raises InputError if knobs, units, or the names or widths of feature
    blocks differ, or a sample occurs twice.
    """
    if not tables:
        raise InputError(f"profile {name!r}: no tables to join")
    if any(table.first_look_ms is not None for table in tables):
        raise InputError(f"profile {name!r}: tables with first_look_ms cannot be joined")
    # configurations of all tables, each once
    knobs = _joined_knobs(tables)
    codes = [_codes(table, knobs) for table in tables]
    configurations, columns = torch.cat(codes).unique(dim=0, return_inverse=True)
    columns_of_tables = columns.split([len(code) for code in codes])
    accuracy, latency_ms, repeats_ms = _joined_cells(tables, columns_of_tables, len(configurations))
    parts, notes_on_parts = _parts(tables)
    notes = list[str]()
    for table in tables:
        notes += [f"{table.name}: {note}" for note in table.notes]
    return ProfileTable(
        name=name,
        knobs=knobs,
        configurations=configurations,
        accuracy=accuracy,
        latency_ms=latency_ms,
        mask=~accuracy.isnan(),
        sample_ids=_all(table.sample_ids for table in tables),
        features=_features(tables, missing_blocks),
        columns=_columns(tables),
        datasets=_all(table.dataset_names for table in tables),
        image_ids=_names(tables, "image_ids", lambda table: table.sample_ids),
        # an id is unique inside its data set only
        clusters=_names(tables, "clusters", lambda table: map("/".join, table.split_keys)),
        parts=parts,
        question_types=_names(
            tables, "question_types", lambda table: ["unknown"] * len(table.mask)
        ),
        notes=(*notes, *notes_on_parts),
        unit=tables[0].unit,
        repeats_ms=repeats_ms,
    )


def _joined_cells(
    tables: Sequence[ProfileTable], columns_of_tables: Sequence[Tensor], num_configurations: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return accuracy [N, C], latency [N, C] and, if a cell has several, measurements [N, C, R].

    `columns_of_tables` has the joined configuration of each configuration of each table.
    """
    shape = sum(table.num_samples for table in tables), num_configurations
    accuracy = torch.full(shape, torch.nan)
    latency_ms = torch.full(shape, torch.nan)
    num_repeats = max(table.num_repeats for table in tables)
    repeats_ms = None
    if num_repeats > 1:
        repeats_ms = torch.full((*shape, num_repeats), torch.nan)
    # copy each table into its rows, column by column
    start = 0
    for table, columns in zip(tables, columns_of_tables, strict=True):
        rows = slice(start, start + table.num_samples)
        start += table.num_samples
        accuracy[rows].index_copy_(1, columns, table.accuracy)
        latency_ms[rows].index_copy_(1, columns, table.latency_ms)
        if repeats_ms is not None:
            repeats_ms[rows, :, : table.num_repeats].index_copy_(1, columns, table.measurements_ms)
    return accuracy, latency_ms, repeats_ms


def with_dataset_input(table: ProfileTable, names: Sequence[str] = ()) -> ProfileTable:
    """Return the table with a feature block `dataset` that says which data set a sample is from.

    Args:
        table: the table.
        names: data sets, one for each column, which is 1 for its samples and 0 for others; by
            default those of the table in alphabetical order.

    Raises:
        InputError: if there is one data set, or such a block already.
    """
    names = names or sorted(set(table.dataset_names))
    if len(names) < 2 or DATASET in table.features:
        raise InputError(
            f"policy.dataset_input=true: needs several data sets, and no other feature block "
            f"{DATASET!r}; profile {table.name!r} has the data sets {', '.join(names)} and the "
            f"blocks {', '.join(table.features) or 'none'}"
        )
    block = torch.from_numpy(np.array(table.dataset_names)[:, None] == np.array(names)).float()
    note = f"the columns of the feature block {DATASET!r} are {', '.join(names)}"
    features = {**table.features, DATASET: block}
    return replace(table, features=features, notes=(*table.notes, note))


def rows_by_dataset(table: ProfileTable, rows: Tensor) -> dict[str, Tensor]:
    """Return the positions in `rows`, int64 [n], that belong to each data set, sorted by name."""
    names = np.array(table.dataset_names)[rows.numpy()]
    return {str(name): torch.from_numpy((names == name).nonzero()[0]) for name in np.unique(names)}


def _names(
    tables: Sequence[ProfileTable], field: str, default: Callable[[ProfileTable], Iterable[str]]
) -> tuple[str, ...]:
    """Return what a field says of all samples; `default` is for tables that do not have it. Empty
    if none has it."""
    if not any(getattr(table, field) for table in tables):
        return ()
    return _all(getattr(table, field) or default(table) for table in tables)


def _all(words: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(chain.from_iterable(words))


def _joined_knobs(tables: Sequence[ProfileTable]) -> tuple[Knob, ...]:
    """Return the knobs in the order of the first table, each with the values of all tables.

    Raises InputError if the tables have different knobs or units.
    """
    names = [knob.name for knob in tables[0].knobs]
    for table in tables[1:]:
        other_names = [knob.name for knob in table.knobs]
        if sorted(other_names) != sorted(names):
            raise InputError(
                f"profile {table.name!r} has the knobs {', '.join(other_names)}, but "
                f"{tables[0].name!r} has {', '.join(names)}; joined profiles must have the same "
                "knobs"
            )
        if table.unit != tables[0].unit:
            raise InputError(
                f"profile {table.name!r} is in {table.unit}, but {tables[0].name!r} is in "
                f"{tables[0].unit}; profiles that are joined must be in the same unit"
            )
    # the values of a knob are those of all tables, in its own order
    knobs = []
    for name in names:
        values: set[KnobValue] = set()
        for table in tables:
            values.update(*(knob.values for knob in table.knobs if knob.name == name))
        if len({isinstance(value, str) for value in values}) > 1:
            raise InputError(
                f"knob {name!r} is a number in one profile and a name in another; give it the "
                "same values"
            )
        knobs.append(knob_of(name, values))
    return tuple(knobs)


def _codes(table: ProfileTable, knobs: tuple[Knob, ...]) -> Tensor:
    """Return the table's configurations as indices of the joined knobs' values, int64 [C, K]."""
    settings = [table.configuration(i) for i in range(table.num_configurations)]
    columns = []
    for knob in knobs:
        columns.append([knob.values.index(setting[knob.name]) for setting in settings])
    return torch.tensor(columns).T


def _features(tables: Sequence[ProfileTable], missing_blocks: bool) -> dict[str, Tensor]:
    """Return the feature blocks of all tables, [N, d] each.

    Raises InputError if their widths differ, or one is missing although it must not be.
    """
    # the first table with a block decides its width
    widths: dict[str, int] = {}
    for table in tables:
        for block, values in table.features.items():
            if (width := widths.setdefault(block, values.shape[1])) != values.shape[1]:
                raise InputError(
                    f"features: block {block!r} is {values.shape[1]} wide in profile "
                    f"{table.name!r} and {width} in one before it; joined profiles must have "
                    "features of the same encoder"
                )
    # blocks that are missing are filled with NaN only on demand
    for table in tables:
        lacking = [block for block in widths if block not in table.features]
        if lacking and not missing_blocks:
            raise InputError(
                f"features: profile {table.name!r} has no block {', '.join(lacking)}, which "
                "another has; give its features, or fill them in with missing_blocks=true"
            )
    # one block after another, over all tables
    joined = {}
    for block, width in widths.items():
        parts = []
        for table in tables:
            missing = torch.full((table.num_samples, width), torch.nan)
            parts.append(table.features.get(block, missing))
        joined[block] = torch.cat(parts)
    return joined


def _columns(tables: Sequence[ProfileTable]) -> tuple[Column, ...]:
    """Return what the block `features` holds; () unless every table that has it says so.

    Raises InputError if tables have columns of other names, or texts with other values.
    """
    named = [table.columns for table in tables if FEATURES in table.features]
    joined = []
    # a table without names ends this at once
    for columns in zip(*named, strict=False):
        joined.append(columns[0]._replace(gaps=any(column.gaps for column in columns)))
        if len({column[:2] for column in columns}) > 1:
            raise InputError(
                f"features: {' and '.join(map(str, dict.fromkeys(columns)))} of joined profiles "
                "differ in name or values; put the profiles in one file, with a column `dataset`"
            )
    return tuple(joined)


def _parts(tables: Sequence[ProfileTable]) -> tuple[tuple[str, ...], list[str]]:
    """Return each sample's part if any table fixes its split, and notes on the other tables."""
    if not any(table.parts for table in tables):
        return (), []
    # if no table has a validation part, `ProfileTable.split` takes one out of all training parts,
    # by its own seed
    whole = all(set(table.parts) == {"train", "test"} for table in tables)
    parts_of_tables = []
    notes = []
    for table in tables:
        parts = np.array(table.parts or ("",) * table.num_samples, dtype=object)
        if not table.parts or (set(table.parts) == {"train", "test"} and not whole):
            for part, rows in table.split()._asdict().items():
                parts[rows.numpy()] = part
            what = "split; it was divided 60/20/20"
            if table.parts:
                what = "validation part; its training part was divided 75/25"
            notes.append(f"{table.name}: unlike others fixes no {what}")
        parts_of_tables.append(parts.tolist())
    return _all(parts_of_tables), notes
