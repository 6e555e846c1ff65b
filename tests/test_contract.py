"""What was asked for by name, one short test a row: it works by the words that launch it, and it stays.

Rows C are the project as a whole, K the controller, S the selector. CONTRIBUTING.md says why no test here is removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- C1: the folders and the packages ----------------------------------------------------------------------------------


# -- C2: a gymnasium-style bandit that is stepped by hand --------------------------------------------------------------


# -- C3: three categorical actions under three keys --------------------------------------------------------------------


# -- C4: what GRPO trains is what is deployed --------------------------------------------------------------------------


# -- C5: experiment files, and runs compared in Weights & Biases -------------------------------------------------------


# -- C6: a sweep file for `wandb agent` --------------------------------------------------------------------------------


# -- K1: exp5 and exp6, core_exp, long tables --------------------------------------------------------------------------


# -- K2: accuracy in per cent, features in .pt files, controller_training_data.json ------------------------------------


# -- K3: image and language features, a budget encoding, three heads ---------------------------------------------------
def test_k3_the_budget_is_read_as_one_number_or_by_32_sines_and_cosines() -> None:
    import numpy as np
    import torch
    from commands import OPTIMISER, TABLE, write_table
    from helpers import small_table

    from knobwise.__main__ import main
    from knobwise.agents.controller.controller import Controller
    from knobwise.experiments.command_line.compose import read_settings

    write_table()
    words = ["train", *TABLE, *OPTIMISER, "policy=independent", "seeds=[0]", "baselines=false", "own_cost=false"]
    wide = ["policy.budget_encoding=sinusoidal", "policy.budget_width=32"]
    assert main([*words, *wide, "name=wide"]) == 0
    arrays = np.load("runs/controller/wide/controller.npz")
    assert arrays["network.layers.0.weight"].shape == (1, 8 + 32, 16)  # beside 8 features
    assert arrays["network.head.logits.weight"].shape == (1, 16, 3 + 2 + 2)  # three knobs
    linear = read_settings("train", ["policy=independent", "policy.budget_encoding=linear"]).policy
    table = small_table()
    network = Controller.for_table(table, torch.arange(60), linear).network
    assert network.layers[0].weight.shape == (1, 8 + 1, 256)


# -- K4: features reduced before the first layer -----------------------------------------------------------------------
def test_k4_features_are_projected_before_the_first_layer() -> None:
    import torch
    from commands import OPTIMISER, TABLE, write_table

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import load_checkpoint

    write_table()
    words = ["train", *TABLE, *OPTIMISER, "policy=utility", "seeds=[0]", "baselines=false", "own_cost=false"]
    assert main([*words, "policy.project=3", "name=run"]) == 0
    best = load_checkpoint("runs/controller/run/checkpoints/best.pt")
    assert best.network.normaliser.projection.shape == (8, 3)
    features = {name: torch.randn(5, size) for name, size in best.network.normaliser.sizes.items()}
    assert best.network.features(features, 5).shape == (5, 3)
    # the exported file reads all features too, and decides the same
    assert main(["export", "checkpoint=runs/controller/run", "out=exported"]) == 0


# -- K5: the shaped reward ---------------------------------------------------------------------------------------------


# -- K6: relative budgets, and budgets drawn from a range --------------------------------------------------------------
def test_k6_budgets_are_relative_or_uniform() -> None:
    import torch
    from helpers import small_table

    from knobwise.envs.configurations.budgets import BudgetSampler
    from knobwise.experiments.command_line.compose import read_settings

    table, rows = small_table(), torch.zeros(4000, dtype=torch.int64)
    relative = BudgetSampler(table, read_settings("train", ["budget=relative"]).budget)(rows)
    factors = relative.unsqueeze(1) / table.latency_ms[0]
    for factor in (0.8, 1.0, 1.2):
        assert (factors - factor).abs().amin(1).less(1e-4).any()
    uniform = BudgetSampler(table, read_settings("train", ["budget=uniform"]).budget)(rows)
    low, high = table.latency_ms.quantile(torch.tensor([0.03, 0.97])).tolist()
    assert low <= uniform.min() < uniform.max() <= high + 1e-4
    assert uniform.mean() == pytest.approx((low + high) / 2, rel=0.03)


# -- K7: groups of draws, z-scores, the clip, the KL -------------------------------------------------------------------


# -- K8: a KL coefficient that follows the KL --------------------------------------------------------------------------


# -- K9: balanced sampling, k-fold splits ------------------------------------------------------------------------------
def test_k9_small_data_sets_are_drawn_as_often_as_large_ones() -> None:
    from dataclasses import replace

    import torch
    from helpers import small_table

    from knobwise.agents.training.controller_trainer import ControllerTrainer
    from knobwise.experiments.command_line.compose import read_settings

    table = replace(small_table(60), datasets=("large",) * 50 + ("small",) * 10)
    settings = read_settings("train", ["balance.by=dataset"])
    trainer = ControllerTrainer(table, table.split(), balance=settings.balance)
    rows, _ = trainer.env.contexts(4000)
    assert (rows >= 50).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert torch.isin(rows, table.split().train).all()


def test_k9_five_folds_judge_every_sample_once() -> None:
    import json

    from commands import OPTIMISER, TABLE, write_table

    from knobwise.__main__ import main
    from knobwise.experiments.results.decisions import read_decisions

    write_table()
    words = ["train", *TABLE, *OPTIMISER, "policy=independent", "seeds=[0]", "baselines=false", "own_cost=false"]
    words += ["optimiser.iterations=2", "tracking.tensorboard=false"]
    assert main([*words, "split.folds=5", "name=run"]) == 0
    results = json.loads(Path("runs/controller/run/results.json").read_text())
    decisions = read_decisions("runs/controller/run")
    judged = decisions.filter(policy="oracle").select("split", "sample_id").unique()
    assert (results["test_samples"], len(judged), judged["sample_id"].n_unique()) == (60, 60, 60)
    assert judged["split"].unique().sort().to_list() == [0, 1, 2, 3, 4]


# -- K10: the original's training settings -----------------------------------------------------------------------------


# -- K11: the logged names ---------------------------------------------------------------------------------------------


# -- K12: a decision as a dict of the three knobs ----------------------------------------------------------------------


# -- K13: ONNX and INT8 ------------------------------------------------------------------------------------------------


# -- K14: cached features and decisions, the first stage in the background ---------------------------------------------


# -- K15: the knobs of a running model ---------------------------------------------------------------------------------


# -- K16: several data sets --------------------------------------------------------------------------------------------
def test_k16_the_data_set_is_an_input_and_an_unknown_one_is_zeros() -> None:
    import torch
    from commands import OPTIMISER, write_table

    import knobwise
    from knobwise.__main__ import main
    from knobwise.agents.serving.numpy_controller import NumpyController

    for number, name in enumerate("abc"):
        write_table(40, seed=number, prefix=name)
    words = ["profile=joint", "profile.paths=[at.parquet,bt.parquet,ct.parquet]"]
    words += ["profile.features=[af.npz,bf.npz,cf.npz]"]
    train = ["train", *words, *OPTIMISER, "policy=independent", "seeds=[0]", "baselines=false", "own_cost=false"]
    assert main([*train, "policy.dataset_input=true", "split.leave_out=bt", "name=run"]) == 0
    policy = knobwise.load("runs/controller/run")
    assert (policy.features["dataset"], policy.datasets) == (3, ["at", "bt", "ct"])
    blocks = {"image_features": torch.randn(1, 4), "language_features": torch.randn(1, 4)}
    a, b, unknown = (
        policy.agent.features(blocks | {"dataset": torch.tensor([column])}, 1)
        for column in ([1.0, 0, 0], [0, 1.0, 0], [0, 0, 0])
    )
    assert torch.equal(b, unknown)  # nothing was fitted on it
    assert not torch.equal(a, unknown)
    assert main(["evaluate", "checkpoint=runs/controller/run", "baselines=false", "own_cost=false"]) == 0
    assert NumpyController.load("runs/controller/run/controller.npz").datasets == ["at", "bt", "ct"]


# -- K17: PPO with a value network -------------------------------------------------------------------------------------


# -- K18: updates, other hardware, explanations ------------------------------------------------------------------------


# -- S1: beams in every format -----------------------------------------------------------------------------------------


# -- S2: pools, the generation of beams --------------------------------------------------------------------------------


# -- S3: the selectors v0, v1, v2 and v3 -------------------------------------------------------------------------------


# -- S4: CLIP with LoRA ------------------------------------------------------------------------------------------------


# -- S5: supervised fine-tuning, RCE, GRPO -----------------------------------------------------------------------------


# -- S6: a start from a checkpoint -------------------------------------------------------------------------------------


# -- S7: the curriculum, the temperature by KL, conditional GRPO, rank advantages --------------------------------------


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


# -- S10: the planned experiments --------------------------------------------------------------------------------------


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
