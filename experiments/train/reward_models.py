"""Facts about selectors that draw while they learn: how often they asked the answering model, and
how well learned rewards predict its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.calibration import calibration_curve
from torch import Tensor

from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.evaluation import draw
from knobwise.agents.selector.reward_model import RewardModel
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.seeding import seeded
from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.experiments.evidence.schema import CalibrationBin, RunResults, TrueCalls
from knobwise.experiments.settings.beams import SelectorData, hide
from knobwise.experiments.settings.selector_options import Plan, SelectorRun
from knobwise.experiments.train.run import seed_folder

BINS = 10
"""Number of bins of the calibration, of equally many sequences."""
DRAWS = 4
"""Number of sequences that a policy draws for each held-out query, for the calibration."""


def learned_rewards(config: SelectorRun, data: SelectorData, folder: Path) -> RunResults:
    """Return facts about every variant that draws while it learns, {} without such variants.

    `true_calls` has the calls of the answering model, by seed, and the number of recorded answers
    that the reward was learned from. `calibration` compares every learned reward with the scorer,
    where there is one, on sequences that RCE and the variant itself draw for held-out queries.
    """
    true_calls: list[TrueCalls] = []
    bins: list[CalibrationBin] = []
    for name, plan in config.plans.items():
        if not plan.variant.live and plan.reward_model is None:
            continue
        # the last checkpoint of a training has the number of its calls
        seeds = [seed_folder(folder, seed) for seed in config.seeds]
        lasts = [load_checkpoint(seed / name / "last.pt").extra["training"] for seed in seeds]
        states = [training["stages"][-1] for training in lasts]
        calls = [state["calls"] for state in states]
        row: TrueCalls = {"policy": name, "calls": calls, "recorded": 0}
        true_calls.append(row)
        if plan.reward_model is None:
            continue
        models = [state["reward_model"] for state in states]
        row["recorded"] = len(models[0]["answered"][0]) - calls[0]
        if data.test_scorer is None:
            continue
        # the policy draws as it was before GRPO, then as it is after GRPO
        for drawn_by in ("hidden_rce" if plan.variant.hidden else "rce", name):
            checkpoints = [seed / drawn_by / "best.pt" for seed in seeds]
            expected, right = _predicted(config.shots, data, plan, checkpoints, models)
            shares, means = calibration_curve(right, expected, n_bins=BINS, strategy="quantile")
            for share, mean in zip(shares.tolist(), means.tolist(), strict=True):
                bins.append(
                    {"policy": name, "drawn_by": drawn_by, "expected": mean, "right": share}
                )
    facts: RunResults = {}
    if true_calls:
        facts["true_calls"] = true_calls
    if bins:
        facts["calibration"] = bins
    return facts


def _predicted(
    shots: int,
    data: SelectorData,
    plan: Plan,
    checkpoints: Sequence[Path],
    models: Sequence[dict[str, Any]],
) -> tuple[Tensor, Tensor]:
    """Let policies draw for the held-out queries, and predict the answers by a learned reward.

    Args:
        shots: T, the demonstrations in a sequence.
        plan: the variant that has the learned reward.
        checkpoints: of the drawing policy, one for each seed.
        models: the state of the variant's learned reward, one for each seed.

    Returns:
        For each sequence the probability of a right answer that the reward expects, and 1 where
        the answer was right; float [n] each.
    """
    assert plan.reward_model is not None
    assert data.test_scorer is not None
    test = hide(data.test, plan.variant.hidden)
    queries = data.test_rows.repeat_interleave(DRAWS)
    # one tensor for each seed
    expected = []
    right = []
    for checkpoint, state in zip(checkpoints, models, strict=True):
        selector = load_checkpoint(checkpoint).selector
        model = RewardModel(plan.reward_model, selector.mean, selector.scale)
        model.load_state_dict(state)
        actor = SelectorActor(selector, test, shots)
        with seeded(0, "cpu"):
            drawn = draw(actor, data.test_rows, DRAWS)
        # int64 [n · DRAWS, shots], rows of the bank
        sequences = bank_rows(test.pool[data.test_rows], drawn).flatten(0, 1)
        expected.append(model.probabilities(test, queries, sequences).mean(0))
        right.append(data.test_scorer(queries, sequences)["vqa_correct"].float().cpu())
    return torch.cat(expected), torch.cat(right)
