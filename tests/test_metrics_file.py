"""metrics.csv gives back what was written, whatever came between."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.experiments.metrics_file import MetricsFile

ROWS = st.lists(
    st.dictionaries(st.sampled_from(["Train/Loss", "Val/Loss", 'odd, "name"']), st.floats(allow_nan=False), min_size=1),
    min_size=1,
    max_size=6,
)


def written(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
def test_metrics_file_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    file = MetricsFile(folder / "metrics.csv", seed=3)
    for step, row in enumerate(rows):
        file.append(step, row)
    read = [{k: float(v) for k, v in r.items() if v and k not in ("seed", "step")} for r in written(folder)]
    assert read == rows


def test_metrics_file_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.")
    MetricsFile(path, seed=0, resume_step=5).append(1, {"Train/Loss": 0.5})
    assert path.read_text() == "seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.5,\n"
