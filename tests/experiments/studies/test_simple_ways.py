"""The study of simple ways: intervals over samples, seeds and splits, and p for all tables."""

import re

import numpy as np
import polars as pl
import pytest

from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.studies import simple_ways as study

SAMPLES = 40
"""Of each split; other splits test others."""


@pytest.fixture
def run(tmp_path):
    """Write a run whose controller gains over ridge what is given for each split and sample."""

    def write(name, gains):
        gains = np.asarray(gains)
        frames = []
        for split, gain in enumerate(gains):
            for policy, utility in (
                ("budget_aware_static", 0.3),
                ("ridge", 0.4),
                ("controller", 0.4 + gain),
                ("oracle", 0.8),
            ):
                frame = pl.DataFrame({"utility": np.broadcast_to(utility, SAMPLES)})
                seed = 0 if policy == "controller" else None
                ids = [f"{split}-{i}" for i in range(SAMPLES)]
                about = {"policy": policy, "seed": seed, "split": split, "accuracy": 1.0}
                frame = frame.with_columns(sample=pl.Series(ids))
                frame = frame.with_columns(**{key: pl.lit(value) for key, value in about.items()})
                # two budgets
                frames += [frame.with_columns(condition=pl.lit(budget)) for budget in (1.0, 2.0)]
        folder = tmp_path / name
        folder.mkdir()
        write_decisions(folder, pl.concat(frames, how="vertical_relaxed"))
        return folder

    return write


def test_splits_are_drawn_too(run):
    gains = [np.full(SAMPLES, gain) for gain in (-0.1, 0.1, 0.3)]
    judged = study.UtilitiesOfRun.of_run(run("three", gains))
    assert judged.shares() == pytest.approx({"controller": 0.4, "ridge": 0.2})
    points, _ = judged.compared("controller", "ridge")
    # one draw of splits in 27 holds the first alone, one the last
    assert points == pytest.approx([10.0, -10.0, 30.0])


def test_p_is_corrected_for_the_number_of_tables(run, capsys):
    # of four samples that differ the signs give p = 1/8
    gain = np.zeros((1, SAMPLES))
    gain[0, :4] = 0.2
    study.main([run("one", gain), run("other", gain)])
    printed = capsys.readouterr().out
    chances = [float(word) for word in re.findall(r"(?:one|other) (0\.\d\d)\b", printed)]
    assert chances == pytest.approx([0.25, 0.25], abs=0.02)
    assert "| one | 50.0 | 24 | – |" in printed
