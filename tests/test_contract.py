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


# -- K4: features reduced before the first layer -----------------------------------------------------------------------


# -- K5: the shaped reward ---------------------------------------------------------------------------------------------


# -- K6: relative budgets, and budgets drawn from a range --------------------------------------------------------------


# -- K7: groups of draws, z-scores, the clip, the KL -------------------------------------------------------------------


# -- K8: a KL coefficient that follows the KL --------------------------------------------------------------------------


# -- K9: balanced sampling, k-fold splits ------------------------------------------------------------------------------


# -- K10: the original's training settings -----------------------------------------------------------------------------


# -- K11: the logged names ---------------------------------------------------------------------------------------------


# -- K12: a decision as a dict of the three knobs ----------------------------------------------------------------------


# -- K13: ONNX and INT8 ------------------------------------------------------------------------------------------------


# -- K14: cached features and decisions, the first stage in the background ---------------------------------------------


# -- K15: the knobs of a running model ---------------------------------------------------------------------------------


# -- K16: several data sets --------------------------------------------------------------------------------------------


# -- K17: PPO with a value network -------------------------------------------------------------------------------------


def test_k17_ppo_learns_a_value_network_on_as_many_draws_as_grpo() -> None:
    import json

    import polars as pl
    from commands import OPTIMISER, SIMULATED

    from knobwise.__main__ import main
    from knobwise.experiments.command_line.sweep import jobs_of

    words = ["experiment=ppo", *SIMULATED, *OPTIMISER, "seeds=[0]", "baselines=false", "name=run"]
    assert main(["train", *words, "optimiser.warmup_iterations=0"]) == 0
    values = pl.read_csv("runs/ppo/run/metrics.csv")["Train/Value_Loss"].drop_nulls()
    assert len(values) == 2
    assert values[1] < values[0]
    assert json.loads(Path("runs/ppo/run/results.json").read_text())["training"]["method"] == "PPO"
    jobs = jobs_of("train", ["experiment=ppo"])  # what -m runs
    assert [[word for word in job if word.startswith("loss")] for job in jobs] == [["loss=sampled"], ["loss=ppo"]]


# -- K18: updates, other hardware, explanations ------------------------------------------------------------------------


# -- S1: beams in every format -----------------------------------------------------------------------------------------


# -- S2: pools, the generation of beams --------------------------------------------------------------------------------


# -- S3: the selectors v0, v1, v2 and v3 -------------------------------------------------------------------------------


# -- S4: CLIP with LoRA ------------------------------------------------------------------------------------------------


# -- S5: supervised fine-tuning, RCE, GRPO -----------------------------------------------------------------------------


# -- S6: a start from a checkpoint -------------------------------------------------------------------------------------


def test_s6_a_checkpoint_takes_the_place_of_the_sft_policy() -> None:
    import torch
    from commands import REPLAY
    from helpers import small_beams

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.selector.selector import Selector
    from knobwise.agents.selector.settings import SelectorConfig

    table, _ = small_beams(60)
    table.save("b.safetensors")
    start = Selector.fitted(SelectorConfig(width=16, heads=2), table.queries, table.candidates)
    save_checkpoint("sft.pt", start, table, {"fitted": []})
    words = [*REPLAY, "grpo.epochs=1", "variants.shuffled_recorded=null", "judged_shots=[2]"]
    assert main([*words, "sft.epochs=0", "init_from=sft.pt", "name=run"]) == 0
    last = load_checkpoint("runs/selector_replay/run/checkpoints/seed0/grpo_recorded/last.pt")
    reference = last.extra["training"]["reference"]  # what the KL is taken to
    for name, values in start.state_dict().items():
        assert torch.equal(values, reference[f"selector.{name}"])


# -- S7: the curriculum, the temperature by KL, conditional GRPO, rank advantages --------------------------------------


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


# -- S10: the planned experiments --------------------------------------------------------------------------------------


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
