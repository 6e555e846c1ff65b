"""Decisions that are drawn from the policy: how often each, by a seed, and in a guard."""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import driven_apart, input_error, small_table
from replayed import untrained

from knobwise.agents import Controller, PolicyConfig
from knobwise.agents.training.checkpoint import Loaded
from knobwise.envs import default_budgets
from knobwise.serving.knob_policy import KnobPolicy

TABLE = small_table(40)
MANY = 4000


def policy_of(**settings):
    return KnobPolicy(Loaded(untrained(TABLE, **settings), "small", "", {}))


def repeated(row, count=MANY):
    return {name: block[row].expand(count, -1) for name, block in TABLE.features.items()}


def test_draws_have_the_probabilities_of_the_policy():
    policy = policy_of()
    drawn = policy.decide(repeated(3), np.full(MANY, 12.0), deterministic=False, seed=0)
    counts = Counter(tuple(decision.values()) for decision in drawn)
    wanted = policy.decide(TABLE.blocks(3), 12.0, explain=True).expected
    assert len(counts) > 3
    for row in wanted:
        share = counts[tuple(row["configuration"].values())] / MANY
        # four standard errors
        spread = 4 * (row["probability"] * (1 - row["probability"]) / MANY) ** 0.5
        assert share == pytest.approx(row["probability"], abs=spread + 1e-4)


def test_a_seed_repeats_the_draws_and_without_one_they_differ():
    policy = policy_of()
    request = repeated(0, 50), np.full(50, 12.0)
    first, again, other = (
        policy.decide(*request, deterministic=False, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    fresh = [policy.decide(*request, deterministic=False) for _ in range(2)]
    assert fresh[0] != fresh[1]
    # the default does not vary
    assert policy.decide(*request) == policy.decide(*request)


def test_one_request_gives_one_dict_and_an_explanation_of_what_was_drawn():
    policy = policy_of()
    greedy = policy.decide(TABLE.blocks(3), 12.0)
    for seed in range(20):
        options = {"deterministic": False, "seed": seed}
        drawn = policy.decide(TABLE.blocks(3), 12.0, **options)
        explanation = policy.decide(TABLE.blocks(3), 12.0, explain=True, **options)
        assert explanation.decision == drawn
        assert list(drawn) == list(greedy)
        assert ("drawn" in explanation.reason) == (drawn != greedy)


def test_where_the_guard_falls_back_static_decides():
    budgets = default_budgets(TABLE)
    policy = policy_of(deploy=[False, True, True, True, True])
    for index, budget in enumerate(budgets.tolist()):
        limits = np.full(200, budget)
        drawn = policy.decide(repeated(3, 200), limits, deterministic=False, seed=0)
        distinct = {tuple(decision.values()) for decision in drawn}
        if index:
            assert len(distinct) > 1
        else:
            static = policy.agent.decider.static.single(budget)
            assert distinct == {tuple(policy.configurations[static].values())}


@pytest.mark.parametrize("seed", [-1, 0.5, "one"])
def test_seeds_that_are_none_are_refused(seed):
    with input_error("seed"):
        policy_of().decide(TABLE.blocks(0), 12.0, deterministic=False, seed=seed)


def test_a_seed_without_draws_is_refused():
    with input_error("deterministic=False"):
        policy_of().decide(TABLE.blocks(0), 12.0, seed=0)


# -- the network alone -----------------------------------------------------------------------------


def log_probs_of(controller, rows):
    blocks = {name: block[rows] for name, block in TABLE.features.items()}
    return controller(controller.normaliser(blocks, len(rows)), torch.full((len(rows),), 12.0))


def test_actions_by_name_are_those_of_the_most_probable_configuration():
    controller = driven_apart(TABLE, PolicyConfig(hidden=8))
    log_probs = log_probs_of(controller, torch.arange(6))
    actions = controller.sample_actions(log_probs, deterministic=True)
    for row, choice in enumerate(log_probs.argmax(-1)):
        wanted = TABLE.configuration(choice)
        assert {name: values[row].item() for name, values in actions.items()} == wanted
        # and of one request
        single = controller.sample_actions(log_probs[row], deterministic=True)
        assert {name: value.item() for name, value in single.items()} == wanted
    # [2, 3, C]
    shaped = controller.sample_actions(log_probs.view(2, 3, -1))
    assert {values.shape for values in shaped.values()} == {(2, 3)}


def test_drawn_actions_are_never_what_the_mask_forbids():
    controller: Controller = driven_apart(TABLE, PolicyConfig(hidden=8))
    x = controller.normaliser(repeated(3, 500), 500)
    mask = torch.zeros(500, TABLE.num_configurations, dtype=torch.bool)
    mask[:, [2, 5]] = True
    actions = controller.sample_actions(controller(x, torch.full((500,), 12.0), mask))
    names = list(actions)
    drawn = set(zip(*(actions[name].tolist() for name in names), strict=True))
    assert drawn == {tuple(TABLE.configuration(choice).values()) for choice in (2, 5)}


def test_other_shapes_are_refused():
    controller = driven_apart(TABLE, PolicyConfig(hidden=8))
    with input_error("log_probs"):
        controller.sample_actions(torch.zeros(4, 3))
