"""Several workers on Ray: the cells of one process, whoever dies."""

import math
import shutil
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import ray
import worker_models
from commands import launch, mistake, read_json, refused, started, stop_when, words_of
from helpers import identical
from safetensors.torch import load_file
from tiny_models import saved, tiny_language_model
from worker_models import BAD, SAMPLES

from knobwise.__main__ import main
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.checkpoint import save_checkpoint
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.settings.measured_with import workers_of
from knobwise.profiling.measuring import measuring
from knobwise.profiling.measuring.measuring import LOG, read_measurements
from knobwise.profiling.workers import pool
from knobwise.profiling.workers.cluster import WorkerOptions, cluster
from knobwise.profiling.workers.machines import (
    SHARED,
    compare_workers,
    differing_machines,
    number_of,
    shared_cells,
)

CELLS = SAMPLES * 3
ELASTIC = words_of("""
    profile model=elastic knobs.samples=12 knobs.repeats=1 knobs.clock=cpu
    knobs.max_crops=[2,8] knobs.top_k=[1,2] knobs.num_active_blocks=[3]
""")
TWO = ["workers=2"]


@pytest.fixture(scope="module")
def _ray():
    """One Ray for all tests, which take seconds to start it."""
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, **quiet)
    yield
    ray.shutdown()


@pytest.fixture
def folder(home):
    """The current folder, with the models in it."""
    shutil.copy(worker_models.__file__, home / "grieved.py")
    return home


def profile(kind, *words):
    """The words that measure a model of `worker_models`."""
    settings = "knobs.repeats=1 knobs.clock=cpu out=out"
    return words_of(f"profile model=grieved:{kind} {settings}", [*words])


def untimed(out):
    """The table of a profile without its times."""
    table = pl.read_parquet(Path(out) / "table.parquet")
    return table.drop(name for name in table.columns if name.endswith("_ms"))


def same_tensors(name):
    """Check that a file holds the same in the folders `two` and `one`."""
    tensors, wanted = (load_file(f"{out}/{name}") for out in ("two", "one"))
    assert tensors.keys() == wanted.keys()
    for block, values in wanted.items():
        identical(tensors[block], values)


def logged(out="out"):
    """The log, and how often each cell is in it."""
    log = read_measurements(Path(out) / "state" / LOG)
    return log, Counter(log.select("sample_id", "size").iter_rows())


@pytest.mark.usefixtures("_ray")
def test_two_workers_measure_the_cells_of_one(home, capsys):
    launch(ELASTIC, "out=one")
    launch(ELASTIC, "out=two", TWO)
    assert untimed("two").equals(untimed("one"))
    same_tensors("features.safetensors")
    log = read_measurements(Path("two/state") / LOG)
    assert len(log) == 48
    # each measured the shared cells beside them
    workers = workers_of("two/table.parquet")
    shared = read_measurements(Path("two/state") / SHARED)
    assert {worker["worker"] for worker in workers} == {*shared["measured_by"]}
    assert all(count == 12 for count in Counter(shared["measured_by"]).values())
    assert sum(worker["measured"] for worker in workers) == len(log)
    assert {"host", "cpu", "accelerator", "threads"} < {*workers[0]}
    # one process goes on where they stopped, and they where it did
    capsys.readouterr()
    launch(ELASTIC, "out=two")
    assert len(read_measurements(Path("two/state") / LOG)) == 48
    assert len(workers_of("two/table.parquet")) == len(workers)
    launch(ELASTIC, "out=one knobs.repeats=2", TWO)
    log = read_measurements(Path("one/state") / LOG)
    assert log["measured_by"].null_count() == 48
    assert len(log) == 96


@pytest.mark.campaign
@pytest.mark.usefixtures("_ray")
def test_a_worker_that_is_killed_is_replaced_and_no_cell_is_lost(folder, capsys):
    launch(profile("KilledOnce"), TWO)
    assert "another one takes its place" in capsys.readouterr().err
    _, cells = logged()
    assert len(cells) == CELLS
    assert {*cells.values()} == {1}
    # it has the number of the one that died, or of the other
    assert len(read_json("out/state/workers.json")) <= 2


