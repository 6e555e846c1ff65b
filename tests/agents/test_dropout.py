"""Dropout acts where a warm-up asks for it, whatever the mode of the modules."""

import threading

import pytest
import torch
from helpers import small_beams, small_table
from torchrl.collectors import Collector
from torchrl.envs import ExplorationType, set_exploration_type

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.envs import ConfigBandit
from knobwise.losses import ExactGRPOLoss, GRPOLoss, RCELoss, dropping_out

ROWS = torch.arange(40)


def controller_of(table):
    torch.manual_seed(0)
    return Controller.for_table(table, ROWS, PolicyConfig(hidden=32, dropout=0.6))


def everything_in_train_mode(*modules):
    """What a trainer, a collector or a user may do to a loss, a policy and a controller."""
    for module in modules:
        module.train()
        for part in module.modules():
            part.train()


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("objective", ["sampled", "exact"])
@pytest.mark.parametrize("training", [True, False])
def test_the_ratio_is_1_before_the_first_step(training, objective, functional):
    table = small_table(60)
    exact = objective == "exact"
    env = ConfigBandit(table, batch_size=32, group_size=8, action_keys="knobs", seed=0)
    controller = controller_of(table)
    assert not any(module.training for module in controller.modules())
    policy = make_actor(controller, group_size=8, separate=True)
    loss = {"sampled": GRPOLoss, "exact": ExactGRPOLoss}[objective](policy, functional=functional)
    if training:
        everything_in_train_mode(loss, policy, controller, env)
    for draws in Collector(
        env, policy, frames_per_batch=32, total_frames=32, auto_register_policy_transforms=False
    ):
        draws = draws.flatten()
        if exact:
            draws["behaviour_log_probs"] = draws["log_probs"]
            draws["reward_per_configuration"] = env.rewards.all(draws["row"], draws["budget_ms"])
        out = loss(draws)
    wanted = {"clip_fraction": 0, "ESS": 1, "ratio_mean": 1, "kl_approx": 0}
    for name, value in wanted.items():
        assert out[name].item() == pytest.approx(value, abs=1e-5), name


def test_a_warm_up_drops_out_inside_the_block_alone():
    table = small_table(60)
    env = ConfigBandit(table, batch_size=32, action_keys="knobs", full_information=True, seed=0)
    policy = make_actor(controller_of(table), separate=True)
    loss = RCELoss(policy)
    data = env.reset()

    def value():
        return loss(data)["loss_rce"].item()

    without = value()
    with dropping_out():
        dropped = {value() for _ in range(4)}
        with dropping_out(False):
            assert value() == without
    assert len(dropped - {without}) == 4
    assert value() == without
    # an error ends it too
    with pytest.raises(KeyError), dropping_out():
        data["nothing"]
    assert value() == without


def test_another_thread_does_not_drop_out():
    table = small_table(60)
    controller = controller_of(table)
    inputs = torch.randn(5, controller.normaliser.width), torch.full((5,), 9.0)
    results = [controller(*inputs)]
    with dropping_out():
        thread = threading.Thread(target=lambda: results.append(controller(*inputs)))
        thread.start()
        thread.join()
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
def test_a_compiled_controller_follows():
    table = small_table(60)
    controller = controller_of(table)
    torch.compiler.reset()
    compiled = torch.compile(controller, fullgraph=True, backend="eager")
    inputs = torch.randn(5, controller.normaliser.width), torch.full((5,), 9.0)
    wanted = controller(*inputs)
    assert torch.equal(compiled(*inputs), wanted)
    with dropping_out():
        assert not torch.allclose(compiled(*inputs), wanted)
    assert torch.equal(compiled(*inputs), wanted)


def test_what_is_judged_and_deployed_is_the_same_in_train_mode():
    table = small_table(60)
    controller = controller_of(table)
    env = ConfigBandit(table, batch_size=60, action_keys="knobs", seed=0)
    policy = make_actor(controller, separate=True)
    deployed = DeployedController(controller)
    everything_in_train_mode(policy, controller)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        data = policy(env.reset())
    features = {name: data[name].numpy() for name in table.features}
    chosen = deployed.choose(features, data["budget_ms"].numpy(), data["mask"].numpy())
    wanted = table.configurations[torch.from_numpy(chosen)]
    assert torch.equal(torch.stack([data[name] for name in policy.dist_sample_keys], -1), wanted)


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
def test_a_selector_in_any_mode(version):
    table, _ = small_beams()
    torch.manual_seed(0)
    config = SelectorConfig(version=version, width=16, dropout=0.5)
    selector = Selector.fitted(config, table.queries, table.candidates)
    assert not any(module.training for module in selector.modules())
    actor = SelectorActor(selector, table, shots=2, group_size=4)
    rows = torch.arange(8)

    def log_probs():
        return actor.recorded_log_probs(table, rows)

    batch = table.queries, table.candidates[table.pool], table.pool_mask
    wanted = log_probs()
    choices = selector.choose(*batch, 2)
    everything_in_train_mode(actor, selector)
    assert torch.allclose(log_probs(), wanted, atol=1e-5)
    assert torch.equal(selector.choose(*batch, 2), choices)
    with dropping_out():
        assert not torch.allclose(log_probs(), wanted, atol=1e-3)
    assert torch.allclose(log_probs(), wanted, atol=1e-5)
