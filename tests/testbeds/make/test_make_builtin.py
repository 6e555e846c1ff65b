"""The recipe of the built-in profile, which divides out drift of the machine."""

import numpy as np
import polars as pl
import pytest
from commands import read_json

from knobwise.envs.readers.long_table import read_long_table
from knobwise.testbeds.elastic.model import ElasticVLM
from knobwise.testbeds.elastic.scenes import SEED, draw_sample
from knobwise.testbeds.elastic.settings import ElasticSize
from knobwise.testbeds.make import builtin


def log_of(level):
    """Measurements in random order, of cells with known times, by a machine with this speed."""
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(480) for _ in range(3)])
    cells = zip(builtin.MEASURED, np.unravel_index(order, (60, 2, 2, 2)), strict=True)
    true = 10.0 * np.exp(rng.normal(0, 0.4, 480))[order]
    jitter = np.exp(rng.normal(0, 0.01, len(order)))
    # what the reference shows comes and goes with every measurement
    speed = rng.normal(0, 0.2, len(order))
    total = true * jitter * np.exp(speed + level(np.linspace(0, 1, len(order))))
    reference = 4.0 * np.exp(speed / 0.9 + rng.normal(0, 0.01, len(order)))
    times = {"total_ms": total, "prefill_ms": total / 2, builtin.REFERENCE: reference}
    return pl.DataFrame(dict(cells) | times | {"true": true})


@pytest.mark.parametrize(
    "level",
    [
        lambda t: 0 * t,
        lambda t: 0.3 * np.sin(9 * t),  # slow swings
        lambda t: np.log(2) * (t > 0.45),  # another machine for more than half of the time
    ],
)
def test_drift_is_divided_out(level):
    steady = builtin.without_drift(log_of(level))
    ratio = (steady["total_ms"] / steady["true"]).log()
    assert ratio.std() < 0.025
    # prefill follows
    np.testing.assert_allclose(steady["prefill_ms"], steady["total_ms"] / 2)
    assert abs(ratio.median() - np.median(level(np.linspace(0, 1, 1001)))) < 0.25


def test_the_command_writes_what_the_readers_read(tmp_path, monkeypatch, capsys):
    size = ElasticSize(width=16, heads=2, experts=4, expert_width=8, stride=4)
    tiny = builtin.TimedElastic(ElasticVLM(size).eval(), "tiny")
    tiny.measured = {"max_crops": (2, 4), "top_k": (1,), "num_active_blocks": (3, 6)}
    monkeypatch.setattr(builtin, "TimedElastic", lambda: tiny)
    monkeypatch.setattr(builtin.ElasticRequests, "length", 3)
    monkeypatch.setattr("sys.argv", ["profile", "--out", str(tmp_path)])
    builtin.main()
    folder = tmp_path / "builtin"
    assert str(folder) in capsys.readouterr().out
    table = read_long_table(folder / "table.parquet", features=folder / "features.npz")
    assert table.accuracy.shape == (3, 4)
    assert set(table.features) == {"image_features", "language_features"}
    facts = read_json(folder / "profile.json")
    assert facts["features_ms"] > 0
    assert (facts["samples"], facts["configurations"]) == (3, 4)
    samples = pl.read_parquet(folder / "samples.parquet")
    scenes = [draw_sample(i, SEED) for i in range(3)]
    assert samples["question"].to_list() == [scene.question for scene in scenes]
