"""What selectors that draw while they learn asked of the answering model, and how well learned rewards predict it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.evaluation import bank_rows, draw
from knobwise.agents.selector.reward_model import Answered, RewardModel, recorded_answers
from knobwise.agents.selector.selector import StoredEmbeddings
from knobwise.agents.training.seeding import seeded
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.settings.beams import SelectorData, hide
from knobwise.experiments.settings.selector_options import SelectorRun

BINS = 10
DRAWS = 4
"""Sequences drawn for each held-out query."""


def learned_rewards(config: SelectorRun, data: SelectorData, folder: Path) -> dict[str, Any]:
    """Of every variant that draws while it learns its `true_calls`, by seed, and the recorded answers that its reward
    was learned from; of every learned reward its `calibration` on sequences for held-out queries: those that RCE and
    the variant itself draw, or without a scorer the recorded ones. {} without such variants."""
    rows: list[dict[str, Any]] = []
    bins: list[dict[str, Any]] = []
    for name in config.variants:
        plan, folders = config.plan(name), [folder / "checkpoints" / f"seed{seed}" for seed in config.seeds]
        if not plan.variant.live and plan.reward_model is None:
            continue
        states = [load_checkpoint(seed / name / "last.pt").extra["training"] for seed in folders]
        calls, recorded = [state["calls"] for state in states], 0
        if plan.reward_model is not None:
            models = [RewardModel.restored(plan.reward_model, state["reward_model"]) for state in states]
            recorded = len(states[0]["reward_model"]["answered"][2]) - calls[0]
            test = hide(data.test, plan.variant.hidden)
            base = "hidden_rce" if plan.variant.hidden else "rce"
            for source in ("recorded",) if data.test_scorer is None else (base, name):
                expected, right = [], []
                for model, seed in zip(models, folders, strict=True):
                    if data.test_scorer is None:
                        answered = recorded_answers(test, data.test_rows, plan.reward_model.recorded)
                    else:
                        answered = _drawn(seed / source / "best.pt", test, data, config.shots)
                    expected.append(model.probabilities(test, answered.rows, answered.shown).mean(0))
                    right.append(answered.right)
                named = {"policy": name, "drawn_by": source}
                bins += [named | each for each in calibration(torch.cat(expected), torch.cat(right))]
        rows.append({"policy": name, "calls": calls, "recorded": recorded})
    return ({"true_calls": rows} if rows else {}) | ({"calibration": bins} if bins else {})


def calibration(expected: Tensor, right: Tensor) -> list[dict[str, Any]]:
    """n sequences in ten bins of equally many and of rising probability: how many `sequences`, and the means of
    `expected` and `right`, both float [n]."""
    order = expected.argsort(stable=True).tensor_split(BINS)
    return [
        {"sequences": len(some), "expected": float(expected[some].mean()), "right": float(right[some].mean())}
        for some in order
        if len(some)
    ]


def _drawn(checkpoint: Path, test: BeamTable, data: SelectorData, shots: int) -> Answered:
    """Draws of a selector for the held-out queries, answered."""
    assert data.test_scorer is not None
    embeddings, rows = StoredEmbeddings(test.queries, test.candidates), data.test_rows
    with seeded(0, "cpu"):
        places = draw(load_checkpoint(checkpoint).selector, embeddings, test, rows, shots, DRAWS)
    rows, shown = rows.repeat_interleave(DRAWS), bank_rows(test, places, rows).flatten(0, 1)
    return Answered(rows, shown, data.test_scorer(rows, shown)["vqa_correct"].float().cpu())
