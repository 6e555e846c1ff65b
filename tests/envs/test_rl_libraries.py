"""The environments under other libraries as they are: stable-baselines3, sb3-contrib, skrl, wrappers
of gymnasium, and TorchRL's Trainer with its checkpoints."""

import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation, RescaleObservation
from helpers import input_error, small_table, table_of
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from skrl.envs.wrappers.torch import wrap_env
from skrl.utils.spaces.torch import unflatten_tensorized_space
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.vec_env import VecMonitor
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.trainers import DefaultOptimizationStepper, Trainer

from knobwise.agents import Controller, PolicyConfig, make_actor
from knobwise.envs import (
    BudgetConfig,
    ConfigBandit,
    ConfigBanditEnv,
    ConfigBanditVectorEnv,
    ContextState,
    StableBaselinesEnv,
)
from knobwise.losses import GRPOLoss

ID = "knobwise/ConfigBandit-v0"
TABLE = small_table()
SPARSE = small_table(holes=0.5)
# the first configuration is right and on time, whatever the budget
EASY = table_of([[1.0, 0.0, 0.0]] * 20, [[1.0, 2.0, 3.0]] * 20)


def many(count=8, **options):
    return StableBaselinesEnv(gymnasium.make_vec(ID, num_envs=count, **options))


# -- stable-baselines3 -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gymnasium.make, many], ids=["one", "many"])
def test_stable_baselines3_learns(make):
    options = {"table": EASY}
    env = gymnasium.make(ID, **options) if make is gymnasium.make else many(**options)
    settings = {"n_steps": 256 // getattr(env, "num_envs", 1), "batch_size": 64, "device": "cpu"}
    model = PPO("MultiInputPolicy", env, learning_rate=0.01, seed=0, **settings)
    model.learn(1024)
    observation = ConfigBanditVectorEnv(20, EASY).reset(seed=0)[0]
    actions, _ = model.predict(observation, deterministic=True)
    assert (actions == 0).all()


@pytest.mark.parametrize("table", [TABLE, EASY], ids=["three knobs", "one knob"])
@pytest.mark.parametrize("action", ["knobs", "configuration"])
def test_stable_baselines3_checks_it(table, action):
    check_env(gymnasium.make(ID, table=table, action=action))


def test_many_give_what_the_vector_environment_gives():
    env, plain = many(5, table=TABLE), ConfigBanditVectorEnv(5, TABLE)
    env.seed(3)
    seen = env.reset()
    wanted, infos = plain.reset(seed=[3, 4, 5, 6, 7])
    actions = np.array([[0, 0, 0], [2, 1, 1], [1, 0, 1], [0, 1, 0], [2, 0, 0]])
    for _ in range(3):
        for name, block in wanted.items():
            np.testing.assert_array_equal(seen[name], block)
        assert [info["row"] for info in env.reset_infos] == infos["row"].tolist()
        before = seen
        seen, rewards, ended, told = env.step(actions)
        wanted, wanted_rewards, _, _, infos = plain.step(actions)
        assert rewards.tolist() == wanted_rewards.tolist()
        assert ended.all()
        for i, info in enumerate(told):
            assert info["latency_ms"] == infos["final_info"]["latency_ms"][i]
            assert info["terminal_observation"]["budget_ms"] == before["budget_ms"][i]
            assert not info["TimeLimit.truncated"]
    env.set_options({"row": 7, "budget_ms": 12.0})
    assert env.reset()["budget_ms"].tolist() == [[12.0]] * 5
    assert env.reset_infos == [{"row": 7}] * 5
    assert VecMonitor(env).reset().keys() == seen.keys()


def test_what_is_no_bandit_of_many_is_refused():
    wrapped = gymnasium.wrappers.vector.NormalizeReward(ConfigBanditVectorEnv(2, TABLE))
    for env in (gymnasium.make_vec("CartPole-v1", num_envs=2), wrapped):
        with input_error(f"env={type(env).__name__}"):
            StableBaselinesEnv(env)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        with input_error("autoreset_mode"):
            many(2, table=TABLE, autoreset_mode=mode)
    env = many(2, table=TABLE)
    for use in (lambda: env.env_method("fly"), lambda: env.set_attr("table", EASY)):
        with pytest.raises(AttributeError):
            use()
    assert not env.has_attr("action_masks")  # of knobs there need not be one


@pytest.mark.parametrize("make", ["one", "many"])
def test_maskable_ppo_chooses_what_was_profiled(make):
    # anything else would be an error
    options = {"table": SPARSE, "action": "configuration", "unprofiled": "error"}
    env = gymnasium.make(ID, **options) if make == "one" else many(**options)
    model = MaskablePPO("MultiInputPolicy", env, n_steps=16, batch_size=16, device="cpu", seed=0)
    model.learn(64)
    # asks for masks before it resets
    evaluate_policy(model, VecMonitor(many(**options)), n_eval_episodes=4)


@pytest.mark.parametrize("options", [{}, {"action_keys": "knobs"}], ids=["tensor", "dict"])
def test_masks_of_knobs_stand_one_after_the_other(options):
    env = ConfigBanditEnv(TABLE, **options)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.action_masks()
    env.reset()
    assert env.action_masks().tolist() == [True] * 7  # 3 + 2 + 2 values
    sparse = ConfigBanditEnv(SPARSE, rows=[0], **options)
    sparse.reset()
    with input_error("action_masks: .*action='configuration'"):
        sparse.action_masks()
    exact = ConfigBanditEnv(SPARSE, rows=[0], action="configuration")
    exact.reset()
    assert exact.action_masks().tolist() == SPARSE.mask[0].tolist()


# -- skrl, and what scales by bounds ---------------------------------------------------------------


@pytest.mark.parametrize("action", ["knobs", "configuration"])
@pytest.mark.parametrize("count", [None, 3], ids=["one", "many"])
def test_skrl_wraps_it(count, action):
    options = {"table": SPARSE, "action": action}
    plain = gymnasium.make(ID, **options)
    if count is not None:
        plain = gymnasium.make_vec(ID, num_envs=count, **options)
    env = wrap_env(plain, wrapper="gymnasium", verbose=False)
    seen, _ = env.reset()
    parts = unflatten_tensorized_space(env.observation_space, seen)
    n = count or 1
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "budget_ms": (n, 1),
        "image_features": (n, 4),
        "language_features": (n, 4),
        "mask": (n, 12),
    }
    width = 3 if action == "knobs" else 1
    after, reward, ended, _, _ = env.step(torch.zeros(n, width, dtype=torch.long))
    assert after.shape == seen.shape
    assert torch.isin(reward, torch.tensor([-0.2, 0.0, 1.0])).all()
    assert ended.all()


