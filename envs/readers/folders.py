"""What names tables have, and folders where a file is wanted: what to give instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from knobwise.common.errors import InputError

TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".arff")
"""Suffixes of the files that `frames` reads, which text may have before .gz."""
UNTYPED = (".csv", ".tsv", ".arff")
"""Those in which all values are text, so that true and false are spelled."""
HYDRA = ".hydra"
"""The folder that Hydra makes in the folder of each job."""
DEPTH = 3
"""Jobs of a multirun lie at most so deep: in `multirun/DATE/TIME/NUMBER`."""
MOST_NAMED = 3
"""So many jobs or files are named."""


def is_table(name: str) -> bool:
    """Return whether a file of this name is meant as a table."""
    return name.removesuffix(".gz").endswith(TABLES)


def has_no_types(name: str) -> bool:
    """Return whether the values in a file of this name are all text."""
    return name.removesuffix(".gz").endswith(UNTYPED)


def refuse_folder(path: Path) -> NoReturn:
    """Raise InputError for a folder of no known tool, with what it is and what may be read."""
    jobs = list(_jobs(path))
    if not jobs:
        files = _named(path, _tables(path))
        raise InputError(
            f"{path}: is a folder, and of no tool whose folders are read; give a file"
            + f", such as {files}" * bool(files)
            + " (exp5 and exp6 folders are read by profile=exp5_exp6, in Python by "
            "knobwise.envs.readers.exp_files.read_exp5_exp6; core_exp folders by profile=core_exp)"
        )
    files = _named(path, (file for job in jobs for file in _tables(job)))
    what = "a job of Hydra" if jobs == [path] else f"a multirun of Hydra with {len(jobs)} jobs"
    raise InputError(
        f"{path}: is {what}, and no table: the settings of a job stand in "
        f"{_named(path, [jobs[0] / HYDRA / 'overrides.yaml'])}, beside what your program wrote"
        + f" ({files})"
        * bool(files)
        + ". Write a row for each measurement of all jobs to one file, with the settings as "
        "columns, and give that file"
    )


def _jobs(path: Path) -> Iterator[Path]:
    """Return the folders of Hydra's jobs in a folder, by name."""
    for depth in range(DEPTH + 1):
        yield from sorted(inside.parent for inside in path.glob(f"{'*/' * depth}{HYDRA}"))


def _tables(path: Path) -> list[Path]:
    """Return the files of a folder that may be tables, by name."""
    return sorted(file for file in path.iterdir() if is_table(file.name) and file.is_file())


def _named(path: Path, files: Iterator[Path] | list[Path]) -> str:
    """Return the first files by their names below a folder."""
    first = list(itertools.islice(files, MOST_NAMED + 1))
    names = [str(file.relative_to(path)) for file in first[:MOST_NAMED]]
    return ", ".join(names) + ", …" * (len(first) > MOST_NAMED)
