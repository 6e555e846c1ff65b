"""A controller that weighs two costs: the pair of worths is an input, and one network serves
all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import arrays, driven_apart, small_table
from tensordict import TensorDict
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.knob_policy import KnobPolicy
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.settle import deployed_by
from knobwise.common.errors import InputError
from knobwise.envs import BudgetConfig, ConfigBandit
from knobwise.envs.configurations.budgets import worth_pairs
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.settings import LossConfig

TAUGHT = PolicyConfig(
    teacher=True, members=2, hidden=16, teacher_hidden=16, dropout=0.0, teacher_dropout=0.0
)
WEIGHTS = BudgetConfig(sense="weights")
SHORT = OptimiserConfig(
    teacher_iterations=10,
    warmup_iterations=60,
    iterations=5,
    contexts=64,
    minibatch=64,
    evaluate_every=5,
)


def weighed_table(samples: int = 48, holes: float = 0.0) -> ProfileTable:
    """Its cost is dearest where it is fastest, and grows with the first feature."""
    table = small_table(samples, holes=holes)
    cost = 60 / table.latency_ms * (1 + table.features["image_features"][:, :1])
    return replace(table, cost=cost, cost_name="energy_j")


def weighing(table: ProfileTable, members: int = 2) -> DeployedController:
    config = PolicyConfig(hidden=16, members=members)
    return DeployedController(driven_apart(table, config, sense="weights", by=0.1))


def trainer(table: ProfileTable, **options: Any) -> ControllerTrainer:
    rows = torch.arange(table.num_samples)
    settings: dict[str, Any] = {"policy": TAUGHT, "optimiser": SHORT, "budget": WEIGHTS}
    split = Split(rows[:-20], rows[-20:-10], rows[-10:])
    return ControllerTrainer(table, split, **settings | options)


def chosen_at(agent: Any, table: ProfileTable, worths: list[float]) -> Tensor:
    """Its choices for all rows under the same pair."""
    pairs = np.broadcast_to(np.array(worths), (table.num_samples, 2))
    return torch.from_numpy(agent.choose(arrays(table), pairs, table.mask.numpy()))


def test_an_untrained_teacher_expects_the_mean_costs_of_each_configuration() -> None:
    table = weighed_table()
    student = trainer(table)
    teacher = student.agent.teacher
    assert teacher is not None
    rows = student.fitted
    x = student.all_features[rows].expand(2, -1, -1)
    log_cost = teacher.network(x).log_cost
    assert log_cost is not None
    assert table.cost is not None
    for member, fitted in enumerate(student.divide()[0]):
        cost = table.cost[fitted]
        wanted = (cost.sum(0) + cost.mean()) / (len(fitted) + 1)
        torch.testing.assert_close(log_cost.exp()[member, 0], wanted)


def test_a_dearer_cost_is_spent_less_of() -> None:
    table = weighed_table()
    agent = trainer(table, optimiser=replace(SHORT, warmup_iterations=200)).run()
    cells, spent = torch.arange(48), []
    for worths in ([1e4, 1.0], [1.0, 1e4]):
        chosen = chosen_at(agent, table, worths)
        both = table.weighed_cost, table.latency_ms
        spent.append([float(values[cells, chosen].mean()) for values in both])
    (cost_dear, ms_cheap), (cost_cheap, ms_dear) = spent
    assert cost_dear < cost_cheap / 2
    assert ms_dear < ms_cheap / 2


@pytest.mark.parametrize("objective", ["exact", "sampled"])
def test_training_judges_the_reward_over_a_grid_of_worths_and_predicts_the_cost(
    objective: str,
) -> None:
    table = weighed_table(holes=0.2)
    student = trainer(table, loss=LossConfig(objective=objective))
    assert torch.equal(student.limits, worth_pairs(table, 4))
    assert student.regression.out_keys == ["loss_accuracy", "loss_latency", "loss_cost"]
    student.run()
    rows, rewards = student.judged_rows, []
    for pair in student.limits:
        chosen = student.held_out_log_probs(pair).argmax(-1, keepdim=True)
        rewards.append(student.env.rewards.chosen(rows, chosen, pair.expand(len(rows), 2)))
    score = student._judge()[0]
    assert float(torch.stack(rewards).mean()) == pytest.approx(score, rel=1e-5)
    assert student.provenance()["grpo"].keys() == {"start", "best", "last"}


def test_a_policy_reads_the_worths_of_rows_and_of_blocks_alike() -> None:
    table = weighed_table()
    env = ConfigBandit(table, batch_size=6, budget=WEIGHTS, seed=0)
    agent, contexts = weighing(table).controller, env.reset()
    with torch.no_grad():
        blocks = make_actor(agent)(contexts.clone())["log_probs"]
        assert blocks.shape == (6, 12)
        features = agent.features({name: contexts[name] for name in table.features}, 6)
        wanted = agent(features, contexts["worths"], contexts["mask"])
        torch.testing.assert_close(blocks, wanted)
        rows = TensorDict({"row": contexts["row"], "worths": contexts["worths"]}, [6])
        torch.testing.assert_close(make_actor(agent, table)(rows)["log_probs"], blocks)
    assert env.rollout(1, make_actor(agent))["next", "reward"].shape == (6, 1, 1)


def test_saved_and_loaded_and_exported(tmp_path: Path) -> None:
    table, worths = weighed_table(), [4.0, 3.0]
    student = trainer(table)
    student.run()
    agent = deployed_by(student, student.limits)
    assert not agent.settled.guard
    save_checkpoint(tmp_path / "a.pt", agent, table, {})
    loaded = load_checkpoint(tmp_path / "a.pt").controller
    assert loaded.controller.limit_key == "worths"
    assert loaded.teacher is not None
    wanted = chosen_at(agent, table, worths)
    for other in (loaded, agent.export(tmp_path / "a.npz")):
        assert torch.equal(chosen_at(other, table, worths), wanted)
    with pytest.raises(InputError, match="worths"):
        AdaptiveModel(None, agent)  # type: ignore[arg-type]


def test_decide_takes_a_pair_or_many() -> None:
    table = weighed_table()
    agent = weighing(table)
    policy = KnobPolicy(Loaded(agent, table.name, table.digest, {}))
    features = {name: block[:2] for name, block in table.features.items()}
    worths = torch.tensor([[4.0, 3.0], [90.0, 1.0]])
    chosen = agent.choose(arrays(table, torch.arange(2)), worths.numpy())
    wanted = [table.configuration(c) for c in chosen.tolist()]
    assert policy.decide(features, worths) == wanted
    first = {name: block[0] for name, block in features.items()}
    assert policy.decide(first, [4.0, 3.0]) == wanted[0]
    for wrong in (4.0, [1.0, 2.0, 3.0], [[1.0, -2.0]]):
        with pytest.raises(InputError, match="worths"):
            policy.decide(features, wrong)
    with pytest.raises(InputError, match="explanations"):
        policy.decide(features, worths, explain=True)


def test_a_further_cost_changes_nothing_under_deadlines() -> None:
    """Bit for bit the training of a profile without it."""
    bare = replace(weighed_table(), cost=None, cost_name="")
    states = []
    for table in (bare, weighed_table()):
        states.append(trainer(table, budget=None).run().state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
