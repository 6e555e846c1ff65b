"""What is made of measurements: the drift of the machine is divided out."""

from dataclasses import replace

import numpy as np
import polars as pl

from knobwise.profiling.measuring.measuring import TIMES, TOKENS, Plan, measuring_order
from knobwise.profiling.measuring.outputs import log_spread, without_drift
from knobwise.profiling.measuring.questions import VQAItem

SAMPLES, CONFIGURATIONS, REPEATS = 50, 8, 5


def measured() -> tuple[Plan, pl.DataFrame, np.ndarray]:
    """A plan, its log with a drift of ± 30 % and a jitter of 3 %, and the latencies without either,
    [N, C]."""
    items = tuple(VQAItem(str(i), None, "?", ("yes",)) for i in range(SAMPLES))
    contents = tuple(f"content {i}" for i in range(SAMPLES))
    configurations = tuple({"side": j} for j in range(CONFIGURATIONS))
    plan = Plan(items, ("?",) * SAMPLES, contents, configurations, REPEATS)
    rng = np.random.default_rng(0)
    latency = np.exp(rng.normal(1, 0.3, (SAMPLES, CONFIGURATIONS)))
    rows = []
    for repeat in range(REPEATS):
        for i, j in measuring_order(SAMPLES, CONFIGURATIONS, (0, repeat)).tolist():
            drift = 0.3 * np.sin(2 * np.pi * len(rows) / 1100) + 0.03 * rng.normal()
            ms = latency[i, j] * np.exp(drift)
            row = {"sample_id": str(i), "content": contents[i], "side": j, "repeat": repeat}
            row |= dict.fromkeys(TIMES, ms) | dict.fromkeys(TOKENS, 1)
            row |= {"vision_ms": ms / 4, "features_ms": 0.1, "extra.cpu_ms": ms / 2}
            rows.append(row | {"text": "yes"})
    return plan, pl.DataFrame(rows), latency


def test_drift_is_divided_out_of_all_times_and_jitter_stays() -> None:
    plan, log, latency = measured()
    steady = without_drift(plan, log)
    assert set(steady.columns) == set(log.columns)
    before, after = log_spread(plan, log), log_spread(plan, steady)
    assert before is not None
    assert after is not None
    assert before > 0.15
    assert 0.02 < after < 0.05
    cells = plan.select(steady).group_by("sample", "configuration").agg(pl.median("total_ms"))
    i, j = cells.select("sample", "configuration").to_numpy().T
    far = np.log(cells["total_ms"].to_numpy() / latency[i, j])
    assert far.std() < 0.04
    assert abs(far.mean()) < 0.1  # the level in the median stays
    np.testing.assert_allclose(steady["vision_ms"] / steady["total_ms"], 1 / 4)
    np.testing.assert_allclose(steady["extra.cpu_ms"] / steady["total_ms"], 1 / 2)
    assert set(steady["features_ms"]) == {0.1}
    # with two repeats nothing changes
    assert without_drift(replace(plan, repeats=2), log) is log
