"""Cells that are measured whatever a design draws: what a trained policy chooses, for judging it.

They are noted by the content of their sample and by the values of their knobs, so that they stay
with the folder when later calls add samples or configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.machine import read_note, write_readable_json

Bools = NDArray[np.bool_]
Configurations = Sequence[Mapping[str, Any]]
FILE = "sure_cells.json"
"""The file in the state folder."""


def read_sure_cells(path: Path, contents: Sequence[str], configurations: Configurations) -> Bools:
    """Return the cells that are noted in a file, bool [N, C]; none if there is no file.

    Args:
        contents: of the samples, see `content_keys`.
        configurations: with a value for every knob.

    Raises:
        InputError: the file is damaged.
    """
    cells = np.zeros((len(contents), len(configurations)), bool)
    if not path.exists():
        return cells
    noted = read_note(path, dict)
    columns = [_key(configuration) for configuration in configurations]
    for i, content in enumerate(contents):
        wanted = {*map(_key, noted.get(content, ()))}
        cells[i] = [column in wanted for column in columns]
    return cells


def write_sure_cells(
    path: Path, cells: Bools, contents: Sequence[str], configurations: Configurations
) -> None:
    """Note cells, bool [N, C], see `read_sure_cells`."""
    noted = {}
    for content, columns in zip(contents, cells, strict=True):
        if columns.any():
            noted[content] = [configurations[j] for j in np.flatnonzero(columns).tolist()]
    write_readable_json(path, noted)


def cells_of_plan(
    cells: Tensor, table: ProfileTable, ids: Sequence[str], configurations: Configurations
) -> Bools:
    """Return cells of a table, bool [n, c], as those of a plan with these samples and
    configurations, bool [N, C]; a plan has another order and perhaps more of them."""
    sample_of = {name: i for i, name in enumerate(ids)}
    rows = [sample_of[name] for name in table.sample_ids]
    column_of = {_key(each): j for j, each in enumerate(configurations)}
    columns = [column_of[_key(table.configuration(c))] for c in range(table.num_configurations)]
    placed = np.zeros((len(ids), len(configurations)), bool)
    placed[np.ix_(rows, columns)] = cells.numpy()
    return placed


def _key(configuration: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what a configuration has in common with itself in a file or a table."""
    return tuple(sorted((name, _comparable(value)) for name, value in configuration.items()))


def _comparable(value: Any) -> Any:
    """Return what a knob's value has in common with itself as a reader has it, for whom 1.0 is 1
    and truth may be text."""
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        return text.lower() if isinstance(value, bool) else text
