"""Rows that measure a cell again: read, refused where they are copies, and written back."""

import json

import polars as pl
import pytest
import torch
from helpers import repeated, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

import knobwise
from knobwise.common.errors import InputError
from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.long_table import (
    long_frame,
    read_long_table,
    table_from_frame,
    write_long_table,
)
from knobwise.envs.tables.profile_table import ProfileTable


def frame(**columns) -> pl.DataFrame:
    """One sample under two configurations, of which the first was measured three times."""
    return pl.DataFrame(
        {
            "sample_id": ["a"] * 4,
            "top_k": [4, 4, 8, 4],
            "accuracy": [1.0, 1.0, 0.5, 1.0],
            "latency_ms": [12.0, 10.0, 20.0, 14.0],
        }
        | columns
    )


def table(**columns) -> ProfileTable:
    return table_from_frame(frame(**columns), name="t", source="t.csv")


def cells(profile: ProfileTable) -> list:
    """The measurements of each cell of the first sample."""
    return [[ms for ms in cell if ms == ms] for cell in profile.measurements_ms[0].tolist()]


def test_rows_with_a_repeat_are_the_measurements_of_a_cell_in_its_order() -> None:
    made = table(repeat=[2, 0, 0, 7])
    assert [knob.name for knob in made.knobs] == ["top_k"]
    assert cells(made) == [[10.0, 12.0, 14.0], [20.0]]
    assert made.latency_ms.tolist() == [[12.0, 20.0]]
    assert made.notes == ()
    backwards = table_from_frame(
        frame(repeat=["2", "0", "0", "7"]).reverse(), name="t"
    )  # as text, from a CSV
    assert backwards.digest == made.digest
    assert cells(table(repeat=[0, 1, 0, 2])) == [[12.0, 10.0, 14.0], [20.0]]


def test_rows_without_a_repeat_are_measurements_too_and_a_note_counts_them() -> None:
    made = table()
    assert cells(made) == [[10.0, 12.0, 14.0], [20.0]]
    assert made.notes == ("1 cells occur up to 3 times: taken as repeated measurements",)
    assert table_from_frame(frame().reverse(), name="t").digest == made.digest
    assert table(repeat=[None] * 4).digest == made.digest


def test_accuracies_that_differ_are_averaged_and_a_note_counts_them() -> None:
    made = table(accuracy=[1.0, 0.0, 0.5, 0.5], repeat=[0, 1, 0, 2])
    assert made.accuracy.tolist() == [[0.5, 0.5]]
    assert made.notes == ("1 cells differ in accuracy between measurements: the mean is used",)
    # a measurement without accuracy or latency is none
    made = table(accuracy=[1.0, None, 0.5, 0.0], repeat=[0, 1, 0, 2])
    assert (cells(made), made.accuracy[0, 0]) == ([[12.0, 14.0], [20.0]], 0.5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"latency_ms": [12.0, 12.0, 20.0, 14.0]},
            r"1 \(sample, configuration\) pairs occur more than once with the same accuracy and "
            r"latency, such as a "
            r"top_k=4, 2 times\. Remove the copies; or number the measurements of each pair in a "
            r"column `repeat`",
        ),
        (
            {"repeat": [1, 1, 0, 2]},
            "occur more than once with the same `repeat`, such as a top_k=4, 2 times",
        ),
        ({"repeat": [None, 1, 0, None]}, "occur more than once with the same `repeat`"),
        (
            {"repeat": ["first", "1", "2", "3"]},
            "'repeat' has 1 values that are not numbers: 'first'",
        ),
    ],
)
def test_copies_are_refused(columns: dict, message: str) -> None:
    with pytest.raises(InputError, match=rf"^t\.csv: .*{message}"):
        table(**columns)


def test_repeat_is_never_a_knob() -> None:
    assert [knob.name for knob in table(repeat=[0, 1, 0, 2]).knobs] == ["top_k"]
    with pytest.raises(InputError, match="repeat for a knob"):
        table_from_frame(frame(repeat=[0, 1, 0, 2]), name="t", knobs=["top_k", "repeat"])


def test_a_repeat_column_of_cells_measured_once_costs_nothing() -> None:
    data = frame(latency_ms=[12.0, None, 20.0, None])
    once = table_from_frame(data, name="t")
    numbered = table_from_frame(data.with_columns(repeat=3), name="t")
    assert numbered.repeats_ms is None
    assert numbered.digest == once.digest


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(2, 5),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([".csv", ".parquet", ".jsonl"]),
    st.booleans(),
)
def test_what_is_written_is_read_again(
    tmp_path_factory, seed: int, most: int, holes: float, suffix: str, shuffled: bool
) -> None:
    profile = repeated(small_table(12, seed, holes, features=False), most, seed)
    path = tmp_path_factory.mktemp("rows") / f"small{suffix}"
    write_long_table(profile, path)
    assert read_long_table(path).digest == profile.digest
    rows = long_frame(profile)
    assert len(rows) == int((~profile.repeats_ms.isnan()).sum())
    rows = rows.sample(fraction=1, shuffle=True, seed=seed) if shuffled else rows
    assert knobwise.read(rows).digest == profile.digest
    if not holes:
        write_exp5_exp6(rows, path.parent / "exp5", path.parent / "exp6", "small")
        again = read_exp5_exp6(path.parent / "exp5", path.parent / "exp6", "small")
        assert again.digest == profile.digest
        assert again.notes == ()


