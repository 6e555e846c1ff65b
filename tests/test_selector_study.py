"""The page about choosing demonstrations: tables and sentences follow from the results of the experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_beams

from knobwise.experiments.selector_results import selector_results
from knobwise.experiments.selector_study import SECTIONS, main, page_of, question_of


def results(experiment: str, accuracies: dict[str, float], variants: list[str]) -> dict[str, Any]:
    """Of made-up answers: of 400 queries the first so many are right, for each of two seeds."""
    table, _ = small_beams(20)
    right = {
        name: {2: (torch.arange(400) < 400 * share).float().expand(2, -1), 4: torch.ones(2, 400)}
        for name, share in accuracies.items()
    }
    found = selector_results(right, table, seeds=[0, 1], trained_shots=2)
    return found | {"experiment": experiment, "variants": variants}


def test_the_page_by_hand() -> None:
    main_run = results("selector", {"sft": 0.6, "rce": 0.6, "grpo_live": 0.9, "part_similarity": 0.3}, ["grpo_live"])
    rewards = results("selector_rewards", {"sft": 0.6, "rce": 0.6, "a": 0.8, "b": 0.7, "c": 0.8}, ["a", "b", "c"])
    page = page_of({"selector": main_run, "selector_rewards": rewards})
    assert f"## {SECTIONS['selector']}" in page
    assert question_of("selector_rewards") in page
    lines = page.splitlines()
    ranks = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and "0." in line]
    assert ranks[0] == "GRPO on live draws"
    assert any(line.startswith("| b | 0.700 [") for line in lines)
    assert any(line.startswith("- GRPO on live draws − RCE: +30.0 points [") for line in lines)
    assert any(line.startswith("- b − a: -10.0 points [") and not line.endswith("shown") for line in lines)
    assert "- c − a: +0.0 points [+0.0, +0.0], no difference shown" in lines
    assert "- RCE − SFT: +0.0 points [+0.0, +0.0], no difference shown" in lines


@pytest.mark.parametrize("name", SECTIONS)
def test_every_experiment_of_the_page_asks_something(name: str) -> None:
    assert "?" in question_of(name)
    assert not question_of(name).startswith("#")


def test_finished_experiments_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "selector" / "study"
    folder.mkdir(parents=True)
    found = results("selector", {"sft": 0.6, "rce": 0.6, "grpo_live": 0.9}, ["grpo_live"])
    (folder / "results.json").write_text(json.dumps(found))
    out = tmp_path / "page.md"
    assert main(["experiments=[selector]", f"runs={tmp_path / 'runs'}", f"out={out}"]) == 0
    assert out.read_text() == page_of({"selector": found})
    assert main(["experiments=[other]", f"runs={tmp_path}", f"out={tmp_path / 'no.md'}"]) == 2
    assert main(["sections=1"]) == 2
    assert "sections" in capsys.readouterr().err
    assert not (tmp_path / "no.md").exists()
