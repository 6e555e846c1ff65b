"""Joining several profiles of the same knobs into one table.

The table's `datasets` tell where each sample is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import spelled_truths, whole_words
from knobwise.envs.readers.dense_table import CLUSTER, TIME
from knobwise.envs.readers.long_table import long_frame, table_from_frame
from knobwise.envs.tables.columns import FEATURES, Column
from knobwise.envs.tables.copies import with_copies_together
from knobwise.envs.tables.profile_table import ProfileTable

DATASET = "dataset"
"""The feature block that says which data set a sample is from."""


def join_tables(
    tables: Sequence[ProfileTable], name: str = "joint", *, missing_blocks: bool = False
) -> ProfileTable:
    """Join tables into one of all samples, with the configurations of all tables.

    Cells that were not profiled in their table stay so. The values of a knob may differ, and a data
    set may be spread over several tables. `missing_blocks` fills in feature blocks that a table
    lacks as missing (NaN). A further cost that a table lacks is unknown there. Raises InputError if
    knobs, units, or the names or widths of feature blocks differ, or a sample occurs twice.
    """
    if not tables or any(table.first_look_ms is not None for table in tables):
        raise InputError(f"profile {name!r}: give tables to join, none of them with first_look_ms")
    knobs = [knob.name for knob in tables[0].knobs]
    for table in tables:
        names = [knob.name for knob in table.knobs]
        if sorted(names) != sorted(knobs) or table.unit != tables[0].unit:
            raise InputError(
                f"profile {table.name!r} has the knobs {', '.join(names)} and is in {table.unit}, "
                f"but {tables[0].name!r} has {', '.join(knobs)} and is in {tables[0].unit}; joined "
                "profiles must have the same knobs and unit"
            )
    divided, notes_on_parts = _divided(tables)
    frames = [long_frame(table) for table in _weighted(divided)]
    for knob in knobs:
        if any(frame[knob].dtype == pl.Boolean for frame in frames):
            # in files of earlier versions they are text
            frames = [frame.with_columns(spelled_truths(frame[knob])) for frame in frames]
        kinds = sorted({_kind(frame[knob].dtype) for frame in frames})
        if len(kinds) > 1:
            raise InputError(
                f"knob {knob!r} is {kinds[0]} in one profile and {kinds[1]} in another; give it "
                "the same values"
            )
    rows = whole_words(pl.concat(frames, how="diagonal_relaxed"))
    if rows.select("dataset", "sample_id").n_unique() < sum(table.num_samples for table in tables):
        raise InputError(f"profile {name!r}: sample ids are not unique inside a data set")
    group = None
    if CLUSTER in rows.columns:
        group = CLUSTER
        # an id is unique inside its data set only
        unit = "image_id" if "image_id" in rows.columns else "sample_id"
        alone = pl.concat_str("dataset", unit, separator="/")
        rows = rows.with_columns(pl.coalesce(CLUSTER, alone))
    notes = [f"{table.name}: {note}" for table in tables for note in table.notes]
    # samples stay in the order of the tables
    joined = table_from_frame(
        rows.with_row_index(TIME),
        name=name,
        knobs=knobs,
        unit=tables[0].unit,
        costs=[name for table in tables for name in table.costs],
        group=group,
        time=TIME,
        notes=[*notes, *notes_on_parts],
    )
    features = _features(tables, missing_blocks)
    joined = replace(joined, features=features, columns=_columns(tables), texts=_texts(tables))
    return with_copies_together(joined)


def _kind(dtype: pl.DataType) -> str:
    """Return what the values of a knob are, in words."""
    if dtype == pl.Boolean:
        return "true or false"
    return "a number" if dtype.is_numeric() else "a name"


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


def _features(tables: Sequence[ProfileTable], missing_blocks: bool) -> dict[str, Tensor]:
    """Return the feature blocks of all tables, [N, d] each.

    Raises InputError if their widths differ, or one is missing although it must not be.
    """
    # the first table with a block decides its width
    widths: dict[str, int] = {}
    for table in tables:
        for block, columns in table.features.items():
            widths.setdefault(block, columns.shape[1])
    parts: dict[str, list[Tensor]] = {block: [] for block in widths}
    for table in tables:
        for block, width in widths.items():
            values: Tensor | None = table.features.get(block)
            if values is None and missing_blocks:
                values = torch.full((table.num_samples, width), torch.nan)
            if values is None or values.shape[1] != width:
                raise InputError(
                    f"features: profile {table.name!r} has no block {block!r} of {width} columns, "
                    "as another has; give features of the same encoder, or fill in missing blocks "
                    "with missing_blocks=true"
                )
            parts[block].append(values)
    return {block: torch.cat(blocks) for block, blocks in parts.items()}


def _texts(tables: Sequence[ProfileTable]) -> dict[str, list[str]]:
    """Return the texts of all tables. Raises InputError if tables have others."""
    if len({tuple(sorted(table.texts)) for table in tables}) > 1:
        names = " and ".join(", ".join(table.texts) or "no text" for table in tables)
        raise InputError(f"features: joined profiles have {names}; give all of them the same")
    texts: dict[str, list[str]] = {}
    for table in tables:
        for name, values in table.texts.items():
            texts.setdefault(name, []).extend(values)
    return texts


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


def _weighted(tables: Sequence[ProfileTable]) -> Sequence[ProfileTable]:
    """Return the tables with sampling weights, if any has them. Where a table does not say so, the
    cells of a configuration count as drawn at random, or as whole if all were measured."""
    if all(table.sampling_weight is None for table in tables):
        return tables
    weighted = []
    for table in tables:
        if table.sampling_weight is None:
            table = replace(table, sampling_weight=table.mask / table.mask.float().mean(0))
        weighted.append(table)
    return weighted


def _divided(tables: Sequence[ProfileTable]) -> tuple[list[ProfileTable], list[str]]:
    """Return the tables with the data set of each sample, and its part if any table fixes its
    split; and notes on the tables that were divided for that."""
    fixed = any(table.parts for table in tables)
    # if no table has a validation part, `ProfileTable.split` takes one out of all training parts,
    # by its own seed
    whole = all(set(table.parts) == {"train", "test"} for table in tables)
    divided = []
    notes = []
    for table in tables:
        parts = np.array(table.parts, dtype=object)
        if fixed and not whole and set(parts) in (set(), {"train", "test"}):
            parts = np.empty(table.num_samples, object)
            for part, rows in table.split()._asdict().items():
                parts[rows.numpy()] = part
            notes.append(
                f"{table.name}: fixes no split with all parts, unlike others; it was drawn"
            )
        divided.append(replace(table, datasets=table.dataset_names, parts=tuple(parts)))
    return divided, notes
