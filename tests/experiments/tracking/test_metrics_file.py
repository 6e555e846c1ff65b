"""metrics.csv gives back what was written, whatever came between."""

from __future__ import annotations

import csv
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.experiments.tracking.metrics_file import MetricsFile

ROWS = st.lists(
    st.dictionaries(st.sampled_from(["Train/Loss", "Val/Loss", 'odd, "name"']), st.floats(allow_nan=False), min_size=1),
    min_size=1,
    max_size=6,
)


def written(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def values_of(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value and name not in ("seed", "step")}


def fill(path: Path, *seeds: int) -> None:
    """Three steps of each seed, in two rows each."""
    for seed in seeds:
        file = MetricsFile(path, seed)
        assert file.earlier == []
        for step in range(3):
            file.append(step, {"Val/Loss": float(seed)})
            file.append(step, {"Train/Loss": step / 2})


@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
def test_metrics_file_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    file = MetricsFile(folder / "metrics.csv", seed=3)
    for step, row in enumerate(rows):
        file.append(step, row)
    assert [values_of(row) for row in written(folder)] == rows


def test_metrics_file_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.")
    MetricsFile(path, seed=0, resume_step=5).append(1, {"Train/Loss": 0.5})
    assert path.read_text() == "seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.5,\n"


def test_seeds_side_by_side_keep_their_rows_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first, second = MetricsFile(path, seed=0), MetricsFile(path, seed=1)
    first.append(0, {"Train/Loss": 1.0})
    second.append(0, {"Val/Loss": 2.0})
    first.append(1, {"Train/Loss": 3.0, "Val/Loss": 4.0})
    MetricsFile(path, seed=None).append(0, {"Test/Loss": 5.0})
    assert path.read_text().splitlines() == [
        "seed,step,Train/Loss,Val/Loss,Test/Loss",
        "0,0,1.0,,",
        "1,0,,2.0,",
        "0,1,3.0,4.0,",
        ",0,,,5.0",
    ]


def test_a_seed_that_goes_on_drops_its_own_later_rows_alone_and_has_all_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    fill(path, 0, 1, 10)
    again = MetricsFile(path, seed=1, resume_step=0)
    assert again.earlier == [row for s in range(3) for row in ((s, {"Val/Loss": 1.0}), (s, {"Train/Loss": s / 2}))]
    assert again.kept == again.earlier[:2]
    steps = [str(step) for step in range(3) for _ in range(2)]
    expected = [*(("0", step) for step in steps), ("1", "0"), ("1", "0"), *(("10", step) for step in steps)]
    assert [(row["seed"], row["step"]) for row in written(tmp_path)] == expected
    MetricsFile(path, seed=1)
    assert {row["seed"] for row in written(tmp_path)} == {"0", "10"}


def append_many(path: Path, seed: int, rows: int) -> None:
    """What one process of several does: its rows hold ever new names, so that the file is rewritten again and again."""
    file = MetricsFile(path, seed)
    for step in range(rows):
        file.append(step, {f"seed{seed}/{step // 5}": seed + step / 100})


def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    path, rows = tmp_path / "metrics.csv", 40
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(path, seed, rows)) for seed in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = written(tmp_path)
    assert len(found) == 3 * rows
    for seed in range(3):
        own = [row for row in found if row["seed"] == str(seed)]
        assert [int(row["step"]) for row in own] == list(range(rows))
        for step, row in enumerate(own):
            assert values_of(row) == {f"seed{seed}/{step // 5}": seed + step / 100}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]
