"""What counts in environments: limits on further costs, and what a rule of one's own allows."""

import gymnasium
import numpy as np
import pytest
import torch
from helpers import close, identical, input_error, table_of

from knobwise.agents.problem import Problem
from knobwise.envs import BudgetConfig, ConfigBandit
from knobwise.envs.bandit import rule_choice
from knobwise.envs.bandit.gymnasium_env import ConfigBanditEnv
from knobwise.envs.bandit.gymnasium_vector_env import ConfigBanditVectorEnv
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.rules import Deadline, Rule

PRICES = torch.tensor([[0.001, 0.003], [0.001, 0.002], [0.001, 0.003]])
TABLE = table_of([[0.0, 1.0]] * 3, [[1.0, 2.0], [1.0, 2.0], [4.0, 2.0]], costs={"usd": PRICES})
"""The second configuration is right, and takes 2 ms."""
FREE = {"strategy": "fixed", "values_ms": (2.0,)}
LIMITED = BudgetConfig(limits={"usd": 0.002}, **FREE)
ROWS = torch.arange(3)
SECOND = np.ones(3, dtype=np.int64)


class Quick(Rule):
    """Allows what takes less than 2 ms, and all of the last sample."""

    def allowed(self, table):
        allowed = table.latency_ms < 2
        allowed[-1] = True
        return allowed


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(rule_choice, "RULES", dict(rule_choice.RULES))
    rule_choice.take_rule(Quick, "rule")
    return BudgetConfig(constraint=Quick.name, **FREE)


def native(budget, **options):
    """The native environment, and a reset of its three samples in order."""
    env = ConfigBandit(TABLE, batch_size=3, budget=budget, **options)
    context = env.reset()
    context["row"] = ROWS
    return env, context


def native_step(budget, **options):
    env, context = native(budget, **options)
    context["action"] = torch.ones(env.action_spec.shape, dtype=torch.long)
    return env.step(context)["next"]


def many_step(budget, **options):
    env = ConfigBanditVectorEnv(3, TABLE, budget, autoreset_mode="Disabled", **options)
    observations, _ = env.reset(options={"row": ROWS.tolist()})
    _, rewards, _, _, infos = env.step(SECOND)
    return observations, rewards, infos


# -- limits ----------------------------------------------------------------------------------------


def test_an_answer_above_a_limit_earns_nothing_by_hand():
    # 0.002 is not above the limit
    wanted = [0.0, 1.0, 0.0]
    step = native_step(LIMITED, full_information=True)
    identical(step["reward"].flatten(), wanted)
    # the first configuration is wrong, and late for the last sample
    close(step["reward_per_configuration"], [[0.0, 0.0], [0.0, 1.0], [-0.2, 0.0]])
    _, rewards, infos = many_step(LIMITED)
    identical(torch.from_numpy(rewards), wanted)
    assert infos["violation"].tolist() == [True, False, True]
    one = gymnasium.make("knobwise/ConfigBandit-v0", table=TABLE, budget=LIMITED)
    for row, reward in enumerate(wanted):
        one.reset(options={"row": row})
        _, got, _, _, info = one.step(1)
        assert (got, info["violation"]) == (reward, not reward)
    # as knobwise's own evaluation has it
    problem = Problem(TABLE, TABLE.split(0.4, 0.3), Deadline({"usd": 0.002}))
    decisions = Decisions(ROWS, torch.ones(3, 1, dtype=torch.long), torch.tensor([2.0]))
    identical(problem.outcomes(decisions).utility.flatten(), wanted)


def test_the_oracle_keeps_to_the_limit():
    _, _, infos = many_step(LIMITED)
    # where nothing is right within the limit it takes the fastest, for the last sample above it
    assert infos["oracle_configuration"].tolist() == [[0], [1], [1]]
    assert infos["oracle_accuracy"].tolist() == [0.0, 1.0, 0.0]
    assert infos["oracle_violation"].tolist() == [False, False, True]


def test_a_limit_changes_neither_the_mask_nor_the_contexts():
    drawn = []
    for budget in (BudgetConfig(), BudgetConfig(limits={"usd": 0.002})):
        drawn.append(ConfigBandit(TABLE, batch_size=3, budget=budget, seed=0).reset())
    identical(drawn[0]["budget_ms"], drawn[1]["budget_ms"])
    assert drawn[1]["mask"].all()


@pytest.mark.parametrize("make", [native, many_step, lambda b: ConfigBanditEnv(TABLE, b)])
@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"limits": {"joule": 1.0}}, "budget.limits: joule: .* usd"),
        ({"limits": {"usd": -1.0}}, "budget.limits: usd=-1.0"),
        ({"limits": {"usd": 0.1}, "constraint": "mean"}, "budget.limits: .* budget=mean"),
    ],
)
def test_limits_that_say_nothing_are_refused(make, settings, fault):
    with input_error(fault):
        make(BudgetConfig(**settings))


def test_cells_of_the_caller_count_as_they_are():
    # under the limit of a problem, but all that is observed is that of the cells
    cells = Deadline({"usd": 0.002}).counted(TABLE, PRICES < 0.003)
    free = BudgetConfig(**FREE)
    step = native_step(free, cells=cells)
    observations, rewards, infos = many_step(free, cells=cells)
    for mask in (step["mask"], torch.from_numpy(observations["mask"]).bool()):
        assert torch.equal(mask, PRICES < 0.003)
    # the first configuration is taken for the second where that is missing
    for given in (step["reward"].flatten(), torch.from_numpy(rewards)):
        close(given, [0.0, 1.0, -0.2])
    assert infos["configuration"].tolist() == [[0], [1], [0]]


# -- a rule of one's own ---------------------------------------------------------------------------


def test_what_a_rule_allows_shows_in_the_mask(quick):
    wanted = torch.tensor([[True, False], [True, False], [True, True]])
    step = native_step(quick)
    observations, rewards, infos = many_step(quick)
    for mask in (step["mask"], torch.from_numpy(observations["mask"]).bool()):
        assert torch.equal(mask, wanted)
    # what is not allowed is as if nobody had measured it
    for given in (step["reward"].flatten(), torch.from_numpy(rewards)):
        identical(given, [0.0, 0.0, 1.0])
    assert infos["oracle_configuration"].tolist() == [[0], [0], [1]]
    with input_error("never profiled"):
        native_step(quick, unprofiled="error")
    env, context = native(quick)
    for _ in range(20):
        action = env.rand_action(context)["action"]
        assert wanted[ROWS, action.flatten()].all()


def test_a_rule_that_allows_nothing_is_refused(monkeypatch, quick):
    monkeypatch.setattr(Quick, "allowed", lambda self, table: table.mask & False)
    with input_error("allowed: leaves 3 samples"):
        ConfigBandit(TABLE, budget=quick)


def test_a_limit_holds_under_a_rule_of_ones_own(quick):
    both = BudgetConfig(constraint=quick.constraint, limits={"usd": 0.002}, **FREE)
    assert native_step(both)["reward"].flatten().tolist() == [0.0, 0.0, 0.0]
