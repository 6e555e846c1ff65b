"""PPO: TorchRL's loss with a value network, in the place of GRPO."""

from dataclasses import replace

import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import BRIEF, Lines, equal_states, input_error, small_table, trainer_on

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.losses.settings import LossConfig

PPO = LossConfig(objective="ppo", group_size=4)
SHORT = replace(BRIEF, pretrain_iterations=4, iterations=12, minibatch=16, epochs=2)
POLICY = PolicyConfig(hidden=16, dropout=0.0)


def trainer(samples=60, **settings):
    options = {"policy": POLICY, "loss": PPO, "optimiser": SHORT} | settings
    return trainer_on(small_table(samples, holes=0.2), **options)


@pytest.mark.parametrize("advantage", ["centred", "zscore"])
@pytest.mark.parametrize("members", [1, 3])
def test_the_loss_is_the_formula_with_the_values_of_the_moment_of_collection(members, advantage):
    loss = replace(PPO, entropy_coeff=0.01, advantage=advantage)
    student = trainer(policy=replace(POLICY, fold_networks=members), loss=loss)
    stage = student.policy.stage = student.stages[-1]
    stage.prepare(0.5, True)
    next(iter(student.collector))
    data = student.buffer[:]
    # weights are no longer those that actions were drawn with
    generator = torch.Generator().manual_seed(0)
    for parameter in stage.module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        dist = student.setup.actor.get_dist(data)
        now = student.setup.critic(data.copy())["state_value"]
    # by hand; the head of a fresh value network is 0, rewards are in units of three spreads
    stage.reward_spread = 0.25
    with torch.no_grad():
        out = stage.loss(data)
    advantages = data["next", "reward"] / 0.75
    error = (now - advantages.mean(-1, keepdim=True)).square().mean()
    networks = {1: 1, 3: 4}[members]
    assert advantages.shape == (32, networks, 4)
    assert torch.equal(data["state_value"], torch.zeros(32, networks, 1))
    if advantage == "zscore":
        advantages = (advantages - advantages.mean()) / advantages.std()
    ratio = (dist.log_probs.gather(-1, data["configuration"]) - data["action_log_prob"]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert ratio.min() < 0.8 < 1.2 < ratio.max()
    wanted = {
        "loss_objective": -surrogate.mean(),
        "loss_critic": error,
        "loss_entropy": -0.01 * dist.entropy().mean(),
    }
    for name, value in wanted.items():
        assert float(out[name]) == pytest.approx(float(value), rel=1e-4)


def test_the_value_network_learns_and_is_not_deployed(tmp_path):
    lines = Lines()
    optimiser = OptimiserConfig(pretrain_iterations=0, iterations=61, contexts=128, patience=0)
    student = trainer(400, log=lines, optimiser=optimiser, folder=tmp_path)
    agent = student.run()
    first, *_, last = lines.values("Train/Explained_Variance")
    assert first == pytest.approx(0, abs=1e-4)
    assert last > 0.05
    names = "Loss Policy_Loss Value_Loss Entropy Clip_Fraction ESS Ratio_Mean Grad_Norm LR"
    for name in names.split():
        assert len(lines.values(f"Train/{name}")) == 4
    first, *_, last = lines.values("Train/Reward_Mean")
    assert last > first
    plain = trainer(400, loss=LossConfig()).agent
    assert agent.state_dict().keys() == plain.state_dict().keys()
    assert equal_states(agent, load_checkpoint(tmp_path / "best.pt").controller)


@pytest.mark.parametrize("stopped", [6, 10])
def test_a_stopped_training_ends_as_without_the_stop(tmp_path, stopped):
    whole, _ = stopped_and_resumed(lambda folder: trainer(folder=folder, seed=3), tmp_path, stopped)
    state, other = (
        load_checkpoint(tmp_path / name / "last.pt").extra["training"]
        for name in ("whole", "stopped")
    )
    assert same(state, other)
    stage = whole.stages[-1]
    assert state["stages"][-1]["critic"]["module.controller.network.head.weight"].any()
    assert len(state["optimiser"]["state"]) == len([*stage.module.parameters()])


@pytest.mark.parametrize(
    ("name", "value"), [("kl_to_ref_coeff", 0.1), ("advantage", "unnormalised")]
)
def test_what_ppo_does_not_have_is_refused(name, value):
    with input_error(name):
        LossConfig(objective="ppo", **{name: value})
