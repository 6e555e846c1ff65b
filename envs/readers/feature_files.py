"""Features of samples, from columns of their table or files of their own: named blocks of numbers,
one row per sample, keyed by `sample_id`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from knobwise.common.errors import Damaged, InputError, naming
from knobwise.common.files import is_damaged, written_whole
from knobwise.envs.readers.column_names import INDEX, list_columns, named_like
from knobwise.envs.readers.column_values import blanks_as_null, name_column, number_column
from knobwise.envs.readers.design import rows_of_samples, varying_among
from knobwise.envs.readers.feature_columns import (
    encode_samples,
    fit_column,
    free_texts,
    in_block,
    texts_in,
)
from knobwise.envs.readers.frames import KEYS, read_frame, with_chats
from knobwise.envs.readers.layouts import PLAIN, Layout, with_ids
from knobwise.envs.tables.columns import FEATURES, Column
from knobwise.envs.tables.copies import with_copies_together
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.tensor_file import save_tensors, tensors_and_metadata, tensors_of


class Features(NamedTuple):
    """The content of a feature file."""

    sample_ids: tuple[str, ...]
    """n ids."""
    blocks: dict[str, Tensor]
    """Named blocks, float32 [n, d]; NaN is missing."""
    datasets: tuple[str, ...] = ()
    """n data set names, or none."""
    columns: tuple[Column, ...] = ()
    """What the block `features` holds, if its columns have names."""
    notes: tuple[str, ...] = ()
    """What was left out."""
    texts: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Columns of free text by name, n each."""


