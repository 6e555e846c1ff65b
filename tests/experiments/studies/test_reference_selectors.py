"""The part of the page about choosing demonstrations follows from the results of the experiments alone."""

from __future__ import annotations

from typing import Any

import torch
from helpers import small_beams

from knobwise.experiments.command_line.settings import question_of
from knobwise.experiments.results.selector_results import selector_results
from knobwise.experiments.studies.reference_page import Found, page_of
from knobwise.experiments.studies.reference_selectors import SELECTORS, selector_sections


def results(experiment: str, accuracies: dict[str, float], variants: list[str]) -> dict[str, Any]:
    """Of made-up answers: of 400 queries the first so many are right, for each of two seeds."""
    table, _ = small_beams(20)
    right = {
        name: {2: (torch.arange(400) < 400 * share).float().expand(2, -1), 4: torch.ones(2, 400)}
        for name, share in accuracies.items()
    }
    found = selector_results(right, table, seeds=[0, 1], trained_shots=2)
    return found | {"experiment": experiment, "variants": variants}


def test_the_sections_by_hand() -> None:
    main_run = results("selector", {"sft": 0.6, "rce": 0.6, "grpo_live": 0.9, "part_similarity": 0.3}, ["grpo_live"])
    rewards = results("selector_rewards", {"sft": 0.6, "rce": 0.6, "a": 0.8, "b": 0.7, "c": 0.8}, ["a", "b", "c"])
    found = [Found(one["experiment"], "beams", "", True, one, None) for one in (main_run, rewards)]
    lines = page_of(found, [0, 1]).splitlines()
    assert f"### {SELECTORS['selector']}" in lines
    assert any(question_of("selector_rewards") in line for line in lines)
    ranks = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and " | 0." in line]
    assert ranks[0] == "GRPO on live draws"
    assert any(line.startswith("| b | 0.700 [") for line in lines)
    assert any(line.startswith("- GRPO on live draws is better than RCE: +30.0 [") for line in lines)
    assert any(line.startswith("- B is worse than a: -10.0 [") for line in lines)
    assert "- C is not shown to differ from a: +0.0 [0.0, 0.0] points." in lines
    assert "- RCE is not shown to differ from SFT: +0.0 [0.0, 0.0] points." in lines
    (answer,) = (line for line in lines if line.startswith(f"| [{SELECTORS['selector_rewards']}]"))
    assert "| b -10.0 [" in answer
    assert answer.endswith(", no difference shown for c (against a) |")


def test_another_network_is_held_against_the_default_one_trained_alike() -> None:
    base = results("selector_groups", {"sft": 0.6, "rce": 0.6, "first": 0.8, "b": 0.7}, ["first", "b"])
    other = results("selector_v0", {"sft": 0.6, "rce": 0.6, "grpo_recorded": 0.5}, ["grpo_recorded"])
    alone, *_ = selector_sections({"selector_v0": other})
    assert "default network" not in "".join(alone.lines)
    shown = next(one for one in selector_sections({"selector_groups": base, "selector_v0": other}) if "v0" in one.title)
    said = next(
        line for line in "\n".join(shown.lines).splitlines() if "GRPO on recorded groups is worse than the" in line
    )
    assert "-30.0 [" in said
    assert "not paired" in said
    low, high = (float(end) for end in said.split("[")[1].split("]")[0].split(", "))
    # of independent shares of 400 (twice): ± 1.96 √(.8·.2/400 + .5·.5/400) = 6.3 points
    assert abs(low + 36.3) < 0.8
    assert abs(high + 23.7) < 0.8
    assert shown.answer.startswith("GRPO on recorded groups -30.0 [")
    assert "no difference shown for SFT" in shown.answer
