"""A controller that weighs two costs: the pair of worths is an input, and one network serves all of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import small_table
from tensordict import TensorDict

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.serving.knob_policy import KnobPolicy
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs import BudgetConfig, ConfigBandit
from knobwise.envs.configurations.budgets import worth_pairs
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.settings import LossConfig

ENSEMBLE = PolicyConfig(structure="utility", members=2, hidden=16, guard=False)
WEIGHTS = BudgetConfig(sense="weights")
SHORT = OptimiserConfig(warmup_iterations=10, iterations=5, contexts=64, minibatch=64, evaluate_every=5)


def weighed_table(samples: int = 48, holes: float = 0.0) -> ProfileTable:
    """Its cost is dearest where it is fastest, and grows with the first feature."""
    table = small_table(samples, holes=holes)
    cost = 60 / table.latency_ms * (1 + table.features["image_features"][:, :1])
    return replace(table, cost=cost, cost_name="energy_j")


def controller(table: ProfileTable) -> Controller:
    torch.manual_seed(0)
    agent = Controller.for_table(table, torch.arange(table.num_samples), ENSEMBLE, True, weighs=True).eval()
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return agent


def trainer(table: ProfileTable, **options: object) -> ControllerTrainer:
    rows = torch.arange(table.num_samples)
    settings = {"policy": ENSEMBLE, "optimiser": SHORT, "budget": WEIGHTS} | options
    return ControllerTrainer(table, Split(rows[:-20], rows[-20:-10], rows[-10:]), **settings)


def test_the_score_by_hand_and_one_prediction_for_all_worths() -> None:
    agent = controller(weighed_table())
    network = agent.network
    assert isinstance(network, UtilityNetwork)
    outcomes = network.outcomes(torch.randn(2, 3, agent.normaliser.width))
    assert outcomes.log_cost is not None
    worths = torch.tensor([[5.0, 2.0], [50.0, 9.0], [1e9, 1e9]]).expand(2, 3, 2)
    wanted = outcomes.accuracy - outcomes.latency_ms / worths[..., :1] - outcomes.log_cost.exp() / worths[..., 1:]
    torch.testing.assert_close(network.scores(outcomes, worths), wanted)
    torch.testing.assert_close(network.scores(outcomes, worths)[:, 2], outcomes.accuracy[:, 2])


def test_an_untrained_network_expects_the_mean_costs_of_each_configuration() -> None:
    table = weighed_table()
    agent = Controller.for_table(table, torch.arange(48), ENSEMBLE, True, weighs=True)
    assert isinstance(agent.network, UtilityNetwork)
    log_cost = agent.network.outcomes(torch.zeros(2, 1, agent.normaliser.width)).log_cost
    assert log_cost is not None
    assert table.cost is not None
    wanted = (table.cost.sum(0) + table.cost.mean()) / 49
    torch.testing.assert_close(log_cost.exp()[0, 0], wanted)


def test_a_dearer_cost_is_spent_less_of() -> None:
    table = weighed_table()
    agent = trainer(table).run()
    cells, spent = torch.arange(48), []
    for worths in ([1e4, 1.0], [1.0, 1e4]):
        chosen = agent.choose(table.features, torch.tensor(worths).expand(48, 2), table.mask)
        spent.append([float(values[cells, chosen].mean()) for values in (table.weighed_cost, table.latency_ms)])
    (cost_dear, ms_cheap), (cost_cheap, ms_dear) = spent
    assert cost_dear < cost_cheap / 2
    assert ms_dear < ms_cheap / 2


@pytest.mark.parametrize("objective", ["exact", "sampled"])
def test_training_judges_the_reward_over_a_grid_of_worths_and_predicts_the_cost(objective: str) -> None:
    table = weighed_table(holes=0.2)
    student = trainer(table, loss=LossConfig(objective=objective))
    assert torch.equal(student.limits, worth_pairs(table, 4))
    assert student.regression.out_keys == ["loss_accuracy", "loss_latency", "loss_cost"]
    student.run()
    rows, rewards = student.judged_rows, []
    for pair in student.limits:
        chosen = student.choose({}, pair.expand(len(rows), 2)) if student._judge() else None
        assert chosen is not None
        rewards.append(student.env.rewards.chosen(rows, chosen.unsqueeze(1), pair.expand(len(rows), 2)))
    assert float(torch.stack(rewards).mean()) == pytest.approx(student._judge()[0], rel=1e-5)
    assert student.provenance()["grpo"].keys() == {"start", "best", "last"}


def test_a_policy_reads_the_worths_of_rows_and_of_blocks_alike() -> None:
    table = weighed_table()
    env = ConfigBandit(table, batch_size=6, budget=WEIGHTS, seed=0)
    agent, contexts = controller(table), env.reset()
    with torch.no_grad():
        blocks = make_actor(agent)(contexts.clone())["log_probs"]
        one_member = replace(ENSEMBLE, members=1)
        assert blocks.shape == (6, 12)
        features = agent.features({name: contexts[name] for name in table.features}, 6)
        torch.testing.assert_close(blocks, agent(features, contexts["worths"], contexts["mask"]))
        single = Controller.for_table(table, torch.arange(48), one_member, True, weighs=True).eval()
        rows = TensorDict({"row": contexts["row"], "worths": contexts["worths"]}, [6])
        torch.testing.assert_close(
            make_actor(single, table)(rows)["log_probs"], make_actor(single)(contexts.clone())["log_probs"]
        )
    assert env.rollout(1, make_actor(agent))["next", "reward"].shape == (6, 1, 1)


def test_saved_and_loaded(tmp_path: Path) -> None:
    table, worths = weighed_table(), torch.tensor([[4.0, 3.0]]).expand(48, 2)
    agent = controller(table)
    save_checkpoint(tmp_path / "a.pt", agent, table, {})
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert loaded.network.limit_key == "worths"
    assert torch.equal(loaded.network.choose(table.features, worths), agent.choose(table.features, worths))
    with pytest.raises(InputError, match="a controller that weighs energy_j decides in Python only"):
        to_numpy(agent)
    with pytest.raises(InputError, match="the controller is for worths or a mean over requests"):
        AdaptiveModel(None, agent)  # type: ignore[arg-type]


def test_resumed_it_ends_as_without_the_stop(tmp_path: Path) -> None:
    whole, first, again = (trainer(weighed_table(), folder=tmp_path / name) for name in "abb")
    save = first._save

    def saved(judged: bool) -> None:
        save(judged)
        if first.iteration == 15:
            raise KeyboardInterrupt

    first._save = saved  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert again.resume(tmp_path / "b" / "last.pt")
    wanted = whole.run().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.run().state_dict().items())
    with pytest.raises(InputError, match="was trained on another profile or with another policy"):
        trainer(weighed_table(), budget=BudgetConfig(sense="mean")).resume(tmp_path / "b" / "last.pt")


def test_decide_takes_a_pair_or_many() -> None:
    table = weighed_table()
    agent = controller(table)
    policy = KnobPolicy(Loaded(agent, table.name, table.digest, {}))
    features = {name: block[:2] for name, block in table.features.items()}
    worths = torch.tensor([[4.0, 3.0], [90.0, 1.0]])
    wanted = [table.configuration(c) for c in agent.choose(features, worths).tolist()]
    assert policy.decide(features, worths) == wanted
    assert policy.decide({name: block[0] for name, block in features.items()}, [4.0, 3.0]) == wanted[0]
    for wrong in (4.0, [1.0, 2.0, 3.0], [[1.0, -2.0]]):
        with pytest.raises(InputError, match=r"a pair of worths, in ms and of energy_j, or \[n, 2\]"):
            policy.decide(features, wrong)
    with pytest.raises(InputError, match="explanations and drifts are for controllers without a further cost"):
        policy.decide(features, worths, explain=True)


def test_a_further_cost_changes_nothing_under_deadlines() -> None:
    """Bit for bit the training of a profile without it."""
    bare = replace(weighed_table(), cost=None, cost_name="")
    states = [trainer(table, budget=None).run().plain() for table in (bare, weighed_table())]
    assert "cost" not in states[0] | states[1]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for name, value in states[0]["state"].items():
        assert torch.equal(value, states[1]["state"][name]), name
