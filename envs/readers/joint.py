"""Several profiles of the same knobs joined into one table; `datasets` says where a sample is
from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.readers.frames import TIERS
from knobwise.envs.tables.profile_table import Knob, KnobValue, ProfileTable

DATASET = "dataset"
"""The feature block that says which data set a sample is from."""


def join_tables(
    tables: Sequence[ProfileTable], name: str = "joint", *, missing_blocks: bool = False
) -> ProfileTable:
    """One table of all samples, with the configurations of all tables; cells not profiled in their
    table stay so.

    The values of a knob may differ, and a data set may be spread over several tables.
    `missing_blocks` fills in feature blocks that a table lacks as missing (NaN). Raises InputError
    if knobs, units, or the names or widths of feature blocks differ, or a sample occurs twice.
    """
    if not tables:
        raise InputError(f"profile {name!r}: no tables to join")
    if any(table.first_look_ms is not None or table.cost is not None for table in tables):
        raise InputError(
            f"profile {name!r}: tables with a first look or a further cost cannot be joined"
        )
    knobs = _joined_knobs(tables)
    codes = [_codes(table, knobs) for table in tables]
    configurations, place = torch.cat(codes).unique(dim=0, return_inverse=True)
    places = place.split([len(code) for code in codes])
    shape = sum(table.num_samples for table in tables), len(configurations)
    accuracy = torch.full(shape, torch.nan)
    latency_ms = torch.full(shape, torch.nan)
    most = max(table.num_repeats for table in tables)
    if most > 1:
        repeats_ms = torch.full((*shape, most), torch.nan)
    else:
        repeats_ms = None
    first = 0
    for table, columns in zip(tables, places, strict=True):
        rows = slice(first, first := first + table.num_samples)
        accuracy[rows].index_copy_(1, columns, table.accuracy)
        latency_ms[rows].index_copy_(1, columns, table.latency_ms)
        if repeats_ms is not None:
            repeats_ms[rows, :, : table.num_repeats].index_copy_(1, columns, table.measurements_ms)
    parts, notes = _parts(tables)
    typed, with_images = (
        any(getattr(t, name) for t in tables) for name in ("question_types", "image_ids")
    )
    return ProfileTable(
        name=name,
        knobs=knobs,
        configurations=configurations,
        accuracy=accuracy,
        latency_ms=latency_ms,
        mask=~accuracy.isnan(),
        sample_ids=_all(table.sample_ids for table in tables),
        features=_features(tables, missing_blocks),
        datasets=_all(table.dataset_names for table in tables),
        # image ids are unique inside their data set only
        image_ids=_all(t.image_ids or t.sample_ids for t in tables) if with_images else (),
        parts=parts,
        question_types=_all(t.question_types or ("unknown",) * t.num_samples for t in tables)
        if typed
        else (),
        notes=(*(f"{table.name}: {note}" for table in tables for note in table.notes), *notes),
        unit=tables[0].unit,
        repeats_ms=repeats_ms,
    )


def with_dataset_input(table: ProfileTable, names: Sequence[str] = ()) -> ProfileTable:
    """Return the table with a feature block `dataset`: a column for each of these data sets, by
    default those of the table in alphabetical order, 1 for its samples. A sample of any other data
    set is 0 everywhere. Raises InputError if there is one data set, or such a block already."""
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
    """The rows (int64 [n]) of each data set: name → positions in `rows`, int64, sorted by name."""
    names = np.array(table.dataset_names)[rows.numpy()]
    return {str(name): torch.from_numpy((names == name).nonzero()[0]) for name in np.unique(names)}


def _all(words: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(chain.from_iterable(words))


def _joined_knobs(tables: Sequence[ProfileTable]) -> tuple[Knob, ...]:
    """The knobs in the order of the first table, each with the values of all tables."""
    names = [knob.name for knob in tables[0].knobs]
    for table in tables[1:]:
        if sorted(knob.name for knob in table.knobs) != sorted(names):
            raise InputError(
                f"profile {table.name!r} has the knobs "
                f"{', '.join(knob.name for knob in table.knobs)}, but "
                f"{tables[0].name!r} has {', '.join(names)}; joined profiles must have the same "
                "knobs"
            )
        if table.unit != tables[0].unit:
            raise InputError(
                f"profile {table.name!r} is in {table.unit}, but {tables[0].name!r} is in "
                f"{tables[0].unit}; profiles "
                "that are joined must be in the same unit"
            )
    knobs = []
    for name in names:
        values: set[KnobValue] = {
            v for table in tables for k in table.knobs if k.name == name for v in k.values
        }
        if len({isinstance(value, str) for value in values}) > 1:
            raise InputError(
                f"knob {name!r} is a number in one profile and a name in another; give it the "
                "same values"
            )
        if values <= set(TIERS):
            order = TIERS.index
        else:
            order = None
        knobs.append(Knob(name, tuple(sorted(values, key=order))))
    return tuple(knobs)


def _codes(table: ProfileTable, knobs: tuple[Knob, ...]) -> Tensor:
    """The table's configurations in the values of these knobs, int64 [C, K]."""
    names = [knob.name for knob in table.knobs]
    columns = []
    for knob in knobs:
        number = names.index(knob.name)
        places = torch.tensor([knob.values.index(value) for value in table.knobs[number].values])
        columns.append(places[table.configurations[:, number]])
    return torch.stack(columns, 1)


def _features(tables: Sequence[ProfileTable], missing_blocks: bool) -> dict[str, Tensor]:
    widths: dict[str, int] = {}
    for table in tables:
        for block, values in table.features.items():
            if (width := widths.setdefault(block, values.shape[1])) != values.shape[1]:
                raise InputError(
                    f"features: block {block!r} is {values.shape[1]} wide in profile "
                    f"{table.name!r} and {width} in one "
                    "before it; joined profiles must have features of the same encoder"
                )
    for table in tables:
        if (
            lacking := [block for block in widths if block not in table.features]
        ) and not missing_blocks:
            raise InputError(
                f"features: profile {table.name!r} has no block {', '.join(lacking)}, which "
                "another has; give its "
                "features, or fill them in with missing_blocks=true"
            )
    return {
        block: torch.cat(
            [t.features.get(block, torch.full((t.num_samples, width), torch.nan)) for t in tables]
        )
        for block, width in widths.items()
    }


def _parts(tables: Sequence[ProfileTable]) -> tuple[tuple[str, ...], list[str]]:
    """Each sample's part if any of the tables fixes its split, and notes on the other tables."""
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
            if table.parts:
                fixes = "fixes no validation part"
            else:
                fixes = "fixes no split"
            notes.append(
                f"{table.name}: {fixes}, unlike others; it was divided "
                f"{'75/25' if table.parts else '60/20/20'}"
            )
        parts_of_tables.append(parts.tolist())
    return _all(parts_of_tables), notes