@pytest.mark.usefixtures("_ray")
@pytest.mark.campaign
def test_a_sample_that_kills_every_worker_is_named_and_the_others_are_kept(folder, capsys):
    assert main(profile("KilledAlways", *TWO)) == 2
    assert "'07'" in capsys.readouterr().err.splitlines()[-1]
    log, cells = logged()
    assert "07" not in log["sample_id"]
    assert {*cells.values()} == {1}


@pytest.mark.campaign
@pytest.mark.usefixtures("_ray")
def test_a_model_that_fails_is_one_line_as_in_one_process(folder, capsys):
    # the plan is printed before anything fails
    line = mistake(profile("Failing", *TWO), capsys, begun="measures ")
    assert f"ArithmeticError: {BAD}" in line
    assert "'07'" in line


@pytest.mark.campaign
@pytest.mark.usefixtures("_ray")
def test_a_job_that_takes_long_is_reported(folder, capsys, monkeypatch):
    monkeypatch.setattr(pool, "LONG_S", 0.5)
    monkeypatch.setattr(pool, "CHECK_S", 0.1)
    # on their own cores, by the time that passes
    launch(profile("Slow"), "knobs.clock=wall knobs.values={size:[8]}", TWO)
    reports = [line for line in capsys.readouterr().err.splitlines() if "has been at it" in line]
    assert reports
    assert all("'07'" in report for report in reports)
    assert len(logged()[1]) == SAMPLES


@pytest.mark.usefixtures("_ray")
def test_workers_that_could_own_nothing_are_refused(folder, capsys):
    wall = profile("Counting", "knobs.clock=wall")
    assert "workers=3" in refused([*wall, "workers=3"], capsys)
    assert "gpus=1" in refused([*wall, *TWO, "gpus=1"], capsys)
    # CPU time is counted for each thread, whoever else is there
    with cluster(WorkerOptions(3, shares=True)) as share:
        assert share["num_cpus"] == 0


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("workers=0", "workers"),
        ("gpus=1", "gpus"),
        ("ray_address=auto", "ray_address"),
        ("workers=2 gpus=-1", "gpus"),
        ("workers=2 device=cuda", "device"),
        ("workers=2 ray_address=ray://host:1", "ray_address"),
        ("workers=2 ray_address=127.0.0.1:9", "ray_address"),
        ("workers=2 ray_address=nowhere", "ray_address"),
        ("workers=2 model=openai endpoint=http://127.0.0.1:9/v1 data=d.csv", "workers"),
    ],
)
def test_mistakes_are_named(words, setting, home, capsys):
    assert setting in refused(words_of("profile out=out", words), capsys)


