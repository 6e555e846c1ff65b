"""`knobwise.read`: a profile from files or data frames. It loads PyTorch and polars, whose tensors
and frames it makes, and nothing of what learns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.common.errors import naming
from knobwise.envs.readers.embeddings import embed_texts
from knobwise.envs.readers.feature_files import features_from
from knobwise.envs.readers.folders import refuse_folder
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.readers.tool_files import of_frame, tool_of
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.settings.profiles import TableProfile, read_profile

if TYPE_CHECKING:
    from knobwise.serving.knob_policy import Blocks

    Features = str | Path | Blocks | list[str]


def read(data: Any, features: Features = None, **options: Any) -> ProfileTable:
    """Read a profile: a row for each sample and configuration.

    Args:
        data: the path of a table, such as CSV or Parquet, of a `.safetensors` that
            `ProfileTable.save` wrote, of a folder that `knobwise profile` wrote, features
            included, or of the results of a tool (see docs/profiles.md); a list of paths, of one
            tool or of scores and times; or a data frame of polars or pandas.
        features: a feature file, or a mapping of `sample_id` [N] and blocks [N, d] by name; or the
            names of columns of `data`, "auto" for all that are constant inside each sample; None
            for a policy that sees the budget only. Columns may be free text, such as prompts.
        options: the other options of `profile=table`: id, repeat, knobs, accuracy, right, latency,
            unit, costs, wide, wide_latency, name, group, time, features_from.

    Raises:
        InputError: no such file, or wrong content, see `table_from_frame` and `read_features`.

    >>> cells = {"crops": [1, 4], "accuracy": [0, 1], "latency_ms": [2, 9]}
    >>> frame = polars.DataFrame({"sample_id": 2 * ["q"], **cells})
    >>> table = knobwise.read(frame, {"sample_id": ["q"], "image": [[0.1, 0.2]]})
    >>> table.num_samples, table.num_configurations, list(table.features)
    (1, 2, ['image'])
    """
    if isinstance(features, Mapping) and options.get("id") in features:
        features = {**features, "sample_id": features[options["id"]]}
        del features[options["id"]]
    content = content_of(features)
    if isinstance(data, (list, tuple)):
        return read_profile(TableProfile(path=[*map(str, data)], features=content, **options))
    if not isinstance(data, (str, Path)):
        frame = data
        if not isinstance(data, pl.DataFrame):  # of pandas
            frame = pl.DataFrame(_columns(data)).fill_nan(None)
        features_from = options.pop("features_from", None)
        notes = list[str]()
        given = {"name": "frame", "features": content, **options}
        with naming(given["name"]):
            frame, given = of_frame(frame, given, notes)
        table = table_from_frame(frame, notes=notes, **given)
        return table if features_from is None else embed_texts(table, features_from)
    path = Path(data)
    if path.is_dir() and tool_of(path) is None:
        content = content or next(path.glob("features.*"), None)
        options = {"name": path.name, **options}
        if not (path / "table.parquet").is_file():
            refuse_folder(path)
        path /= "table.parquet"
    return read_profile(TableProfile(path=str(path), features=content, **options))


def _columns(data: Any) -> dict[str, Any]:
    """Return the columns of a pandas data frame, and those of its index that have a name."""
    index = getattr(data, "index", None)
    if any(name is not None for name in getattr(index, "names", ())):
        data = data.reset_index()
    return data.to_dict("list")


def content_of(features: Any, **ids: Any) -> Any:
    """Return features in memory with their ids, `ids` if they have none; a path, and names of
    columns, as they are."""
    if features is None or isinstance(features, (str, Path)):
        return features
    if isinstance(features, (list, tuple)) and all(isinstance(name, str) for name in features):
        return list(features)
    blocks = features
    if not isinstance(features, Mapping):
        blocks = {"features": features}
    if "sample_id" not in blocks:
        blocks = ids | {**blocks}
    return features_from(blocks)
