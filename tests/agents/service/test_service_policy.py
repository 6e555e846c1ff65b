"""The policy of prices: its start, its decision in NumPy, the returns of its training, resuming, and its rivals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.service.baselines import Service
from knobwise.agents.service.policy import PricePolicy
from knobwise.agents.service.settings import ServiceLossConfig
from knobwise.agents.serving.forecast import forecast_of
from knobwise.agents.training.service_trainer import ServiceTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs import ProfileTable, ServiceQueue
from knobwise.envs.service.arrivals import TraceSampler
from knobwise.envs.service.queue import Forecast
from knobwise.envs.tables.profile_table import Knob

PRICES = torch.tensor([0.0, 0.1, 0.2, 0.4, 0.8])


@pytest.fixture
def table() -> ProfileTable:
    """A fast configuration that is right half the time, and a slow one that is always right, with jitter."""
    latency = torch.tensor([[2.0, 6.0]]).repeat(8, 1)
    return ProfileTable(
        name="two",
        knobs=(Knob("size", (1, 2)),),
        configurations=torch.tensor([[0], [1]]),
        accuracy=torch.tensor([[0.5, 1.0]]).repeat(8, 1),
        latency_ms=latency,
        mask=torch.ones(8, 2, dtype=torch.bool),
        sample_ids=tuple("abcdefgh"),
        repeats_ms=latency.unsqueeze(-1) * torch.tensor([0.9, 1.0, 1.1]),
    )


def trainer_of(
    table: ProfileTable, folder: Path | None = None, iterations: int = 4, requests: int = 12, **loss: float
) -> ServiceTrainer:
    """Starts from a price that changes nothing, under loads at which it pays to be fast while others wait."""
    about = {"requests": requests, "deadlines_ms": torch.tensor([9.0, 14.0])}
    loads = (1.2, 1.5)
    env = ServiceQueue(
        table, batch_size=4, group_size=4, loads=loads, prices=(0.0, 0.3, 0.5, 0.7, 0.9, 1.1), seed=0, **about
    )
    service = Service(table, env.forecast, env.service_ms, env.prices)
    held_out = TraceSampler(table, loads, gap_ms=env.gap_ms, seed=1, **about)(20)
    settings = OptimiserConfig(
        warmup_iterations=0, iterations=iterations, contexts=4, minibatch=2, evaluate_every=2, patience=0, lr=5e-3
    )
    losses = ServiceLossConfig(group_size=4, **loss)
    return ServiceTrainer(env, service, held_out, (0.06, 0.0), loss=losses, optimiser=settings, seed=0, folder=folder)


def test_it_starts_as_the_tuned_rule_and_decides_alike_in_numpy() -> None:
    policy = PricePolicy(PRICES, 4.0, (0.04, 0.1))
    backlog = torch.tensor([0.0, 1.0, 3.0, 99.0])
    some = torch.tensor([4.0, -1.0, 2.0, 8.0]), backlog, torch.tensor([0.5, 1.0, 0.2, 9.0])
    torch.testing.assert_close(policy.price(*some), torch.tensor([0.04, 0.14, 0.34, 0.8]))
    assert policy(*some).argmax(-1).tolist() == [0, 1, 3, 4]  # the nearest level
    torch.nn.init.normal_(policy.network[-1].weight, std=0.1)
    again = PricePolicy.restored(policy.plain())
    torch.testing.assert_close(again.price(*some), policy.price(*some))
    single = again.single()
    for left, waiting, load, price in zip(*(each.tolist() for each in some), policy.price(*some).tolist(), strict=True):
        assert single(left, waiting, load) == pytest.approx(price, rel=1e-5)


def test_rewards_to_come_end_where_nobody_waits(table: ProfileTable) -> None:
    trainer = trainer_of(table, discount=0.5)
    traces = TensorDict({"next": {"reward": torch.tensor([[[1.0], [1.0], [1.0]], [[0.0], [1.0], [0.0]]]).unsqueeze(0)}})
    traces["waited_ms"] = torch.tensor([[[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]])  # nobody waits at the third request
    assert trainer._with_returns(traces)["next", "reward"].tolist() == [[[1.5, 1.0, 1.0], [0.5, 1.0, 0.0]]]


def test_training_is_resumed_bit_for_bit(table: ProfileTable, tmp_path: Path) -> None:
    whole = trainer_of(table, tmp_path / "whole")
    whole.run()
    stopped = trainer_of(table, tmp_path / "stopped")
    stream = iter(stopped.collector)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_rng_state(stopped._random[0])
        for _ in range(2):
            assert stopped._continues()
            stopped.iterate(stream)
            stopped.iteration += 1
        stopped._save(judged=False)
    resumed = trainer_of(table, tmp_path / "stopped")
    assert resumed.resume(tmp_path / "stopped" / "last.pt")
    assert resumed.iteration == 2
    resumed.run()
    for file in ("best.pt", "last.pt"):
        first, second = (load_checkpoint(tmp_path / name / file).agent.state_dict() for name in ("whole", "stopped"))
        assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(InputError, match="with other settings"):
        trainer_of(table, discount=0.3).resume(tmp_path / "whole" / "last.pt")


def test_grpo_learns_what_tuning_finds(table: ProfileTable) -> None:
    trainer = trainer_of(table, iterations=30, requests=40)
    myopic, _ = trainer._judge()
    service, (_, *rule) = trainer.service, trainer.service.tuned(trainer.held_out)
    tuned = float(service.serve(trainer.held_out, service.at_price(*rule)).utility.mean())
    trainer.run()
    assert tuned > myopic + 0.05
    assert trainer._judge()[0] > (myopic + tuned) / 2


def test_rules_are_the_best_of_those_tried(table: ProfileTable) -> None:
    service = trainer_of(table).service
    traces = TraceSampler(table, [1.5], requests=40, gap_ms=6.0, deadlines_ms=torch.tensor([9.0]), seed=0)(20)

    def utility(decide: object) -> float:
        return float(service.serve(traces, decide).utility.mean())  # type: ignore[arg-type]

    alone, price, per_waiting = service.tuned(traces)
    best = utility(service.at_price(price, per_waiting))
    assert best >= utility(service.at_price(alone)) >= utility(service.at_price(0.0))
    assert utility(service.best_static(traces)) == max(
        utility(lambda head, choice=choice: torch.full_like(head.backlog, choice)) for choice in (0, 1)
    )
    by_time_left = utility(service.static_by_time_left(torch.arange(8)))
    assert by_time_left == pytest.approx(utility(service.at_price(0.0)), abs=0.05)  # nothing is known of the request


def test_a_decision_that_costs_time_is_charged(table: ProfileTable) -> None:
    forecast = Forecast.of_averages(table)
    traces = TraceSampler(table, [0.1], requests=1, gap_ms=6.0, deadlines_ms=torch.tensor([9.0]), seed=0)(3)
    dear = Service(table, forecast, 6.0, PRICES, cost_ms=0.5)
    free, charged = (dear.serve(traces, dear.at_price(0.0), free=free).latency_ms for free in (True, False))
    torch.testing.assert_close(charged, free + 0.5)


def test_a_checkpoint_without_a_controller_for_deadlines_is_refused(table: ProfileTable, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds a Controller; requests that wait need a controller for deadlines"):
        forecast_of(Controller.for_table(table, torch.arange(8), PolicyConfig(), False), table)
    trainer = trainer_of(table, tmp_path, iterations=1)
    trainer.run()
    loaded = load_checkpoint(tmp_path / "best.pt")
    with pytest.raises(InputError, match="holds a PricePolicy"):
        forecast_of(loaded.agent, table)
    with pytest.raises(InputError, match="holds a policy of prices, trained on 'two', and no controller"):
        _ = loaded.controller
