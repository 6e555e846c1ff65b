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


def test_k8_the_weight_of_the_kl_follows_the_kl() -> None:
    import polars as pl
    from commands import OPTIMISER, SIMULATED

    from knobwise.__main__ import main

    words = [*SIMULATED, *OPTIMISER, "policy=independent", "seeds=[0]", "baselines=false", "own_cost=false"]
    assert main(["train", *words, "loss=sampled", "loss.kl_band=[0,1e-9]", "optimiser.evaluate_every=2"]) == 0
    beta = pl.read_csv("runs/latest/metrics.csv")["Train/Beta"].drop_nulls().to_list()
    # a KL above the band: from 0 to the least weight, then up by half at every iteration
    assert beta == pytest.approx([0.0, 0.0015, 0.0015 * 1.5**2, 0.0015 * 1.5**4])


# -- K9: balanced sampling, k-fold splits ------------------------------------------------------------------------------


# -- K10: the original's training settings -----------------------------------------------------------------------------


# -- K11: the logged names ---------------------------------------------------------------------------------------------


# -- K12: a decision as a dict of the three knobs ----------------------------------------------------------------------


# -- K13: ONNX and INT8 ------------------------------------------------------------------------------------------------


# -- K14: cached features and decisions, the first stage in the background ---------------------------------------------


# -- K15: the knobs of a running model ---------------------------------------------------------------------------------


# -- K16: several data sets --------------------------------------------------------------------------------------------


# -- K17: PPO with a value network -------------------------------------------------------------------------------------


# -- K18: updates, other hardware, explanations ------------------------------------------------------------------------


# -- S1: beams in every format -----------------------------------------------------------------------------------------


# -- S2: pools, the generation of beams --------------------------------------------------------------------------------


# -- S3: the selectors v0, v1, v2 and v3 -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
def test_s3_every_version_of_the_selector_is_trained_and_gives_probabilities(version: str) -> None:
    import itertools

    import torch
    from commands import BEAMS
    from helpers import small_beams

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import load_checkpoint

    table, _ = small_beams(pool=4)
    table.save("b.safetensors")
    words = [word for word in BEAMS if word != "selector.heads=2"]
    short = ["sft.epochs=1", "variants.grpo_recorded=null", "variants.shuffled_recorded=null"]
    short += [f"selector.version={version}", "judged_shots=[2]"]
    assert main(["train", "experiment=selector_replay", *words, *short]) == 0
    selector = load_checkpoint("runs/latest/checkpoints/best.pt").selector
    assert selector.config.version == version
    dist = selector.distribution(table.queries, table.candidates[table.pool], table.pool_mask, 3)
    every = torch.tensor(list(itertools.permutations(range(4), 3))).unsqueeze(1).expand(-1, 40, -1)
    torch.testing.assert_close(dist.log_prob(every).exp().sum(0), torch.ones(40))


# -- S4: CLIP with LoRA ------------------------------------------------------------------------------------------------


