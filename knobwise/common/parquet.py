"""Reading Parquet that others wrote."""

import os
import sys
from pathlib import Path

import polars as pl


def read_parquet(path: Path) -> pl.DataFrame:
    """Read a file, without the lines that polars writes to stderr when it panics.

    Raises:
        ValueError: polars panics at a damaged file.
        OSError, PolarsError: polars refuses the file.
    """
    # closed before Python began: 2 is another file's number, perhaps one of polars' own
    if sys.__stderr__ is None:
        return _read(path)
    try:
        kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # it was closed since
        return _read(path)
    try:
        # Rust writes to the file descriptor, not to sys.stderr
        os.dup2(nowhere, 2)
        return _read(path)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _read(path: Path) -> pl.DataFrame:
    try:
        # a path is the name of one file, not a pattern, and ~ in front is no home
        return pl.read_parquet(path.absolute(), glob=False)
    except pl.exceptions.PanicException as error:
        raise ValueError(f"damaged: {error}") from None
