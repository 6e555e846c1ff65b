"""The folder of a run: whose it is, when one goes on, which is the latest; of both systems."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from filelock import lock_descriptor
from helpers import input_error
from omegaconf import OmegaConf

from knobwise.common.errors import InputError
from knobwise.experiments.evidence.run_folder import (
    UNFINISHED,
    claim_folder,
    run_name,
    taken_up_if_damaged,
)
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.selector_options import BeamFiles, SelectorRun

CONFIGS = [
    TrainRun(profile={"format": "builtin"}),
    SelectorRun(beams=BeamFiles(path="b.safetensors")),
]


@pytest.fixture(params=CONFIGS, ids=["controller", "selector"])
def config(request, tmp_path):
    """The settings of either system, with its runs in an empty folder."""
    return replace(request.param, runs=str(tmp_path / "runs"))


def latest(config):
    return (Path(config.runs) / "latest").resolve()


def test_a_finished_run_is_the_latest_and_is_left_alone(config, tmp_path):
    first = Path(config.runs).absolute() / config.experiment / "seeds--0"
    (tmp_path / "any other").mkdir()
    with claim_folder(config, ["seeds=[0]"]) as folder:
        assert folder == first
        assert folder.stat().st_mode == (tmp_path / "any other").stat().st_mode
        assert (folder / UNFINISHED).exists()
        assert OmegaConf.load(folder / "config.yaml").experiment == config.experiment
    assert latest(config) == first
    assert not (first / UNFINISHED).exists()
    with claim_folder(config, ["seeds=[0]"]) as folder:
        assert folder.name == "seeds--0-2"
        assert latest(config) == first
    assert latest(config).name == "seeds--0-2"


def finished(config):
    with claim_folder(config, []) as folder:
        return folder


def refused(config, word):
    with input_error(word), claim_folder(config, []):
        pass


def at_once(count, run):
    """Return what `run` does for 0, 1, …, each in a thread, all begun at the same time."""
    start = threading.Barrier(count)
    with ThreadPoolExecutor(count, initializer=start.wait) as pool:
        return list(pool.map(run, range(count)))


def stopped(config):
    with pytest.raises(KeyboardInterrupt), claim_folder(config, []) as folder:
        raise KeyboardInterrupt
    return folder


def test_a_stopped_run_goes_on_with_the_same_settings_only(config):
    first = stopped(config)
    assert first.name == "default"
    assert not (Path(config.runs) / "latest").is_symlink()
    assert stopped(config) == first
    assert stopped(replace(config, seeds=[7])).name == "default-2"
    assert finished(config) == first
    assert finished(replace(config, seeds=[7])).name == "default-2"


def test_a_new_run_beside_a_finished_one_names_both(config, capsys):
    first = finished(config)
    assert capsys.readouterr().err == ""
    second = finished(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert [str(first), str(second)] == [word.rstrip(":") for word in line.split() if "/" in word]
    # a run that goes on is no new one
    third = stopped(config)
    capsys.readouterr()
    assert finished(config) == third
    assert capsys.readouterr().err == ""


def test_a_finished_run_with_a_damaged_checkpoint_is_taken_up_again(config, capsys):
    folder = finished(config)
    (folder / "checkpoints").mkdir()
    path = folder / "checkpoints/last.pt"
    torch.save({"weights": torch.ones(9)}, path)
    assert not taken_up_if_damaged(folder)
    assert finished(config) != folder
    path.write_bytes(path.read_bytes()[:200])
    capsys.readouterr()
    assert taken_up_if_damaged(folder)
    assert str(path) in capsys.readouterr().err
    assert finished(config) == folder
    assert not (folder / UNFINISHED).exists()


def test_a_run_has_one_process(config):
    with claim_folder(config, []) as folder:
        refused(config, "another process")
        assert (folder / UNFINISHED).exists()
        with claim_folder(replace(config, name="other"), []) as other:
            assert other.name == "other"
    assert latest(config) == folder


def test_what_is_called_latest_and_is_no_link_is_not_touched(config):
    mine = Path(config.runs) / "latest" / "mine"
    mine.mkdir(parents=True)
    refused(config, "latest")
    assert mine.exists()


def test_a_link_to_a_run_that_is_gone_is_replaced_and_runs_may_be_moved_as_a_whole(config):
    """The link is relative."""
    Path(config.runs).mkdir()
    (Path(config.runs) / "latest").symlink_to("controller/gone")
    folder = finished(config)
    assert folder == latest(config)
    moved = Path(config.runs).rename(f"{config.runs}-moved")
    assert (moved / "latest" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "default"),
        (["experiment=selector", "jobs=1", "runs=x", "tracking.mode=offline", "name=y"], "default"),
        (["beams.path=/data/okvqa/beams.json", "beams=files"], "beams.path-beams.json_beams-files"),
        (["seeds=[0,1]", "+a=1", "~b"], "a-1_seeds--0-1_b"),
        (["variants={mine: {live: true}}"], "variants--mine-live-true"),
    ],
)
def test_names_say_what_was_changed(words, name):
    assert run_name(words) == name
    assert run_name(words[::-1]) == name


def test_long_names_are_short_and_stay_apart():
    words = [f"section.key{i}=value" for i in range(50)]
    name = run_name(words)
    assert name.startswith("key0-value_key10-value_")
    assert len(name) == 60
    assert run_name(words[::-1]) == name
    assert run_name([*words, "seeds=[0]"]) != run_name([*words, "seeds=[1]"])
    # without their sections these words are the same
    of_sft, of_rce = (run_name([*words, f"{stage}.epochs=1"]) for stage in ("sft", "rce"))
    assert of_sft != of_rce
    longest = "v" * 58
    assert run_name([f"k={longest}"]) == f"k-{longest}"
    assert len(run_name([f"k={longest}v"])) <= 60


def test_runs_with_one_name_at_the_same_time_have_a_folder_each_and_the_last_is_the_latest(config):
    """Nobody fails, and nothing is left over."""
    all_in = threading.Barrier(8)

    def run(seed):
        with claim_folder(replace(config, name="x", seeds=[seed]), []) as folder:
            all_in.wait()
        return folder.name, list(OmegaConf.load(folder / "config.yaml").seeds)

    names, seeds = zip(*at_once(8, run), strict=True)
    assert sorted(names) == ["x", *(f"x-{number}" for number in range(2, 9))]
    assert [*seeds] == [[seed] for seed in range(8)]
    assert latest(config).name in names
    assert {path.name for path in Path(config.runs).iterdir()} == {config.experiment, "latest"}


def test_one_run_that_begins_twice_at_the_same_time_is_refused_once(config):
    ended = threading.Barrier(2)

    def run(_):
        try:
            with claim_folder(config, []) as folder:
                ended.wait()
                return folder.name
        except InputError as error:
            ended.wait()
            return str(error)

    name, refusal = sorted(at_once(2, run), key=len)
    assert name == "default"
    assert "another process" in refusal


@pytest.mark.parametrize(
    ("field", "name"), [("name", "a/b"), ("name", "../x"), ("name", ".."), ("experiment", "a/b")]
)
def test_a_name_is_that_of_one_folder(config, field, name):
    refused(replace(config, **{field: name}), field)
    assert not Path(config.runs).exists()


def test_a_folder_that_cannot_be_written_is_said(config, monkeypatch):
    monkeypatch.setattr("pathlib.Path.mkdir", Mock(side_effect=OSError(errno.EROFS, "Read-only")))
    refused(config, "runs")


def test_what_killed_processes_left_goes_and_a_folder_cut_short_is_taken_up_by_the_same_run_alone(
    config, capsys
):
    config = replace(config, name="r")
    folder = stopped(config)
    Path(config.runs, ".latest-new").symlink_to("nowhere")
    settings = folder / "config.yaml"
    whole = settings.read_bytes()
    for cut in (b"", whole[:9], whole[:9].ljust(len(whole), b"\0")):
        settings.write_bytes(cut)
        assert stopped(replace(config, seeds=[5])) != folder
        assert stopped(config) == folder
        assert settings.read_bytes() == whole
        assert str(settings) in capsys.readouterr().err
    # it may have written no settings; its lock is there, and nobody holds it any more
    settings.unlink()
    assert stopped(config) == folder
    assert settings.read_bytes() == whole
    with (folder / UNFINISHED).open("w") as lock:
        lock_descriptor(lock.fileno())
    assert finished(config) == folder
    assert not list(Path(config.runs).rglob(".latest*"))
    # a process that was killed before it wrote anything left an empty folder
    (folder.parent / "empty").mkdir()
    assert finished(replace(config, name="empty")).name == "empty"


TORN = {
    "empty": lambda digest: b"",
    "beginning": lambda digest: digest[:32],
    "end": lambda digest: digest[32:],
    "zeros": lambda digest: bytes(len(digest)),
    "half JSON": lambda digest: b'{"settings": "9f',
    "no text": lambda digest: b"\xff\xfe" * 32,
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_run_whose_marker_is_torn_goes_on_and_says_so(config, tear, capsys):
    folder = stopped(config)
    marker = folder / UNFINISHED
    whole = marker.read_bytes()
    marker.write_bytes(tear(whole))
    capsys.readouterr()
    assert stopped(config) == folder
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{marker}: ")
    assert marker.read_bytes() == whole
    assert finished(config) == folder
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_torn_marker_is_said_before_another_run_begins_beside_it(config, tear, capsys):
    config = replace(config, name="r")
    folder = stopped(config)
    marker, settings = folder / UNFINISHED, folder / "config.yaml"
    torn, saved = tear(marker.read_bytes()), settings.read_bytes()
    marker.write_bytes(torn)
    capsys.readouterr()
    other = replace(config, seeds=[7])
    with claim_folder(other, []) as second:
        assert second.name == "r-2"
        said, kept = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{marker}: ")
    assert str(second) in kept
    assert (marker.read_bytes(), settings.read_bytes()) == (torn, saved)
    # the run itself goes on where it was
    assert finished(config) == folder


def test_where_marker_and_settings_are_both_torn_what_is_left_decides(config, capsys):
    folder = stopped(config)
    marker, settings = folder / UNFINISHED, folder / "config.yaml"
    whole, saved = marker.read_bytes(), settings.read_bytes()
    for left, goes_on in ((whole[:32], True), (whole[32:], False)):
        marker.write_bytes(left)
        settings.write_bytes(saved[:9])
        capsys.readouterr()
        assert (stopped(config) == folder) == goes_on
        said, *_ = capsys.readouterr().err.splitlines()
        assert said.startswith(f"{marker}: ")
        assert ("config.yaml" in said) != goes_on
