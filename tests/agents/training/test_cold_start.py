"""GRPO alone, from a cold start (`policy=grpo`)."""

from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TABLE, launch, read_json, words_of, write_table
from helpers import Lines, arrays, equal_states, small_table

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.training.controllers import controller_trainer
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.experiments.settings.choices import COLD_OPTIMISER, GRPO
from knobwise.losses.settings import LossConfig

SHORT = replace(COLD_OPTIMISER, iterations=12, contexts=16, minibatch=16, evaluate_every=5)
ALONE = replace(GRPO, hidden=8, fold_networks=2)


def trainer(table=None, **settings):
    table = table or small_table(60)
    settings = {"policy": ALONE, "optimiser": SHORT, "loss": LossConfig()} | settings
    return controller_trainer(table, table.split(), **settings)


def test_it_learns_what_static_cannot_know():
    table = small_table(300)
    settings = {"policy": replace(ALONE, hidden=32), "optimiser": replace(SHORT, iterations=250)}
    settings["optimiser"] = replace(settings["optimiser"], contexts=128, minibatch=128)
    student = trainer(table, **settings)
    student.run()
    budgets_ms, test = student.setup.limits, table.split().test
    static = fit_static(table, student.setup.fitted)
    deployed = calibrate_controller(student.setup, budgets_ms)
    mine, fixed = (
        evaluate_policy(policy, table, test, budgets_ms).utility.mean()
        for policy in (deployed, static)
    )
    assert mine > fixed + 0.03


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_last_weights_are_kept_or_the_best(keep):
    student = trainer(optimiser=replace(SHORT, keep=keep))
    student.run()
    scores = dict(student.state.scores)
    best = max(scores, key=scores.get)
    assert student.state.best.iteration == (12 if keep == "last" else best)
    assert student.state.best.score == pytest.approx(scores[student.state.best.iteration])


def test_half_of_its_budgets_are_spread_over_the_judged_ones():
    student = trainer()
    drawn = student.setup.env.contexts.budgets.config
    assert drawn.strategy == "spread"
    assert drawn.values_ms == tuple(student.setup.limits.tolist())
    warm = trainer(optimiser=replace(SHORT, pretrain_iterations=2))
    assert warm.setup.env.contexts.budgets.config.strategy is None
    named = trainer(budget=BudgetConfig(strategy="uniform"))
    assert named.setup.env.contexts.budgets.config.strategy == "uniform"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the command line on a small table."""
    with chdir(tmp_path_factory.mktemp("alone")):
        write_table(60)
        small = "policy.hidden=8 optimiser.iterations=12 optimiser.contexts=16"
        small += " optimiser.minibatch=16 seeds=[0,1] baselines=false own_cost=false name=alone"
        launch(words_of("train experiment=grpo_alone", TABLE, small, "tracking.tensorboard=false"))
        yield Path("runs/grpo_alone/alone").absolute()


def test_a_run_is_judged_deployed_and_exported_like_any_other(run, tmp_path):
    results = read_json(run / "results.json")
    policies = {row["policy"] for row in results["rows"]}
    assert {"controller", "budget_aware_static", "oracle"} <= policies
    assert not policies & {"before_grpo", "teacher"}
    assert results["training"]["warmup_iterations"] == 0
    assert len(results["guard"][0]) == 5
    # what is exported decides as the checkpoint does
    agent = knobwise.load(run)
    table = small_table(60)
    limits = np.full(60, results["budgets_ms"][2])
    exported = NumpyController.load(run / "controller.npz")
    np.testing.assert_array_equal(
        exported.choose(arrays(table), limits), agent.agent.choose(arrays(table), limits)
    )


def test_a_second_training_may_start_from_it_and_is_not_cold(run):
    table = small_table(60)
    student = trainer(
        table,
        init_from=run / "checkpoints/best.pt",
        policy=replace(GRPO, hidden=8),
        fold_seed=0,
    )
    start = knobwise.load(run).agent.controller
    assert equal_states(start, student.setup.controller)
    grpo = student.stages[-1]
    assert not grpo.dropout
    assert torch.equal(grpo.grpo.entropy_coeff, torch.zeros(()))


@pytest.mark.parametrize("objective", ["sampled", "exact", "knobwise.losses:GRPOLoss"])
def test_what_drops_out_is_no_distance_from_the_reference(objective):
    loss = LossConfig(
        objective=objective, dropout=True, kl_to_ref_coeff=0.1, kl_band=(0.0, 0.02), group_size=8
    )
    optimiser = replace(SHORT, iterations=3, evaluate_every=1, lr=0.0)
    policy = replace(ALONE, hidden=32, dropout=0.5)
    lines = Lines()
    student = trainer(loss=loss, optimiser=optimiser, policy=policy, log=lines)
    # heads that are all alike drop out without a trace
    for parameter in student.setup.controller.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    student.run()
    kl = lines.values("Train/KL")
    assert len(kl) == 3
    assert max(map(abs, kl)) < 1e-5
    # a KL of 0 raises no β
    assert max(lines.values("Train/Beta")) == pytest.approx(0.1)
    if ":" not in objective:
        assert max(lines.values("Train/Clip_Fraction")) == 0
        assert min(lines.values("Train/ESS")) == pytest.approx(1.0)
    # the loss itself drops out
    assert max(map(abs, lines.values("Train/KL_Loss"))) > 1e-3