def read_features(
    path: str | Path, columns: Sequence[Column] = (), layout: Layout = PLAIN
) -> Features:
    """Read named feature blocks from `.safetensors`, `.npz`, `.pt` or a table file.

    Besides the blocks [n, d] or [n] the file holds `sample_id` [n] and optionally `dataset` [n]. In
    safetensors these are integers, or JSON lists of names in the metadata. In a table file a list
    column is a block, and the other columns, numbers and text, form one block, `features`.

    Args:
        path: the file.
        columns: what that block holds, as a checkpoint knows it; by default it is fitted.
        layout: may give the ids another name than `sample_id`. The column that numbers repeated
            measurements is no feature.

    Raises:
        InputError: there is no such file, its content does not match its name, ids are missing or
            occur twice, a block is not numeric, infinite or of the wrong length, or `fit_column`
            refuses a column.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with naming(path), _readable():
        if path.suffix in (".npz", ".pt", ".safetensors"):
            return features_from(_read_arrays(path, layout.id))
        return _read_columns(path, columns, layout)


@contextmanager
def _readable() -> Iterator[None]:
    """Raise InputError instead of any other error."""
    try:
        yield
    except InputError:
        raise
    # ids of mixed types, rows of different lengths, …
    except (Exception, pl.exceptions.PanicException) as error:
        raise InputError(f"cannot be read as features ({error})") from error


def features_from(content: Mapping[str, Any]) -> Features:
    """Return ids and named blocks from arrays by name, as `read_features` finds them in a file. A
    list of strings is free text.

    Raises InputError as `read_features`.
    """
    texts = {}
    with _readable():
        arrays = {}
        for key, values in content.items():
            if key not in ("dataset", "sample_id") and _are_texts(values):
                texts[key] = list(values)
            else:
                arrays[key] = np.asarray(values)
        # ids first: they say how many rows a block must have
        names: dict[str, tuple[str, ...]] = {}
        for key in ("dataset", "sample_id"):
            if key in arrays:
                values = arrays.pop(key)
                # text in NumPy files may be bytes
                values = values.astype(str) if values.dtype.kind == "S" else values
                names[key] = tuple(name_column(pl.Series(key, values)))
        if "sample_id" not in names or not (arrays or texts):
            raise InputError(
                f"features need sample_id [n] and at least one block [n, d]; has "
                f"{[*names, *arrays]}"
            )
        n = len(names["sample_id"])
        for key, values in texts.items():
            if len(values) != n:
                raise InputError(f"features {key!r} are {len(values)} texts for {n} sample_id")
        blocks = {key: _block(f"features {key!r}", x, n) for key, x in arrays.items()}
    if twice := n - len(set(zip(*names.values(), strict=True))):
        raise InputError(
            f"{twice} ids occur more than once; keep one row of features for each sample"
        )
    return Features(names["sample_id"], blocks, names.get("dataset", ()), texts=texts)


def features_in(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    names: Sequence[str],
    columns: Sequence[Column],
    auto: bool,
    notes: list[str],
) -> Features:
    """Return the features in these columns of a frame.

    Args:
        frame, keys: the rows as they were read, and their ids.
        columns: what they hold, if a checkpoint knows it; else it is fitted.
        auto: whether columns that cannot be features are left out, with a note.

    Raises:
        InputError: a column varies inside a sample, or cannot be a feature.
    """
    known = blanks_as_null(frame.select(names))
    if several := varying_among(known, keys, names, empty=False):
        raise InputError(
            f"features: {', '.join(several)} differs between configurations of a sample, so it is "
            "not known before the decision; leave it out"
        )
    if gaps := varying_among(frame, keys, names):
        raise InputError(
            f"features: {gaps[0]} is empty in {known[gaps[0]].null_count():,} rows, but not in "
            "others of the same samples; fill in what belongs to a sample, and leave out what is "
            "not known before the decision"
        )
    # in each row of a sample they are the same, so its first row will do
    rows = rows_of_samples(keys)
    samples = keys[rows].cast(pl.String).hstack([frame[name].gather(rows) for name in names])
    fitted = list(columns)
    if not columns:
        for name in names:
            try:
                fitted.append(fit_column(samples[name]))
            except InputError as error:
                if not auto:
                    raise
                notes.append(f"not a feature: {error}")
    if not fitted:
        raise InputError(
            "features: no column varies between samples but not inside them; name the "
            f"columns, features=[…], and the knobs, knobs=[…] ({'; '.join(notes)})"
        )
    block = in_block(fitted)
    named = [*map(str, block), *(f"{name} (text)" for name in free_texts(fitted))]
    notes.append(f"features: {', '.join(named)}")
    content: dict[str, Any] = {name: samples[name].to_numpy() for name in keys.columns}
    if block:
        content[FEATURES] = encode_samples(samples, block)
    return features_from(content | texts_in(samples, fitted))._replace(columns=tuple(block))


def _are_texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)


def _block(name: str, values: np.ndarray, n: int) -> Tensor:
    """Return a block as float32 [n, d]. Raises InputError, with its name, for anything else."""
    if values.dtype.kind not in "biuf":
        raise InputError(f"{name} are not numbers")
    if values.ndim not in (1, 2) or len(values) != n:
        raise InputError(f"{name} have shape {values.shape}, but there are {n} sample_id")
    if not values.size:
        raise InputError(f"{name} are empty: their shape is {values.shape}")
    # a float64 beyond float32 becomes infinite, and is refused
    with np.errstate(over="ignore"):
        block = values.reshape(n, -1).astype(np.float32)
    if np.isinf(block).any():
        raise InputError(f"{name} hold infinite values; write NaN for what is missing")
    return torch.from_numpy(block)


def attach_features(
    table: ProfileTable,
    features: str | Path | Features,
    columns: Sequence[Column] = (),
    layout: Layout = PLAIN,
) -> ProfileTable:
    """Return the table with a row of features for each of its samples.

    Samples are matched by id, and by data set if both name it. Those that are copies by their
    features are one cluster. `columns` and `layout` are for `read_features`.
    Raises InputError if a sample has no features, or `read_features` refuses the file.
    """
    source = "features"
    if not isinstance(features, Features):
        source = str(features)
        features = read_features(features, columns, layout)
    wanted = [table.sample_ids]
    names = [features.sample_ids]
    # data sets only count where both sides name them
    if features.datasets and (table.datasets or table.name in features.datasets):
        wanted.insert(0, table.dataset_names)
        names.insert(0, features.datasets)
    keys = list(zip(*wanted, strict=True))
    known = list(zip(*names, strict=True))
    for whose, ids in (("profile", keys), ("features", known)):
        if len(set(ids)) < len(ids):
            raise InputError(
                f"{source}: ids occur in several data sets of the {whose}; name them in `dataset`"
            )
    # every sample needs a row; rows without a sample are left out
    row_of = {key: row for row, key in enumerate(known)}
    if missing := [" ".join(key) for key in keys if key not in row_of]:
        raise InputError(
            f"{source}: no features for {len(missing)} of {len(keys)} samples of profile "
            f"{table.name!r}, such as {', '.join(missing[:5])}; it has ids such as "
            f"{', '.join(' '.join(key) for key in known[:3])}"
        )
    rows = torch.tensor([row_of[key] for key in keys])
    blocks = {name: block[rows] for name, block in features.blocks.items()}
    texts = {}
    for name, values in features.texts.items():
        texts[name] = [values[row] for row in rows.tolist()]
    notes = (*table.notes, *features.notes)
    if unused := len(known) - len(keys):
        notes = (*notes, f"{unused} rows of features without a sample: not used")
    table = replace(table, features=blocks, columns=features.columns, texts=texts, notes=notes)
    return with_copies_together(table)


def write_features(table: ProfileTable, path: str | Path) -> None:
    """Write the table's feature blocks with its ids, as `read_features` reads them.

    The suffix of the path decides the format: `.safetensors` or `.npz`.
    """
    ids = {"sample_id": list(table.sample_ids)}
    if table.datasets:
        ids["dataset"] = list(table.datasets)
    suffix = Path(path).suffix
    if not table.features or suffix not in (".safetensors", ".npz"):
        raise InputError(
            f"{path}: features are written as .safetensors or .npz; blocks: {list(table.features)}"
        )
    if suffix == ".safetensors":
        save_tensors(path, table.features, {key: json.dumps(names) for key, names in ids.items()})
        return
    arrays = {key: np.array(names) for key, names in ids.items()}
    arrays |= {name: block.numpy() for name, block in table.features.items()}
    with written_whole(path) as temporary:
        np.savez_compressed(temporary, allow_pickle=False, **arrays)


def _in_blocks(content: dict[Any, Any]) -> dict[str, Any]:
    """Return ids and blocks by name.

    A file keyed by sample, {id: {block: vector}}, is rearranged. `sample_ids`, the name that the
    original system wrote, becomes `sample_id`. Raises KeyError if samples have different blocks.
    """
    if "sample_ids" in content:
        content.setdefault("sample_id", content.pop("sample_ids"))
    # a file keyed by sample holds a dict for each
    rows = list(content.values())
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return content
    blocks: dict[str, Any] = {"sample_id": list(content)}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        blocks[name] = torch.stack([torch.as_tensor(row[name]).flatten() for row in rows])
    return blocks


def read_feature_arrays(path: Path, kind: str) -> dict[str, Any]:
    """Return the content of a `.safetensors`, `.npz`, `.npy` or `.pt` file by name.

    An array without a name is `embeddings`. Raises InputError if the file cannot be read without
    executing code in it.
    """
    try:
        if path.suffix == ".safetensors":
            return tensors_of(path)
        if is_damaged(path):
            raise Damaged(path)
        # np.load would take anything else for a pickle
        begin = {".npz": b"PK", ".npy": b"\x93NUMPY"}.get(path.suffix, b"")
        with path.open("rb") as file:
            if file.read(len(begin)) != begin:
                raise InputError(f"{path}: is damaged, or no {path.suffix}; write it again")
        # none of these runs code from the file
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            content = np.load(path, allow_pickle=False)
        return dict(content) if isinstance(content, Mapping) else {"embeddings": content}
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path}: cannot be read as {kind} without executing code in it ({error})"
        ) from error


def _read_arrays(path: Path, ids: str | None) -> dict[str, ArrayLike]:
    """Read ids and blocks of a file of arrays, unchecked; `ids` may be another name of the ids."""
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        content, metadata = tensors_and_metadata(path)
    else:
        content = read_feature_arrays(path, "features")
    arrays = _in_blocks(content)
    ids = ids or "sample_id"
    for key in {"sample_id", "dataset", ids} & metadata.keys():
        arrays[key] = json.loads(metadata[key])
    if ids in arrays:
        arrays["sample_id"] = arrays.pop(ids)
    # NumPy has no bfloat16
    for name, values in arrays.items():
        if isinstance(values, Tensor) and values.is_floating_point():
            # ids keep their type, which says whether they are exact
            if name not in ("sample_id", "dataset"):
                values = values.float()
            elif values.dtype == torch.bfloat16:
                raise InputError(f"{name} is bfloat16, which is no type for ids; write int64")
            arrays[name] = values.detach().numpy()
    return arrays


def _read_columns(path: Path, columns: Sequence[Column], layout: Layout) -> Features:
    """Read ids and blocks of a table file.

    A column of lists is a block. The columns of single values form one block together, but for
    those of free text.
    """
    noted = list[str]()
    frame = with_chats(read_frame(path, noted))
    if layout.id in frame.columns and layout.id != "sample_id":
        frame = with_ids(frame, Layout(layout.id), []).drop(layout.id)
    arrays: dict[str, ArrayLike] = {}
    names = []
    keys = {*KEYS, layout.repeat} - {"sample_id", "dataset"}
    index = {*named_like(frame.columns, INDEX)} - {column.name for column in columns}
    unused = [name for name in frame.columns if name in keys | index]
    for column in frame.drop(unused):
        if column.name in ("sample_id", "dataset"):
            arrays[column.name] = name_column(column).to_numpy()
        elif not column.dtype.is_nested():
            names.append(column.name)
        else:
            if isinstance(column.dtype, pl.Array):
                column = column.arr.to_list()
            if column.list.len().n_unique() > 1:
                raise InputError(
                    f"rows of features {column.name!r} have different lengths, or are missing"
                )
            # all lists, one after the other
            values = number_column(column.explode()).fill_null(np.nan).to_numpy()
            arrays[column.name] = values.reshape(len(column), -1)
    named: Sequence[Column] = ()
    if names:
        if FEATURES in [*arrays, *names]:
            raise InputError(
                "the columns of single values form a block `features`, but the file "
                "already has a column of this name; rename it"
            )
        fitted = columns or [fit_column(frame[name]) for name in names]
        named = in_block(fitted)
        if named:
            arrays[FEATURES] = encode_samples(frame, named)
        arrays |= texts_in(frame, fitted)
    if unused:
        noted.append(f"keys that are no features: {list_columns(unused)}")
    return features_from(arrays)._replace(columns=tuple(named), notes=tuple(noted))
