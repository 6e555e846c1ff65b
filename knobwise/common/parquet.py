"""Reading Parquet that others wrote."""

import os
from pathlib import Path

import polars as pl


def read_parquet(path: Path) -> pl.DataFrame:
    """Read a file. Raises ValueError where polars panics at a damaged one, without the lines that it writes to stderr
    then; OSError or PolarsError for what it refuses."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # stderr is closed
        return pl.read_parquet(path)
    try:
        os.dup2(nowhere, 2)
        return pl.read_parquet(path)
    except pl.exceptions.PanicException as error:
        raise ValueError(f"damaged: {error}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
