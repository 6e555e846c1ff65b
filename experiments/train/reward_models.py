"""What selectors that draw while they learn asked of the answering model, and how well learned
rewards predict it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.evaluation import draw
from knobwise.agents.selector.reward_model import RewardModel
from knobwise.agents.selector.selector import StoredEmbeddings
from knobwise.agents.training.seeding import seeded
from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.experiments.settings.beams import SelectorData, hide
from knobwise.experiments.settings.selector_options import SelectorRun

BINS = 10
DRAWS = 4
"""Of the calibration: its bins, and the sequences that a policy draws for each held-out query."""


def learned_rewards(config: SelectorRun, data: SelectorData, folder: Path) -> dict[str, Any]:
    """`true_calls` of every variant that draws while it learns, by seed, with the recorded answers
    that its reward was learned from; `calibration` of every learned reward on what RCE and the
    variant itself draw for held-out queries, where a scorer can answer that. {} without such
    variants."""
    rows = list[dict[str, Any]]()
    bins = list[dict[str, Any]]()
    for name in config.variants:
        variant, _, _, _, learned = config.plan(name)
        if not variant.live and learned is None:
            continue
        seeds = [folder / "checkpoints" / f"seed{seed}" for seed in config.seeds]
        states = [load_checkpoint(seed / name / "last.pt").extra["training"] for seed in seeds]
        calls = [state["calls"] for state in states]
        if learned is None:
            recorded = 0
        else:
            recorded = len(states[0]["reward_model"]["answered"][0]) - calls[0]
        rows.append({"policy": name, "calls": calls, "recorded": recorded})
        if learned is None or data.test_scorer is None:
            continue
        test = hide(data.test, variant.hidden)
        queries = data.test_rows.repeat_interleave(DRAWS)
        embeddings = StoredEmbeddings(test.queries, test.candidates)
        for drawn_by in ("hidden_rce" if variant.hidden else "rce", name):
            expected = []
            right = []
            for seed, state in zip(seeds, states, strict=True):
                selector = load_checkpoint(seed / drawn_by / "best.pt").selector
                model = RewardModel(learned, selector.mean, selector.scale)
                model.load_state(state["reward_model"])
                with seeded(0, "cpu"):
                    drawn = draw(selector, embeddings, test, data.test_rows, config.shots, DRAWS)
                sequences = bank_rows(test.pool[data.test_rows], drawn).flatten(0, 1)
                expected.append(model.probabilities(test, queries, sequences).mean(0))
                right.append(data.test_scorer(queries, sequences)["vqa_correct"].float().cpu())
            named = {"policy": name, "drawn_by": drawn_by}
            bins += [named | each for each in calibration(torch.cat(expected), torch.cat(right))]
    return {key: value for key, value in (("true_calls", rows), ("calibration", bins)) if value}


def calibration(expected: Tensor, right: Tensor) -> list[dict[str, Any]]:
    """n sequences in ten bins of equally many and of rising probability: how many `sequences`, and
    the means of `expected` and `right`, both float [n]."""
    bins = [some for some in expected.argsort(stable=True).tensor_split(BINS) if len(some)]
    means = [
        {key: float(x[some].mean()) for key, x in (("expected", expected), ("right", right))}
        for some in bins
    ]
    return [{"sequences": len(some)} | each for some, each in zip(bins, means, strict=True)]