def exp6(folder, rows: list[dict]) -> None:
    knobs = {"max_crops": 2, "top_k": 4, "num_active_blocks": 8}
    rows = [{**knobs, "accuracy": 1.0, **row} for row in rows]
    (folder / "exp6").mkdir()
    content = {"summary": [knobs | {"num_samples": 2}], "per_sample_latencies": rows}
    (folder / "exp6" / "exp6_latency_crops2_topk4_blocks8.json").write_text(json.dumps(content))


def exp5(folder, ids: list[int]) -> None:
    (folder / "exp5").mkdir()
    content = {"summary": [], "all_samples": [{"sample_id": i, "score": 0.5} for i in ids]}
    (folder / "exp5" / "exp5_accuracy_results_crops2_topk4_blocks8.json").write_text(
        json.dumps(content)
    )


def times(*pairs: tuple[int, float]) -> list[dict]:
    return [{"sample_id": sample, "T_total_ms": ms} for sample, ms in pairs]


def test_repeated_rows_of_a_latency_file_are_measurements(tmp_path) -> None:
    exp5(tmp_path, [0, 1])
    exp6(tmp_path, times((0, 9.0), (0, 8.0), (1, 5.0), (0, 6.0), (7, 1.0), (7, 2.0)))
    made = read_exp5_exp6(tmp_path / "exp5", tmp_path / "exp6", "small")
    assert torch.equal(
        made.repeats_ms.nan_to_num(-1), torch.tensor([[[6.0, 8.0, 9.0]], [[5.0, -1.0, -1.0]]])
    )
    assert made.accuracy.tolist() == [[0.5], [0.5]]
    assert made.notes == (
        "small: 1 cells of 1 samples have no partner in exp5, so they count as not profiled",
        "1 cells occur up to 3 times: taken as repeated measurements",
    )


@pytest.mark.parametrize(
    ("scores", "rows", "message"),
    [
        (
            [0, 0],
            times((0, 1.0)),
            r"exp5_accuracy_results_crops2.*occur more than once, such as 2 × sample_id 0",
        ),
        (
            [0],
            times((0, 1.0), (0, 1.0)),
            "with the same accuracy and latency, such as 0 max_crops=2",
        ),
        (
            [0],
            [{**row, "image_id": image} for image, row in enumerate(times((0, 1.0), (0, 2.0)))],
            r"exp6_latency_crops2.*occur more than once.*Do ids restart",
        ),
    ],
)
def test_rows_that_are_no_measurements_of_one_cell_are_refused(
    tmp_path, scores, rows, message: str
) -> None:
    exp5(tmp_path, scores)
    exp6(tmp_path, rows)
    with pytest.raises(InputError, match=message):
        read_exp5_exp6(tmp_path / "exp5", tmp_path / "exp6", "small")


def test_ids_that_restart_on_every_rank_are_still_refused_in_latency_files(tmp_path) -> None:
    exp5(tmp_path, [0])
    exp6(tmp_path, times((0, 1.0)))
    (path,) = (tmp_path / "exp6").iterdir()
    for rank, ms in enumerate((1.0, 2.0)):
        content = json.loads(path.read_text())
        content["per_sample_latencies"][0]["T_total_ms"] = ms
        path.with_name(f"{path.stem}_rank{rank}.json").write_text(json.dumps(content))
    path.unlink()
    with pytest.raises(
        InputError, match=r"_rank0.*_rank1.*1 \(sample, configuration\) pairs.*Do ids restart"
    ):
        read_exp5_exp6(tmp_path / "exp5", tmp_path / "exp6", "small")


def test_core_exp_files_may_repeat_a_sample(tmp_path) -> None:
    rows = [
        {
            "sample_id": 0,
            "accuracy": accuracy,
            "T_vision_total": ms,
            "T_LLM_prefill": 1.0,
            "T_total": ms,
            "repeat": r,
        }
        for r, (accuracy, ms) in enumerate([(1.0, 4.0), (0.0, 3.0), (1.0, 3.0)])
    ]
    path = tmp_path / "small_imgsizetier-high_crops12_topk8_blocks16.json"
    path.write_text(json.dumps({"summary": [], "per_sample_results": rows}))
    made = read_core_exp(tmp_path, "small")
    assert made.repeats_ms.tolist() == [[[4.0, 3.0, 3.0]]]
    assert made.accuracy.item() == pytest.approx(2 / 3)
    assert made.notes == ("1 cells differ in accuracy between measurements: the mean is used",)
