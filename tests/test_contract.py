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


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


# -- S10: the planned experiments --------------------------------------------------------------------------------------


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
