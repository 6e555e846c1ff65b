import polars as pl
import pytest
import torch

from knobwise.envs.readers.long_table import long_frame, read_long_table, table_from_frame


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_first_look_is_added_to_times_and_written_apart_again(repeats, tmp_path):
    rows = [
        {
            "sample_id": s,
            "size": c,
            "repeat": r,
            "accuracy": 1.0,
            "latency_ms": 4.0 + c + r,
            "first_look_ms": 1.5 * c,
        }
        for s in "ab"
        for c in (0, 1)
        for r in range(repeats)
        if (s, c) != ("b", 1)
    ]
    table = table_from_frame(pl.DataFrame(rows), name="t")
    assert table.first_look_ms is not None
    assert table.first_look_ms.tolist() == [[0.0, 1.5], [0.0, 0.0]]
    extra = 0.5 if repeats == 2 else 0.0
    expected = torch.tensor([[4.0 + extra, 6.5 + extra], [4.0 + extra, torch.nan]])
    torch.testing.assert_close(table.latency_ms, expected, equal_nan=True)
    frame = long_frame(table)
    assert frame["latency_ms"].to_list() == [row["latency_ms"] for row in rows]
    frame.write_parquet(tmp_path / "t.parquet")
    assert read_long_table(tmp_path / "t.parquet").digest == table.digest
