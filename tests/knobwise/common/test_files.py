"""Files are written whole or not at all."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import input_error

from knobwise.common.files import (
    LEAST_ADDRESSES,
    check_address_space,
    is_cut_short,
    is_damaged,
    refused_by_system,
    written_whole,
)
from knobwise.envs.readers.feature_files import read_features


def test_a_file_appears_when_the_block_ends_well(tmp_path):
    path = tmp_path / "new/deep/t.csv"
    with written_whole(path) as temporary:
        temporary.write_text("whole")
        assert temporary.suffix == ".csv"
        assert temporary.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), written_whole(path) as temporary:
        temporary.write_text("half" * 10_000 + "\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_as_readable_as_any_new_file(tmp_path):
    (tmp_path / "any").touch()
    with written_whole(tmp_path / "ours") as temporary:
        temporary.touch()
    assert os.stat(tmp_path / "ours").st_mode == os.stat(tmp_path / "any").st_mode


@pytest.mark.parametrize("path", ["file/t.csv", "folder"])
def test_nowhere_to_write(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with input_error(f"{path}: "), written_whole(tmp_path / path):
        pytest.fail("the block must not begin")
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.parametrize(("free", "raised"), [(0, OSError), (1 << 30, RuntimeError)])
def test_a_full_disk_is_called_that_whatever_the_writer_says(tmp_path, monkeypatch, free, raised):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(raised) as caught, written_whole(tmp_path / "t.pt"):
        raise RuntimeError("unexpected pos 64 vs 0")
    if raised is OSError:
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(tmp_path / "t.pt")
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
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for content in ("first", "second", "third"):
        with written_whole(last, previous=previous) as temporary:
            temporary.write_text(content)
    assert last.read_text() == "third"
    assert previous.read_text() == "second"
    assert len(list(tmp_path.iterdir())) == 2


KILLED = """
import os, signal, sys
from knobwise.common.files import written_whole
with written_whole(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path):
    last, bracket = tmp_path / "last.pt", tmp_path / "last[1].pt"
    for path in (last, bracket, tmp_path / "other.pt"):
        subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert len(list(tmp_path.iterdir())) == 3
    with written_whole(last) as slow:
        slow.write_text("slow")
        with written_whole(last) as fast, written_whole(bracket):
            fast.write_text("fast")
        assert last.read_text() == "fast"
    assert last.read_text() == "slow"
    left = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert left == {".other", "last.pt", "last[1].pt"}


def test_a_small_archive_that_unpacks_to_much_is_refused_and_the_limit_can_be_set(
    tmp_path, monkeypatch
):
    packed, stored = tmp_path / "packed.npz", tmp_path / "stored.npz"
    content = {"sample_id": np.arange(9), "embeddings": np.zeros((9, 40_000))}
    np.savez_compressed(packed, **content)
    np.savez(stored, **content)
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "2")
    for read in (is_damaged, read_features):
        with input_error("KNOBWISE_UNPACKED_MB"):
            read(packed)
    # it takes as much room on disk
    assert not is_damaged(stored)
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "3")
    assert read_features(packed).blocks["embeddings"].shape == (9, 40_000)


def test_a_checkpoint_that_is_not_as_it_was_written_is_damaged(tmp_path):
    path, draw = tmp_path / "c.pt", random.Random(0)
    weights = torch.arange(5000.0)
    torch.save({"weights": weights, "name": "x"}, path)
    whole = path.read_bytes()
    assert not is_damaged(path)
    size = len(whole)
    first = whole[: size // 4096 * 4096]
    damages = [b"", whole[: size // 2], first, first.ljust(size, b"\0"), bytes(size), bytes(99)]
    begin = whole.index(weights.numpy().tobytes())
    for place in draw.sample(range(begin, begin + 20_000), 50):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        damages.append(flipped)
    for damage in damages:
        path.write_bytes(damage)
        assert is_damaged(path)
    for foreign in (b"text", b"\x80\x02}q\x00."):
        path.write_bytes(foreign)
        assert not is_damaged(path)


@pytest.mark.parametrize("content", [b"", b"a: \xc3", b"a\0\0\0", bytes(9)])
def test_a_text_is_cut_short_where_its_beginning_is_left_or_zeros_follow(content):
    assert is_cut_short(content, "a: é")


@pytest.mark.parametrize("content", [b"a: \xc3\xa9", b"b", b"a: x"])
def test_a_text_that_is_whole_or_another_is_not_cut_short(content):
    assert not is_cut_short(content, "a: é")


@contextmanager
def limited(kind, value):
    """A block in which this process is allowed no more."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_file_that_is_longer_than_allowed_is_called_that_whatever_the_writer_says(tmp_path):
    path = tmp_path / "t.pt"
    with limited(resource.RLIMIT_FSIZE, 8192), pytest.raises(OSError) as error:  # noqa: SIM117
        with written_whole(path) as temporary:
            torch.save(torch.zeros(100_000), temporary)
    assert not list(tmp_path.iterdir())
    status, line = refused_by_system(error.value)
    assert status == 1
    assert line.startswith(f"{path}: ")
    assert "ulimit -f" in line


def test_too_little_address_space_is_refused_before_a_library_ends_the_process():
    with limited(resource.RLIMIT_AS, LEAST_ADDRESSES):
        check_address_space()
    with limited(resource.RLIMIT_AS, LEAST_ADDRESSES - 1), pytest.raises(OSError) as error:
        check_address_space()
    status, line = refused_by_system(error.value)
    assert status == 1
    assert "ulimit -v" in line


def test_a_limit_of_open_files_is_named_and_other_errors_are_not_limits():
    status, line = refused_by_system(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert status == 1
    assert "ulimit -n" in line
    assert refused_by_system(OSError(errno.EIO, "a broken disk")) is None
