"""Parquet that others wrote."""

import os
import subprocess
import sys

import polars as pl
import pytest

from knobwise.common.parquet import read_parquet


def test_a_file_on_which_polars_panics_is_refused_and_nothing_reaches_stderr(tmp_path, capfd):
    path = tmp_path / "t.parquet"
    pl.DataFrame({"a": range(1000), "b": [None, "x"] * 500}).write_parquet(path)
    whole = path.read_bytes()
    assert read_parquet(path).shape == (1000, 2)
    refused = 0
    for place in range(4, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 255
        path.write_bytes(damaged)
        try:
            read_parquet(path)
        except (ValueError, OSError, pl.exceptions.PolarsError):
            refused += 1
    assert refused > 20
    assert capfd.readouterr().err == ""


def test_without_stderr_a_file_is_read(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "t.parquet")
    kept = os.dup(2)
    os.close(2)
    try:
        assert read_parquet(tmp_path / "t.parquet").shape == (1, 1)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    with pytest.raises(OSError, match="t2"):
        read_parquet(tmp_path / "t2.parquet")


READ = """
import sys, polars
from pathlib import Path
from knobwise.common.parquet import read_parquet
polars.DataFrame({"a": [1]}).write_parquet(sys.argv[1])
print(read_parquet(Path(sys.argv[1])).shape)
"""


def test_a_process_that_never_had_a_stderr_reads_a_file(tmp_path, monkeypatch):
    """Polars' own event queue then has the number of stderr; a reader that sent it elsewhere would
    wait for ever."""
    monkeypatch.setenv("POLARS_MAX_THREADS", "1")
    words = [sys.executable, "-c", READ, str(tmp_path / "t.parquet")]
    printed = subprocess.check_output(["bash", "-c", '"$@" 2>&-', "", *words], timeout=60)
    assert printed == b"(1, 1)\n"
