"""A first look that costs time, and that not every configuration continues from."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import Always, deployed, small_table, table_of

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BestStatic, LookupTable, Oracle, static_of
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.judging.policy import choices_of, reads_features
from knobwise.agents.stack.guard import calibrate
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable


def looked_at(table, first_look_ms=3.0):
    """The table, as decisions by features meet it: every configuration but the first two pays for
    the look."""
    paid = torch.full_like(table.latency_ms, first_look_ms).where(table.mask, 0.0)
    paid[:, :2] = 0.0
    repeats_ms = None if table.repeats_ms is None else table.repeats_ms + paid.unsqueeze(-1)
    return replace(
        table, latency_ms=table.latency_ms + paid, repeats_ms=repeats_ms, first_look_ms=paid
    )


def test_a_table_keeps_its_first_look_on_disk(tmp_path):
    table = looked_at(small_table(20, holes=0.2))
    table.save(tmp_path / "t.safetensors")
    again = ProfileTable.load(tmp_path / "t.safetensors")
    assert torch.equal(again.first_look_ms, table.first_look_ms)
    assert again.digest == table.digest
    for other in (table.without_first_look, looked_at(small_table(20, holes=0.2), 2.0)):
        assert other.digest != table.digest


def test_a_look_longer_than_the_answer_is_refused():
    table = small_table(20)
    with pytest.raises(InputError, match="latency_ms"):
        replace(table, first_look_ms=table.latency_ms + 1).without_first_look  # noqa: B018


def test_decisions_without_features_do_not_pay_for_it():
    table, rows = small_table(60), torch.arange(60)
    paid, budgets = looked_at(table), default_budgets(table)
    torch.testing.assert_close(default_budgets(paid), budgets)
    static, same = static_of(paid, rows), static_of(table, rows)
    limits = budgets.numpy()
    np.testing.assert_allclose(static.mean_utility(limits), same.mean_utility(limits))
    mask = table.mask.numpy()
    for make in (partial(BestStatic, budgets_ms=budgets), LookupTable, Oracle):
        chosen = (choices_of(make(each, rows), {}, limits, mask) for each in (paid, table))
        assert torch.equal(*chosen)
    with_look, without = judge(same, paid, rows, budgets), judge(same, table, rows, budgets)
    for name in ("utility", "latency_ms", "reward", "in_time", "feasible"):
        torch.testing.assert_close(getattr(with_look, name), getattr(without, name))


def test_decisions_by_features_pay_where_the_answer_does_not_continue_from_it():
    table = table_of([[1.0, 1.0]], [[4.0, 4.0]], torch.zeros(1, 1))
    paid = replace(
        table, latency_ms=torch.tensor([[4.0, 6.5]]), first_look_ms=torch.tensor([[0.0, 2.5]])
    )
    budgets, row = torch.tensor([5.0]), torch.tensor([0])
    for choice, in_time, took in ((0, 1.0, 4.0), (1, 0.0, 6.5)):
        reader = Always(choice)
        reader.reads_features = lambda limits: np.ones(len(limits), bool)
        judged = judge(reader, paid, row, budgets)
        assert (float(judged.utility), float(judged.latency_ms)) == (in_time, took)
        assert float(judge(Always(choice), paid, row, budgets).latency_ms) == 4.0


def test_a_guard_counts_the_look_and_falls_back_without_it():
    """A look of 30 ms makes the policy late, and static does without it."""
    table = small_table(80)
    paid, rows = looked_at(table, 30.0), torch.arange(80)
    budgets = default_budgets(paid)
    agent = deployed(paid, PolicyConfig(hidden=8))
    reads = reads_features(agent, budgets.numpy())
    rulings = [row["deployed"] for row in agent.settled.guard]
    assert reads.tolist() == rulings
    assert not reads[-1]
    fallen = torch.from_numpy(~reads)
    static = static_of(table, table.split().train)
    judged = judge(agent, paid, rows, budgets)
    wanted = judge(static, table, rows, budgets)
    torch.testing.assert_close(judged.latency_ms[:, fallen], wanted.latency_ms[:, fallen])
    # static alone, calibrated by hand: the same with the look as without it
    choices = torch.full((80, len(budgets)), 11)
    utilities = []
    for each in (paid, table):
        judged = each, rows, budgets, choices
        found = calibrate(*judged, lambda limit_ms: choices[:, 0])
        utilities.append([row["utility_static"] for row in found])
    assert utilities[0] == pytest.approx(utilities[1])
    assert max(utilities[0]) > 0