def test_without_ray_the_extra_is_named(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ".[ray]" in refused(["profile", "out=out", *TWO], capsys)


# -- the comparison of workers ---------------------------------------------------------------------


def test_a_worker_has_the_number_of_its_note(tmp_path):
    path = tmp_path / "workers.json"
    numbers = [number_of(path, {"host": host}, taken) for host, taken in (
        ("a", set()), ("a", {0}), ("b", {0, 1}), ("a", {1, 2}), ("a", set()),
    )]  # fmt: skip
    assert numbers == [0, 1, 2, 0, 0]
    assert [note["host"] for note in read_json(path)] == ["a", "a", "b"]


def test_shared_cells_are_of_twenty_samples_and_spread_over_configurations():
    cells = shared_cells(100, 7)
    assert len({i for _, i, _ in cells}) == len(cells) == 20
    assert len({j for _, _, (j,) in cells}) > 3
    assert cells == shared_cells(100, 7)
    assert len(shared_cells(3, 7)) == 3


_EMPTY = pl.DataFrame(schema=measuring._SCHEMA)


def write_shared(state, factors):
    """Three shared cells, which each worker takes this many times as long for."""
    state.mkdir()
    frames = []
    for worker, factor in enumerate(factors):
        times = [10.0 * factor, 20.0 * factor, 40.0 * factor]
        cells = {"content": ["a", "b", "c"], "size": 2, "total_ms": times, "measured_by": worker}
        frames.append(pl.DataFrame(cells))
    # with all columns, which no line lacks
    lines = pl.concat([_EMPTY, *frames], how="diagonal_relaxed")
    lines.write_ndjson(state / SHARED)
    lines.head(4).write_ndjson(state / LOG)


def test_times_are_compared_with_those_of_the_others(tmp_path):
    state = tmp_path / "state"
    write_shared(state, (1.0, 1.0, 2.0))
    for number, host in enumerate("aab"):
        note = {"host": host, "accelerator": "none"}
        assert number_of(state / "workers.json", note, {*range(number)}) == number
    workers = compare_workers(state)
    assert [worker["measured"] for worker in workers] == [3, 1, 0]
    # against the geometric mean of the two others
    factors = [math.sqrt(1 / 2), math.sqrt(1 / 2), 2.0]
    for worker, factor in zip(workers, factors, strict=True):
        assert worker["times"] == pytest.approx(factor, abs=1e-3)
        assert worker["shared"] == 3
    slow, fast = differing_machines(workers)
    assert slow["times"] == pytest.approx(2.0, abs=1e-3)
    assert fast["times"] == pytest.approx(0.5, abs=1e-3)
    assert slow["name"] == "b"
    assert not differing_machines(workers[:0])


# -- what takes longer -----------------------------------------------------------------------------


QUESTIONS = """id,question,answers,question_type
a,How many dogs?,2,count
b,What color is the cat?,red,color
c,How many cats are red?,1,count
d,Is it blue?,no,color
e,How many dogs are red?,3,count
f,What is it?,cats,other
"""


@pytest.mark.campaign
@pytest.mark.usefixtures("_ray")
def test_two_workers_measure_a_hugging_face_model_as_one_does(home):
    saved(home / "tiny", *tiny_language_model())
    Path("questions.csv").write_text(QUESTIONS)
    words = words_of("""
        profile model=tiny data=questions.csv knobs.repeats=1 knobs.clock=cpu knobs.top_k=[1,2]
        knobs.num_active_blocks=[3,4] knobs.max_new_tokens=4 knobs.metric=scoring:share
    """)
    Path("scoring.py").write_text("share = lambda answer, right: 1 / (1 + len(answer))\n")
    launch(words, "out=one")
    launch(words, "out=two", TWO)
    assert untimed("two").equals(untimed("one"))
    # answers that depend on the knobs, so that equal ones say something
    assert untimed("one")["pred"].n_unique() > 6
    same_tensors("features.safetensors")


@pytest.mark.campaign
@pytest.mark.usefixtures("_ray")
def test_two_workers_record_the_demonstrations_that_one_records(home):
    words = words_of("""
        profile model=learner learner.queries=60 learner.candidates=200 beams.chunk=10
        beams.width=2 beams.json=false
    """)
    launch(words, "out=one")
    launch(words, "out=two", TWO)
    same_tensors("beams.safetensors")
    assert read_json("two/state/workers.json")[0]["threads"] == 1
    # a lost chunk is found again, and a selector's draws are as in one process
    Path("two/state/search/20.safetensors").unlink()
    table = BeamTable.load("one/beams.safetensors")
    selector = Selector.fitted(SelectorConfig(width=8), table.queries, table.candidates)
    save_checkpoint("policy.pt", selector, table, {})
    launch(words, "out=one checkpoint=policy.pt beams.draws=3")
    launch(words, "out=two checkpoint=policy.pt beams.draws=3", TWO)
    same_tensors("beams.safetensors")
    assert BeamTable.load("two/beams.safetensors").round.max() == 1


@pytest.mark.campaign
def test_after_a_kill_of_the_command_the_next_goes_on(folder):
    words = profile("Slow", "knobs.values={size:[2,4,8]}", *TWO)
    command = started(words)
    log = Path("out/state") / LOG
    stop_when(lambda: log.exists() and log.read_bytes().count(b"\n") >= 10, command)
    kept = log.read_bytes()
    launch(words)
    assert log.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    _, cells = logged()
    assert len(cells) == CELLS
    assert {*cells.values()} == {1}
