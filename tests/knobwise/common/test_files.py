"""Files are written whole or not at all."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole


def test_a_file_appears_when_the_block_ends_well(tmp_path):
    path = tmp_path / "new" / "deep" / "t.csv"
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


def test_nowhere_to_write(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"file/t\.csv: cannot be written"), written_whole(tmp_path / "file" / "t.csv"):
        pytest.fail("the block must not begin")
    with pytest.raises(InputError, match="folder: is a folder"), written_whole(tmp_path / "folder"):
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
