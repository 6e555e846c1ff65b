"""A selector's policy runs on every form of its bandit, and on each draws what the trainer's policy
draws."""

import gymnasium
import pytest
import torch
from helpers import small_beams
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, SerialEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

import knobwise  # noqa: F401  (registers the environments)
from knobwise.agents.selector.actor import SelectorActor, make_selector_actor
from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit

TABLE, SCORER = small_beams()
SELECTOR = Selector.fitted(SelectorConfig(), TABLE.queries, TABLE.candidates).eval()
ID = "knobwise/DemonstrationBandit-v0"
SAME_STEP = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}


def wrapped(env):
    return GymWrapper(env, categorical_action_encoding=True)


FORMS = {
    "native": lambda **words: DemonstrationBandit(TABLE, batch_size=3, **words),
    "serial": lambda **words: SerialEnv(
        2, lambda: DemonstrationBandit(TABLE, batch_size=3, **words)
    ),
    "wrapped": lambda **words: wrapped(gymnasium.make(ID, table=TABLE, **words)),
    "by id": lambda **words: GymEnv(ID, table=TABLE, categorical_action_encoding=True, **words),
    "vector": lambda **words: wrapped(
        gymnasium.make_vec(ID, 3, "sync", vector_kwargs=SAME_STEP, table=TABLE, **words)
    ),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_policy_runs_on_every_form_recorded_and_scored(form, live):
    env = FORMS[form](scorer=SCORER if live else None)
    shots = env.action_spec.shape[-1]
    counts = {"frames_per_batch": 12, "total_frames": 24}
    collector = Collector(
        env, make_selector_actor(SELECTOR, shots), **counts, auto_register_policy_transforms=False
    )
    for data in collector:
        assert data["next", "reward"].isfinite().all()
        assert data["action_log_prob"].isfinite().all()
        assert data["action"].shape == (*data.shape, shots)
        places = data["action"].clamp_min(0)
        assert data["mask"].bool().gather(-1, places)[data["action"] >= 0].all()
    collector.shutdown()


def test_the_end_of_a_shorter_pool_passes_through_the_wrapper():
    """The action space has no −1, but the environment takes it."""
    env = FORMS["wrapped"](scorer=SCORER)
    for action in ([0, -1], [0, 0]):
        out = env.step(env.reset().set("action", torch.tensor(action)))
        assert out["action"].tolist() == action
        assert out["next", "done"].all()


@pytest.mark.parametrize("group_size", [None, 1, 4])
def test_what_is_observed_and_what_is_looked_up_are_the_same(group_size):
    env = DemonstrationBandit(TABLE, batch_size=6, group_size=group_size, scorer=SCORER)
    stored = SelectorActor(
        SELECTOR, StoredEmbeddings(TABLE.queries, TABLE.candidates), TABLE.pool, 2, group_size
    )
    observing, context = make_selector_actor(SELECTOR, 2, group_size), env.reset()
    actions = []
    for actor in (stored, observing):
        torch.manual_seed(0)
        drawn = actor(context.select(*actor.in_keys))
        assert drawn["action"].shape == env.action_spec.shape
        assert drawn["action_log_prob"].shape == env.action_spec.shape[:-1]
        torch.testing.assert_close(
            actor.get_dist(context).log_prob(drawn["action"]), drawn["action_log_prob"]
        )
        actions.append(drawn["action"])
    assert torch.equal(*actions)


def test_a_deterministic_policy_is_greedy_with_any_leading_axes():
    context = DemonstrationBandit(TABLE, batch_size=6, scorer=SCORER).reset()
    wanted = SELECTOR.choose(context["query"], context["pool"], context["mask"], 2)
    observed = {key: context[key].unflatten(0, (2, 3)) for key in ("query", "pool", "mask")}
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        out = make_selector_actor(SELECTOR, 2)(TensorDict(observed, [2, 3]))
    assert torch.equal(out["action"].flatten(0, 1), wanted)
    assert out["action_log_prob"].shape == (2, 3)
