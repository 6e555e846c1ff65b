"""Files are written whole or not at all."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.common.files import (
    MIN_ADDRESSES,
    check_address_space,
    is_cut_short,
    is_damaged,
    refused_by_system,
    written_whole,
)
from knobwise.common.parquet import decoded_size, read_parquet
from knobwise.envs import ProfileTable
from knobwise.envs.demonstrations.beam_files import read_embeddings
from knobwise.envs.readers.feature_files import read_features


@contextmanager
def limited(kind, most):
    """A block with a limit of the system."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_file_appears_when_the_block_ends_well_as_readable_as_any_new_file(tmp_path):
    (tmp_path / "any").touch()
    path = tmp_path / "new" / "deep" / "t.csv"
    with written_whole(path) as temporary:
        temporary.write_text("whole")
        assert temporary.suffix == ".csv"
        assert temporary.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), written_whole(path) as temporary:
        temporary.write_text("half" * 10_000 + "\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nowhere_to_write(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in ("file/t.csv", "folder"):
        with pytest.raises(InputError, match=f"{path}: "), written_whole(tmp_path / path):
            pytest.fail("the block must not begin")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(("free", "raised"), [(0, OSError), (1 << 30, RuntimeError)])
def test_a_full_disk_is_called_that_whatever_the_writer_says(tmp_path, monkeypatch, free, raised):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(raised) as caught, written_whole(tmp_path / "t.pt"):
        raise RuntimeError("unexpected pos 64 vs 0")
    if raised is OSError:
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "t.pt"))
    assert not list(tmp_path.iterdir())


def test_bytes_and_name_are_on_disk_before_the_block_has_ended(tmp_path, monkeypatch):
    synced, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle))
    )
    monkeypatch.setattr(
        Path, "replace", lambda *paths: (synced.append("renamed"), replace(*paths))[1]
    )
    with written_whole(tmp_path / "t.pt") as temporary:
        temporary.write_text("whole")
    assert synced == [os.stat(tmp_path / "t.pt").st_ino, "renamed", os.stat(tmp_path).st_ino]


def test_the_file_before_is_kept_where_that_is_asked_for(tmp_path):
    for content in ("first", "second", "third"):
        with written_whole(tmp_path / "last.pt", previous=tmp_path / "previous.pt") as temporary:
            temporary.write_text(content)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"last.pt": "third", "previous.pt": "second"}


KILLED = """
import os, signal, sys
from knobwise.common.files import written_whole
with written_whole(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path):
    for name in ("last.pt", "last[1].pt", "other.pt"):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], check=False)
    assert len(list(tmp_path.iterdir())) == 3
    with written_whole(tmp_path / "last.pt") as slow:
        slow.write_text("slow")
        with written_whole(tmp_path / "last.pt") as fast, written_whole(tmp_path / "last[1].pt"):
            fast.write_text("fast")
        assert (tmp_path / "last.pt").read_text() == "fast"
    assert (tmp_path / "last.pt").read_text() == "slow"
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {".other", "last.pt", "last[1].pt"}


def test_a_small_archive_that_unpacks_to_much_is_refused_and_the_limit_can_be_set(
    tmp_path, monkeypatch
):
    packed, stored = tmp_path / "packed.npz", tmp_path / "stored.npz"
    content = {"sample_id": np.arange(9), "embeddings": np.zeros((9, 40_000))}
    np.savez_compressed(packed, **content)
    np.savez(stored, **content)
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "2")
    for read in (is_damaged, read_features):
        with pytest.raises(InputError, match="KNOBWISE_UNPACKED_MB"):
            read(packed)
    # it takes as much room on disk
    assert not is_damaged(stored)
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "3")
    assert read_features(packed).blocks["embeddings"].shape == (9, 40_000)


ROWS = 400_000
BOMBS = {
    "equal numbers": lambda: pl.repeat(0.5, ROWS),
    "equal texts": lambda: pl.repeat("a" * 9, ROWS),
    "equal long texts": lambda: pl.repeat("a" * 4000, ROWS // 1000),
    "one long list": lambda: pl.lit(pl.Series([[0.0] * ROWS])),
    "one long text": lambda: pl.lit("a" * 4 * ROWS),
    "a list of structures": lambda: pl.lit(pl.Series([[{"y": [1, 2]}] * ROWS])),
}
"""What makes a column, some of which take seconds."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_parquet_is_refused_before_it_unpacks_to_much(tmp_path, monkeypatch, name):
    path = tmp_path / "bomb.parquet"
    frame = pl.select(x=BOMBS[name]())
    frame.write_parquet(path, compression="zstd")
    assert path.stat().st_size < 60_000
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "1")
    with input_error("bomb.parquet: .*KNOBWISE_UNPACKED_MB"):
        read_parquet(path)
    for limited, limit in ((False, "1"), (True, "40")):
        monkeypatch.setenv("KNOBWISE_UNPACKED_MB", limit)
        assert read_parquet(path, limited).equals(frame)
    # but for texts that share their bytes, the footer tells
    if name != "equal long texts":
        assert 1_000_000 < decoded_size(path)[0] < 40_000_000


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([pl.Int64, pl.Float32, pl.Int8, pl.Boolean, pl.Date]), max_size=5),
    st.integers(0, 40),
    st.integers(1, 50),
)
def test_the_size_of_a_parquet_is_that_of_its_values(tmp_path_factory, types, rows, at_once):
    """Of numbers; each column and each group of rows is one entry of the footer."""
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    columns = {f"{i}": pl.Series([1] * rows, dtype=pl.Int64) for i in range(len(types))}
    frame = pl.DataFrame(columns).cast(dict(zip(columns, types, strict=True)))
    frame.write_parquet(path, row_group_size=at_once)
    widths = {pl.Int64: 8, pl.Float32: 4, pl.Int8: 4, pl.Boolean: 1, pl.Date: 4}
    assert decoded_size(path) == (sum(widths[kind] for kind in types) * rows, frame.height)
    assert read_parquet(path).equals(frame)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:9] + b"PAR1", bytes([255] * 99) + b"\x63\0\0\0PAR1"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Parquet|footer"):
            decoded_size(path)


