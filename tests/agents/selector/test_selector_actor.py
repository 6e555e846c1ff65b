"""A selector's policy on its bandit: it draws what it says, for every query on its own."""

import gymnasium
import pytest
import torch
from helpers import close, small_beams
from torchrl.envs import GymWrapper

import knobwise  # noqa: F401  (registers the environments)
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit

TABLE, SCORER = small_beams()
SELECTOR = Selector.fitted(SelectorConfig(), TABLE.queries, TABLE.candidates).eval()


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_policy_draws_on_its_bandit_by_rows(group_size):
    env = DemonstrationBandit(TABLE, batch_size=6, group_size=group_size, scorer=SCORER)
    actor = SelectorActor(SELECTOR, TABLE, 2, group_size)
    context = env.reset()
    drawn = actor(context.select("row"))
    assert drawn["action"].shape == env.action_spec.shape
    assert drawn["action_log_prob"].shape == env.action_spec.shape[:-1]
    close(actor.get_dist(context).log_prob(drawn["action"]).detach(), drawn["action_log_prob"])
    # from their own pools
    assert drawn["action_log_prob"].isfinite().all()
    # embeddings are those that the environment shows
    for shown, stored in zip(("query", "pool"), actor.inputs(context["row"]), strict=False):
        assert torch.equal(context[shown], stored)
    assert env.step(context.set("action", drawn["action"]))["next", "reward"].isfinite().all()


def test_the_end_of_a_shorter_pool_passes_through_the_wrapper():
    """The action space has no −1, but the environment takes it."""
    bandit = gymnasium.make("knobwise/DemonstrationBandit-v0", table=TABLE, scorer=SCORER)
    env = GymWrapper(bandit, categorical_action_encoding=True)
    for action in ([0, -1], [0, 0]):
        out = env.step(env.reset().set("action", torch.tensor(action)))
        assert out["action"].tolist() == action
        assert out["next", "done"].all()
