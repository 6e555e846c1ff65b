"""What commands leave in a folder, as plain values to compare: times differ, all else must not."""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from safetensors import safe_open

State = dict[str, dict[str, str]]
"""By path below the folder: the values in the file, each by its place there."""
UNSEEN = re.compile(r"(^|/)(tensorboard|wandb|multirun)(/|$)")
"""Not compared: their names and bytes hold times and process numbers."""
DATE = re.compile(r"\d{4}-\d\d-\d\d([/_T ]\d\d[-:]\d\d[-:]\d\d)?")
TIMES = re.compile(
    r"decision_us|seconds|started|cpu_s|cost_s|created|machine|\btime|saves_nothing|sha256|Per_Second"
)
"""Places of times and of what follows from them, which two unbroken runs may have alike by chance,
and digests; what they are of is compared itself."""


class Difference(NamedTuple):
    leftovers: list[str]
    unlike: list[str]


def state_of(folder):
    """Every file and link below a folder."""
    state = {}
    for path in sorted(folder.rglob("*")):
        name = DATE.sub("DATE", str(path.relative_to(folder)))
        if UNSEEN.search(name):
            continue
        if path.is_symlink():
            state[name] = {"link": DATE.sub("DATE", str(path.readlink()))}
        elif path.is_file():
            try:
                state[name] = dict(_flat(_content(path)))
            except Exception as error:
                state[name] = {"unreadable": type(error).__name__}
        else:
            state[name] = {}
    return state


def noise_of(first, second):
    """The places at which two unbroken runs differ; those in a list count as one place."""
    return {(name, _kind(place)) for name, place in _unequal(first, second)}


def difference(state, reference, noise):
    """Files that should not be there, and places with other values than the unbroken run left."""
    leftovers = [name for name in state if name not in reference]
    unlike = {
        name: place
        for name, place in reversed([*_unequal(state, reference)])
        if name in reference and (name, _kind(place)) not in noise and not TIMES.search(place)
    }
    return Difference(leftovers, [f"{name} {place}".strip() for name, place in unlike.items()])


def _unequal(first, second):
    for name in first.keys() | second.keys():
        if name not in first or name not in second:
            yield name, "" if name in first else "(missing)"
            continue
        for place in first[name].keys() | second[name].keys():
            if first[name].get(place) != second[name].get(place):
                yield name, place


def _kind(place):
    return re.sub(r"\[\d+\]", "[]", place)


def _content(path):
    match path.suffix:
        case ".json":
            return json.loads(path.read_bytes())
        case ".jsonl":
            return [json.loads(line) for line in path.read_bytes().splitlines()]
        case ".pt":
            return torch.load(path, weights_only=True)
        case ".npz":
            with np.load(path) as file:
                return dict(file)
        case ".safetensors":
            with safe_open(str(path), framework="np") as file:
                names = list(file.keys())
                return {"": file.metadata()} | {name: file.get_tensor(name) for name in names}
        case ".parquet":
            return pl.read_parquet(path).to_dict(as_series=False)
        case ".csv":
            return pl.read_csv(path, infer_schema=False).to_dict(as_series=False)
    text = DATE.sub("DATE", path.read_text(errors="replace"))
    return hashlib.sha256(text.encode()).hexdigest()


def _flat(value, place=""):
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _flat(part, f"{place}[{number}]")
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = np.ascontiguousarray(value)
        yield place, f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    else:
        yield place, repr(value)