def test_large_files_may_unpack_to_more(tmp_path, monkeypatch):
    frame = pl.DataFrame({"x": np.random.default_rng(0).random(300_000)})
    frame.write_parquet(tmp_path / "t.parquet")
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "1")
    assert read_parquet(tmp_path / "t.parquet").equals(frame)


def test_a_member_that_an_archive_holds_twice_is_named(tmp_path):
    """Of an `.npz`, `.pt` or `.safetensors`; readers would take one of the two."""
    np.savez(tmp_path / "twice.npz", sample_id=np.arange(2), first=np.ones((2, 3)))
    torch.save({"sample_id": torch.arange(2), "first": torch.ones(2, 3)}, tmp_path / "twice.pt")
    with zipfile.ZipFile(tmp_path / "twice.pt") as archive:
        tensor = next(name for name in archive.namelist() if name.endswith("data/0"))
    for name, member in (("twice.npz", "first.npy"), ("twice.npz", "first"), ("twice.pt", tensor)):
        path = tmp_path / f"{len(member)}-{name}"
        shutil.copy(tmp_path / name, path)
        with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
            warnings.simplefilter("ignore")
            archive.writestr(member, archive.read(archive.namelist()[1]))
        for read in (read_features, read_embeddings):
            with input_error(rf"{path.name}: .*{member.removesuffix('.npy')}"):
                read(path)
    # the names of a header, and of its metadata
    tensor = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    for repeated, header in (
        ("x", f"{{{tensor}, {tensor}}}"),
        ("sample_id", f'{{"__metadata__": {{"sample_id": "[1]", "sample_id": "[2]"}}, {tensor}}}'),
    ):
        path = tmp_path / "twice.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        for read in (read_features, read_embeddings, ProfileTable.load):
            with input_error(rf"twice\.safetensors: .*{repeated}"):
                read(path)


def test_a_checkpoint_that_is_not_as_it_was_written_is_damaged(tmp_path):
    path, draw = tmp_path / "c.pt", random.Random(0)
    torch.save({"weights": torch.arange(5000.0), "name": "x"}, path)
    whole = path.read_bytes()
    assert not is_damaged(path)
    first = whole[: len(whole) // 4096 * 4096]
    half = whole[: len(whole) // 2]
    damaged = [b"", half, first, first.ljust(len(whole), b"\0"), bytes(len(whole)), bytes(99)]
    begin = whole.index(torch.arange(5000.0).numpy().tobytes())
    for place in draw.sample(range(begin, begin + 20_000), 50):
        damaged.append(bytearray(whole))
        damaged[-1][place] ^= 1 << draw.randrange(8)
    for content in damaged:
        path.write_bytes(content)
        assert is_damaged(path)
    for foreign in (b"text", b"\x80\x02}q\x00."):
        path.write_bytes(foreign)
        assert not is_damaged(path)


@pytest.mark.parametrize("content", [b"", b"a: \xc3", b"a\0\0\0", bytes(9)])
def test_a_text_is_cut_short_where_its_beginning_is_left_or_zeros_follow(content):
    assert is_cut_short(content, "a: é")


@pytest.mark.parametrize("content", [b"a: \xc3\xa9", b"b", b"a: x"])
def test_a_whole_or_another_text_is_not_cut_short(content):
    assert not is_cut_short(content, "a: é")


def test_a_file_that_is_longer_than_allowed_is_called_that_whatever_the_writer_says(tmp_path):
    with (
        limited(resource.RLIMIT_FSIZE, 8192),
        pytest.raises(OSError) as caught,
        written_whole(tmp_path / "t.pt") as temporary,
    ):
        torch.save(torch.zeros(100_000), temporary)
    assert not list(tmp_path.iterdir())
    status, line = refused_by_system(caught.value)
    assert (status, "ulimit -f" in line) == (1, True)
    assert line.startswith(f"{tmp_path / 't.pt'}: ")


def test_too_little_address_space_is_refused_before_a_library_ends_the_process():
    with limited(resource.RLIMIT_AS, MIN_ADDRESSES):
        check_address_space()
    with limited(resource.RLIMIT_AS, MIN_ADDRESSES - 1), pytest.raises(OSError) as caught:
        check_address_space()
    status, line = refused_by_system(caught.value)
    assert (status, "ulimit -v" in line) == (1, True)


def test_a_limit_is_named_with_what_helps():
    status, line = refused_by_system(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert (status, "ulimit -n" in line) == (1, True)
    assert refused_by_system(OSError(errno.EIO, "a broken disk")) is None
