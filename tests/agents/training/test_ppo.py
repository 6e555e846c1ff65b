"""PPO: TorchRL's loss with a value network, in the place of GRPO."""

import dataclasses

import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import Lines, controller_trainer, equal_states, small_table

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.losses.settings import LossConfig

PPO = LossConfig(objective="ppo", group_size=4)
SHORT = OptimiserConfig(
    warmup_iterations=4, iterations=12, contexts=32, minibatch=16, epochs=2, evaluate_every=4
)
POLICY = PolicyConfig(hidden=16, dropout=0.0)


def trainer(samples=60, **settings):
    table = small_table(samples, holes=0.2)
    return controller_trainer(
        table, **{"policy": POLICY, "loss": PPO, "optimiser": SHORT} | settings
    )


def collected(student):
    """The contexts of one iteration of PPO, after which weights are no longer those that they were
    drawn with."""
    student._prepare_grpo(0.5, True)
    next(iter(student.collector))
    data = student.buffer[:]
    generator = torch.Generator().manual_seed(0)
    for parameter in student.learned.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return data


@pytest.mark.parametrize("advantage", ["centred", "zscore"])
@pytest.mark.parametrize("members", [1, 3])
def test_the_loss_is_the_formula_with_the_values_of_the_moment_of_collection(members, advantage):
    loss = dataclasses.replace(PPO, entropy_coeff=0.01, advantage=advantage)
    student = trainer(policy=dataclasses.replace(POLICY, members=members), loss=loss)
    assert student.critic is not None
    data = collected(student)
    with torch.no_grad():
        out = student.stages[-1].loss(data)
        dist = student.actor.get_dist(data)
        now = student.critic(data.copy())["state_value"]
    # by hand
    reward, value = data["next", "reward"], data["state_value"]
    networks = {1: 1, 3: 4}[members]
    assert reward.shape == (32, networks, 4)
    assert value.shape == (32, networks, 1)
    assert (value == 0).all()  # the head of a fresh value network is 0
    advantages = reward - value
    if advantage == "zscore":
        advantages = (advantages - advantages.mean()) / advantages.std()
    ratio = (dist.log_probs.gather(-1, data["configuration"]) - data["action_log_prob"]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert (ratio < 0.8).any()
    assert (ratio > 1.2).any()
    assert float(out["loss_objective"]) == pytest.approx(-float(surrogate.mean()), rel=1e-4)
    error = (now - reward.mean(-1, keepdim=True)).square().mean()
    assert float(out["loss_critic"]) == pytest.approx(float(error), rel=1e-4)
    assert float(out["loss_entropy"]) == pytest.approx(
        -0.01 * float(dist.entropy().mean()), rel=1e-4
    )
    assert (data["state_value"] == 0).all()


def test_the_value_network_learns_and_is_not_deployed(tmp_path):
    lines = Lines()
    optimiser = OptimiserConfig(warmup_iterations=0, iterations=61, contexts=128, patience=0)
    student = trainer(400, log=lines, optimiser=optimiser, folder=tmp_path)
    agent = student.run()
    explained = lines.values("Train/Explained_Variance")
    assert explained[0] == pytest.approx(0, abs=1e-4)
    assert explained[-1] > 0.05
    names = "Loss Policy_Loss Value_Loss Entropy Clip_Fraction ESS Ratio_Mean Grad_Norm LR"
    for name in names.split():
        assert len(lines.values(f"Train/{name}")) == 4
    assert lines.values("Train/Reward_Mean")[-1] > lines.values("Train/Reward_Mean")[0]
    plain = trainer(400, loss=LossConfig()).agent
    assert agent.state_dict().keys() == plain.state_dict().keys()
    assert equal_states(agent, load_checkpoint(tmp_path / "best.pt").controller)


@pytest.mark.parametrize("stopped", [6, 10])
def test_a_stopped_training_ends_as_without_the_stop(tmp_path, stopped):
    whole, _ = stopped_and_resumed(lambda folder: trainer(folder=folder, seed=3), tmp_path, stopped)
    lasts = [load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "stopped")]
    states = [last.extra["training"] for last in lasts]
    assert same(*states)
    assert states[0]["learned"]["1.module.controller.network.head.weight"].any()
    assert len(states[0]["optimiser"]["state"]) == len(list(whole.learned.parameters()))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kl_to_ref_coeff": 0.1}, "kl_to_ref_coeff"),
        ({"advantage": "unnormalised"}, "advantage"),
    ],
)
def test_what_ppo_does_not_have_is_refused(settings, name):
    with pytest.raises(InputError, match=name):
        LossConfig(objective="ppo", **settings)
