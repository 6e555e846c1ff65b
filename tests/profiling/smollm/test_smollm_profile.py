"""The profile of SmolLM2 with demonstrations that comes with knobwise."""

import json
from pathlib import Path

from knobwise.envs.readers.builtin import smollm_profile

FOLDER = Path(__file__).resolve().parents[3] / "envs" / "data" / "smollm"


def test_it_is_what_its_description_says():
    table = smollm_profile()
    facts = json.loads((FOLDER / "profile.json").read_text())
    assert (table.num_samples, table.num_configurations) == (facts["samples"], 24)
    assert facts["samples"] >= 1000
    assert table.mask.all()
    # more demonstrations take longer, and well chosen ones are better than random ones
    mean = {}
    for row in range(24):
        configuration = table.configuration(row)
        outcome = table.accuracy[:, row].mean(), table.latency_ms[:, row].mean()
        mean[configuration["shots"], configuration["order"]] = outcome
    for order in ("random", "nearest", "mmr", "learned"):
        latencies = [float(mean[shots, order][1]) for shots in (1, 2, 3, 4, 6, 8)]
        assert latencies == sorted(latencies)
    for shots in (2, 4, 8):
        assert mean[shots, "nearest"][0] > mean[shots, "random"][0] + 0.05
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4e6
