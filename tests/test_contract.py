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


def test_c3_knobs_under_their_own_keys_go_from_the_environment_to_the_optimiser() -> None:
    import torch
    from helpers import driven_apart, small_table
    from tensordict.nn import CompositeDistribution
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    from knobwise.agents import PolicyConfig, make_actor
    from knobwise.envs import ConfigBandit
    from knobwise.losses import GRPOLoss, RCELoss

    table, knobs = small_table(holes=0.5), ["max_crops", "top_k", "num_active_blocks"]
    options = {"action_keys": "knobs", "unprofiled": "error", "full_information": True, "seed": 0}
    env = ConfigBandit(table, batch_size=64, group_size=8, **options)
    policy = make_actor(driven_apart(table, PolicyConfig(hidden=16)), table, 8, separate=True)
    assert issubclass(policy[-1].distribution_class, CompositeDistribution)
    grpo, rce = GRPOLoss(policy, functional=False), RCELoss(policy, temperature=0.2, functional=False)
    assert (set(env.action_keys), policy.dist_sample_keys, grpo.tensor_keys.action) == (set(knobs), knobs, knobs)
    collector = Collector(env, policy, frames_per_batch=64, total_frames=64 * 40, auto_register_policy_transforms=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=64)
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.01)
    torch.manual_seed(0)
    rewards = []
    for number, batch in enumerate(collector):
        buffer.extend(batch.flatten())
        rewards.append(float(batch["next", "reward"].mean()))
        optimiser.zero_grad()
        data = buffer.sample()
        (rce(data)["loss_rce"] if number < 20 else grpo(data)["loss_objective"]).backward()
        optimiser.step()
    collector.shutdown()
    before, warmed_up, after = (sum(rewards[i : i + 5]) / 5 for i in (0, 20, 35))
    assert before + 0.05 < warmed_up < after
    chosen = torch.stack([batch.flatten()[name] for name in knobs], -1)
    assert table.mask[batch.flatten()["row"].unsqueeze(1), table.find(chosen)].all()


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


# -- S4: CLIP with LoRA ------------------------------------------------------------------------------------------------


# -- S5: supervised fine-tuning, RCE, GRPO -----------------------------------------------------------------------------


# -- S6: a start from a checkpoint -------------------------------------------------------------------------------------


# -- S7: the curriculum, the temperature by KL, conditional GRPO, rank advantages --------------------------------------


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


# -- S10: the planned experiments --------------------------------------------------------------------------------------


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