BUDGETS = {
    "quantiles": None,
    "uniform": BudgetConfig("uniform"),
    "relative": BudgetConfig("relative"),
    "spread": BudgetConfig("spread", values_ms=(5.0, 90.0)),
    "fixed": BudgetConfig("fixed", values_ms=(5.0, 90.0)),
    "mean": BudgetConfig(constraint="mean"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_limit_has_the_bounds_of_what_is_drawn(name):
    env = ConfigBanditVectorEnv(20_000, TABLE, BUDGETS[name])
    space = env.single_observation_space[env.limit_key]
    drawn = env.reset(seed=0)[0][env.limit_key]
    assert env.observation_space[env.limit_key].contains(drawn)
    assert space.low == 0
    assert drawn.max() <= space.high < 1.1 * drawn.max()
    beyond = np.array([1e30], np.float32)
    assert space.contains(beyond)
    for wrong in (-beyond, beyond * np.nan, beyond.repeat(2), beyond.astype(np.float64)):
        assert not space.contains(wrong)
    assert pickle.loads(pickle.dumps(space)) == space


def test_scaled_by_its_bounds_a_budget_stays_a_budget():
    flat = FlattenObservation(ConfigBanditEnv(TABLE))
    env = RescaleObservation(flat, np.float32(-1), np.float32(1))
    budgets_ms = [5.0, 10.0, 15.0]
    seen = [env.reset(options={"row": 3, "budget_ms": b})[0][0] for b in budgets_ms]
    highest = env.unwrapped.observation_space["budget_ms"].high[0]
    assert seen == pytest.approx([2 * b / highest - 1 for b in budgets_ms], rel=1e-5)


# -- TorchRL's Trainer -----------------------------------------------------------------------------


def trainer_of(table, file):
    config = PolicyConfig(hidden=8, dropout=0.0)
    controller = Controller.for_table(table, torch.arange(table.num_samples), config)
    policy = make_actor(controller, table, group_size=3)
    env = ConfigBandit(table, batch_size=4, group_size=3, observe_features=False)
    loss_module = GRPOLoss(policy)
    return Trainer(
        collector=Collector(
            TransformedEnv(env, ContextState()),
            policy,
            frames_per_batch=8,
            total_frames=64,
            reset_at_each_iter=True,
            auto_register_policy_transforms=False,
        ),
        total_frames=16,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss_module,
        optimizer=torch.optim.SGD(loss_module.parameters(), lr=0.1),
        optimization_stepper=DefaultOptimizationStepper(),
        progress_bar=False,
        save_trainer_file=file,
    )


# TorchRL announces another format
@pytest.mark.filterwarnings("ignore:The default Trainer checkpoint format:FutureWarning")
def test_a_checkpoint_of_a_trainer_holds_no_table_and_brings_contexts_back(tmp_path):
    sizes = []
    for samples in (40, 4000):
        file = tmp_path / f"{samples}.pt"
        trainer = trainer_of(small_table(samples=samples), file)
        batches = iter(trainer.collector)
        trainer.optim_steps(next(batches).reshape(-1))
        trainer.save_trainer(force_save=True)
        sizes.append(file.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 2000
    # in the place of the last, and with a table of another size
    same, other = trainer_of(small_table(samples=4000), None), trainer_of(small_table(30), None)
    wanted = dict(trainer.loss_module.named_parameters())
    for loaded in (same, other):
        loaded.load_from_file(file, weights_only=True)
        for name, weights in loaded.loss_module.named_parameters():
            assert torch.equal(weights, wanted[name])
    next_rows = [next(each)["row"] for each in (batches, iter(same.collector))]
    assert torch.equal(*next_rows)
    for each in (trainer, same, other):
        each.collector.shutdown()