def test_s4_clip_learns_along_by_its_lora_weights_alone() -> None:
    import json

    import torch
    from commands import REPLAY
    from helpers import small_beams
    from tiny_models import picture, tiny_clip

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import load_checkpoint

    small_beams(32)[0].save("b.safetensors")
    picture(0, 8, 12).save("dog.png")
    rows = []
    for number in range(32):
        question = f"How many {'dogs' if number % 3 else 'cats'} ?"
        rows.append({"id": str(number), "image": "dog.png", "question": question, "answers": ["2"]})
    Path("items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny_clip("clip")
    words = ["encoder=clip", "encoder.model=clip", "encoder.data=items.jsonl", "sft.epochs=1"]
    words += ["sft.keep=last", "variants.grpo_recorded=null", "variants.shuffled_recorded=null"]
    assert main([*REPLAY, *words, "rce.epochs=0", "judged_shots=[2]"]) == 0
    encoder = load_checkpoint("runs/latest/checkpoints/seed0/sft/best.pt").selector.encoder
    second = [weight for name, weight in encoder.named_parameters() if "lora_B" in name]
    assert any(weight.abs().max() > 0 for weight in second), "they are 0 before training"
    plain = torch.load("runs/latest/checkpoints/best.pt", weights_only=True)["controller"]
    kept = [name for name in plain["state"] if name.startswith("encoder")]
    assert plain["encoder"] == "clip"
    assert kept
    assert all("lora" in name for name in kept)


# -- S5: supervised fine-tuning, RCE, GRPO -----------------------------------------------------------------------------


# -- S6: a start from a checkpoint -------------------------------------------------------------------------------------


# -- S7: the curriculum, the temperature by KL, conditional GRPO, rank advantages --------------------------------------


def test_s7_curriculum_conditional_rank_and_temperature_by_kl() -> None:
    import polars as pl
    from commands import REPLAY
    from helpers import small_beams

    from knobwise.__main__ import main

    small_beams(40)[0].save("b.safetensors")
    words = ["sft.epochs=1", "variants.shuffled_recorded=null", "variants.grpo_recorded.epochs=2", "judged_shots=[2]"]
    options = ["loss.curriculum=0.4", "loss.min_positive=0.2", "loss.temperature_band=[0,1e-9]", "loss.advantage=rank"]
    assert main([*REPLAY, *words, "name=plain"]) == 0
    assert main([*REPLAY, *words, *options, "name=all"]) == 0
    plain, changed = (pl.read_csv(f"runs/selector_replay/{name}/metrics.csv") for name in ("plain", "all"))
    temperature = changed["Train/grpo_recorded/Temperature"].drop_nulls().to_list()
    assert temperature[0] == 1
    assert temperature[-1] < 1  # the KL is above the band
    loss = "Train/grpo_recorded/Zero_Advantage_Fraction"
    assert changed[loss].drop_nulls().to_list() != plain[loss].drop_nulls().to_list()


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


def test_s8_the_epoch_of_the_lowest_kl_is_kept() -> None:
    import polars as pl
    from commands import REPLAY
    from helpers import small_beams

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import load_checkpoint

    small_beams(40)[0].save("b.safetensors")
    words = ["sft.epochs=1", "variants.shuffled_recorded=null", "variants.grpo_recorded.epochs=3", "judged_shots=[2]"]
    assert main([*REPLAY, *words, "grpo.keep=best_kl", "grpo.lr=3e-3"]) == 0
    kl = pl.read_csv("runs/latest/metrics.csv")["Val/grpo_recorded/KL"].drop_nulls().to_list()
    best = load_checkpoint("runs/latest/checkpoints/seed0/grpo_recorded/best.pt")
    assert best.extra["epoch"] == 1 + kl[1:].index(min(kl[1:]))


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # c = 1, a = .9, i = .02; one demonstration
        (["reward.mode=hard_plus_soft"], 1.9),
        (["reward.mode=hard_plus_soft", "reward.hard_weight=2", "reward.soft_weight=0.5"], 2.45),
        (["reward.mode=hybrid"], 0.825),
        (["reward.mode=multi_level"], 0.92),
        (["reward.mode=legacy"], 0.02),
        (["reward.mode=hard_plus_soft_v2"], 2.9),
        (["reward.mode=hard_plus_soft", "reward.by_shots={1:{hard_weight:3}}"], 3.9),
        (["reward.mode=hard_plus_soft", "reward.adaptive=true"], 1.9),  # nothing varies in a group of one
    ],
)
def test_s9_reward_modes_and_weights(options: list[str], wanted: float) -> None:
    import torch

    from knobwise.envs.demonstrations.reward import demonstration_reward
    from knobwise.experiments.command_line.compose import read_settings

    settings = read_settings("train_selector", options)
    fields = {"vqa_correct": 1.0, "vqa_acc_score": 0.9, "beam_score": 0.02, "coherence": 0.0, "diversity": 0.0}
    recorded = {name: torch.tensor([value]) for name, value in fields.items()}
    reward = demonstration_reward(recorded, torch.tensor([1]), torch.tensor([True]), settings.reward)
    assert reward.item() == pytest.approx(wanted)


# -- S10: the planned experiments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "planned"),
    [
        ("selector_rewards", ["legacy", "hard_plus_soft", "hard_plus_soft_v2", "hybrid"]),
        ("selector_advantages", ["rank", "zscore", "centred"]),
        ("selector_weights", [(1, 1), (2, 1), (1, 0.5), (2, 0.5)]),
    ],
)
def test_s10_the_planned_experiments(experiment: str, planned: list[object]) -> None:
    from commands import BEAMS
    from helpers import small_beams

    from knobwise.__main__ import main
    from knobwise.experiments.command_line.compose import read_settings

    small_beams(40)[0].save("b.safetensors")
    settings = read_settings("train_selector", [f"experiment={experiment}"])
    plans = {name: settings.plan(name) for name in settings.variants}
    if experiment == "selector_rewards":
        tried: list[object] = [plan.reward.mode for name, plan in plans.items() if name == plan.reward.mode]
        tried.append("hard_plus_soft_v2")  # the first, by default
    elif experiment == "selector_advantages":
        tried = [plan.loss.advantage for plan in plans.values()]
    else:
        signals = [plan.reward.signals() for plan in plans.values()]
        tried = [(weights["vqa_correct"], weights["vqa_acc_score"]) for weights in signals]
    assert all(each in tried for each in planned)
    words = ["beams=files", *BEAMS, "sft.epochs=1", "grpo.epochs=1", "judged_shots=[2]"]
    assert main(["train", f"experiment={experiment}", *words]) == 0
    trained = sorted(path.name for path in Path("runs/latest/checkpoints/seed0").iterdir())
    assert {*plans, "sft", "rce"} <= {*trained}


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
