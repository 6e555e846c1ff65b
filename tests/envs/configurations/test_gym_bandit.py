import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from helpers import small_table, table_of
from torchrl.envs import GymWrapper

import knobwise  # noqa: F401  (registers the environment)
from knobwise.common.errors import InputError
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv, oracle
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable

ID = "knobwise/ConfigBandit-v0"


def profiled_action(table: ProfileTable, info: dict, number: int = 0) -> np.ndarray:
    return table.configurations[torch.from_numpy(info["mask"])][number].numpy()


def test_torchrl_wraps_what_gymnasium_makes() -> None:
    wrapped = GymWrapper(gymnasium.make(ID, table=small_table()), categorical_action_encoding=True)
    played = wrapped.rollout(5, break_when_any_done=False)
    assert played["action"].shape == (5, 3)
    assert played["next", "reward"].shape == (5, 1)
    assert played["image_features"].shape == (5, 4)


UTILITY = RewardConfig(alpha=2.0, miss=0.5, kind="utility")


@pytest.mark.parametrize(
    ("budget", "reward", "limit"),
    [(BudgetConfig(strategy), UTILITY, "budget_ms") for strategy in ("relative", "uniform", "quantiles")]
    + [(BudgetConfig(sense="mean"), None, "worth_ms")],
)
def test_all_three_environments_give_the_same_contexts_and_rewards(
    budget: BudgetConfig, reward: RewardConfig | None, limit: str
) -> None:
    table = small_table(holes=0.3)
    one = ConfigBanditEnv(table, budget, reward)
    many = ConfigBanditVectorEnv(1, table, budget, reward)
    native = ConfigBandit(table, budget=budget, reward=reward, lean=False)
    _, info = one.reset(seed=5)
    _, infos = many.reset(seed=5)
    native.set_seed(5)
    for step in range(6):
        context = native.reset()
        action = profiled_action(table, info, step % int(info["mask"].sum()))
        assert info["sample_id"] == infos["sample_id"][0] == table.sample_ids[int(context["row"])]
        assert info[limit] == infos[limit][0] == context[limit].item()
        out = native.step(context.set("action", torch.from_numpy(action)[None, None]))["next"]
        _, got, _, _, told = one.step(action)
        _, rewards, _, _, infos = many.step(action[None])
        assert got == rewards[0] == out["reward"].item()
        assert told["latency_ms"] == infos["final_info"]["latency_ms"][0] == out["latency_ms"].item()
        if limit == "worth_ms":
            assert got == pytest.approx(told["accuracy"] - told["latency_ms"] / told["worth_ms"], rel=1e-6)
            assert not {"budget_ms", "violation"} & {*info, *infos, *told, *context.keys()}
        _, info = one.reset()
    _, infos = ConfigBanditVectorEnv(7, table, budget, reward).reset(seed=3)
    context = ConfigBandit(table, batch_size=7, budget=budget, reward=reward, seed=3).reset()
    assert infos[limit].tolist() == context[limit].tolist()
    assert infos["sample_id"].tolist() == [table.sample_ids[row] for row in context["row"]]


def test_infos_tell_the_outcome_by_hand() -> None:
    table = small_table()
    env = ConfigBanditEnv(table, BudgetConfig(strategy="fixed", values_ms=(12.0,)))
    _, before = env.reset(seed=0)
    row, action = int(before["sample_id"]), np.array([2, 1, 0])
    *_, info = env.step(action)
    assert before["budget_ms"] == info["budget_ms"] == 12
    assert before["mask"].all()
    assert info["configuration"] == {"max_crops": 10, "top_k": 8, "num_active_blocks": 12}
    assert info["accuracy"] == table.accuracy[row, 10]
    assert info["latency_ms"] == table.latency_ms[row, 10]
    assert info["violation"] == (table.latency_ms[row, 10] > 12)
    best = int(oracle(table, torch.tensor([row]), torch.tensor([12.0])))
    assert info["oracle_configuration"] == table.configuration(best)
    assert info["oracle_accuracy"] == table.accuracy[row, best]


@pytest.mark.parametrize("holes", [0.0, 0.7])
def test_the_oracle_is_the_best_by_brute_force(holes: float) -> None:
    table = small_table(holes=holes)
    budgets = torch.linspace(2, 30, 60)[torch.randperm(60, generator=torch.Generator().manual_seed(0))]
    result = oracle(table, torch.arange(60), budgets)
    for row in range(60):
        candidates = []
        for c in table.mask[row].nonzero().squeeze(1).tolist():
            latency = table.latency_ms[row, c].item()
            gain = table.accuracy[row, c].item() if latency <= budgets[row].item() else 0.0
            candidates.append((-gain, latency, c))
        assert result[row].item() == min(candidates)[2]


def test_actions_that_are_refused_and_never_rewarded() -> None:
    table = small_table(holes=0.6)
    env = ConfigBanditEnv(table)
    _, info = env.reset(seed=0)
    hole = table.configurations[torch.from_numpy(~info["mask"])][0].numpy()
    with pytest.raises(InputError, match=f"sample {info['sample_id']!r} of 'small'"):
        env.step(hole)
    many = ConfigBanditVectorEnv(2, table)
    _, infos = many.reset(seed=0)
    actions = np.stack([profiled_action(table, {"mask": mask}) for mask in infos["mask"]])
    actions[1] = table.configurations[torch.from_numpy(~infos["mask"][1])][0].numpy()
    with pytest.raises(InputError, match=f"1 of the actions.*sample {infos['sample_id'][1]!r}"):
        many.step(actions)
    # nor is an action of another width, or one before a context is drawn
    env = ConfigBanditEnv(small_table())
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="shape"):
        env.step(np.array([1]))
    with pytest.raises(gymnasium.error.ResetNeeded):
        ConfigBanditVectorEnv(2, small_table()).step(np.zeros((2, 3), dtype=np.int64))


def test_observations_share_no_memory() -> None:
    table = small_table()
    env = ConfigBanditEnv(table)
    first, info = env.reset(seed=0)
    for value in first.values():
        value[:] = 7.0
    info["mask"][:] = False
    assert table.mask.all()
    assert not (table.features["image_features"] == 7).any()
    many = ConfigBanditVectorEnv(3, table)
    before, _ = many.reset(seed=0)
    after, _, _, _, infos = many.step(np.zeros((3, 3), dtype=np.int64))
    for key, value in before.items():
        assert not any(np.shares_memory(value, other[key]) for other in (after, *infos["final_obs"]))


def test_a_missing_feature_shows_as_the_median_of_its_column() -> None:
    table = small_table()
    block = table.features["image_features"]
    block[:, 0] = torch.arange(60.0)
    block[:10, 0] = torch.nan  # of 10 … 59 the lower median is 34
    env = ConfigBanditEnv(table, rows=torch.arange(10))
    assert env.reset(seed=0)[0]["image_features"][0] == 34
    assert block[:10, 0].isnan().all()


@pytest.mark.parametrize("sense", ["deadline", "mean"])
def test_render_tells_in_words_what_happened(sense: str) -> None:
    budget = BudgetConfig(strategy="fixed", values_ms=(12.0,), sense=sense)
    env = ConfigBanditEnv(small_table(), budget, render_mode="ansi")
    assert env.render() == "Nothing yet: call reset()."
    _, info = env.reset(seed=0)
    limit = f"a right answer is worth {info['worth_ms']:.2f} ms" if sense == "mean" else "budget 12.00 ms"
    assert env.render() == f"Sample {info['sample_id']}, {limit}: what will you set?"
    _, reward, _, _, info = env.step(np.array([2, 1, 0]))
    first, chosen, best = env.render().splitlines()
    kept = {None: "", True: ", over budget", False: ", within budget"}[info.get("violation")]
    assert first == f"Sample {info['sample_id']}, {limit}."
    assert chosen == (
        f"Chosen: max_crops = 10, top_k = 8, num_active_blocks = 12: accuracy {info['accuracy']:.2f}, "
        f"{info['latency_ms']:.2f} ms{kept}; reward {reward:+.3f}."
    )
    assert best.startswith("Oracle: max_crops = ")


def test_under_a_mean_budget_the_spaces_stay() -> None:
    table = small_table()
    priced = gymnasium.make(ID, table=table, budget=BudgetConfig(sense="mean"))
    assert priced.observation_space == gymnasium.make(ID, table=table).observation_space
    # worths are told apart over their whole range, which reaches far beyond the latencies
    env = ConfigBanditVectorEnv(200, table, BudgetConfig(sense="mean"))
    observations, infos = env.reset(seed=0)
    ordered = observations["budget"][infos["worth_ms"].argsort(), 0]
    assert (np.diff(ordered) >= 0).all()
    assert len(np.unique(ordered)) == 200
    assert abs(ordered).max() <= 1.01


def test_under_a_mean_budget_the_oracle_weighs_accuracy_against_latency_by_hand() -> None:
    table = table_of([[0.25, 0.75, 1.0], [0.5, 0.5, torch.nan]], [[1.0, 2.0, 4.0], [3.0, 2.0, torch.nan]])
    # the first gains .5 for one ms more, .25 for two more; the second loses nothing by the faster
    worths = torch.tensor([1.0, 3.0, 7.9, 8.1])
    assert oracle(table, torch.zeros(4, dtype=torch.int64), worths, priced=True).tolist() == [0, 1, 1, 2]
    assert oracle(table, torch.ones(4, dtype=torch.int64), worths, priced=True).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("make", [ConfigBanditEnv, ConfigBandit])
def test_a_reward_of_another_sense_is_refused(make: type) -> None:
    with pytest.raises(InputError, match=r"reward\.kind=utility.*budget\.sense=mean"):
        make(small_table(), budget=BudgetConfig(sense="mean"), reward=RewardConfig(kind="utility"))
    with pytest.raises(InputError, match=r"reward\.kind=priced.*budget\.sense=deadline"):
        make(small_table(), reward=RewardConfig(kind="priced"))


def test_it_resets_in_the_same_step() -> None:
    table = small_table()
    many = gymnasium.make_vec(ID, num_envs=4, vectorization_mode="vector_entry_point", table=table)
    assert isinstance(many, ConfigBanditVectorEnv)
    ahead = ConfigBanditVectorEnv(4, table)
    first, told = many.reset(seed=0)
    assert many.observation_space.contains(first)
    assert many.action_space.shape == (4, 3)
    assert many.metadata["autoreset_mode"] == many.autoreset_mode == AutoresetMode.SAME_STEP
    ahead.reset(seed=0)
    observations, _, terminated, truncated, infos = many.step(np.zeros((4, 3), dtype=np.int64))
    next_observations, next_told = ahead.reset()
    assert terminated.all()
    assert not truncated.any()
    for key, value in first.items():
        assert np.array_equal(np.stack([last[key] for last in infos["final_obs"]]), value)
        assert np.array_equal(observations[key], next_observations[key])
    assert infos["final_info"]["sample_id"].tolist() == told["sample_id"].tolist()
    assert infos["budget_ms"].tolist() == next_told["budget_ms"].tolist()


def shape_of(infos: dict) -> dict:
    """Names, types and shapes of vector infos, for comparison. What a configuration looks like may differ."""
    return {
        name: shape_of(value) if isinstance(value, dict) else (value.shape, value.dtype.kind)
        for name, value in infos.items()
        if "configuration" not in name and "violation" not in name
    }


def test_infos_are_laid_out_as_gymnasium_lays_them_out() -> None:
    table = small_table()
    stock: VectorEnv = SyncVectorEnv([lambda: ConfigBanditEnv(table)] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = ConfigBanditVectorEnv(4, table)
    assert shape_of(ours.reset(seed=0)[1]) == shape_of(stock.reset(seed=0)[1])
    actions = np.zeros((4, 3), dtype=np.int64)
    _, rewards, ended, cut, infos = ours.step(actions)
    _, _, stock_ended, stock_cut, stock_infos = stock.step(actions)
    assert shape_of(infos) == shape_of(stock_infos)
    assert infos["final_obs"][0].keys() == stock_infos["final_obs"][0].keys()
    assert infos["_final_info"].tolist() == stock_infos["_final_info"].tolist() == [True] * 4
    assert (ended.dtype, cut.dtype) == (stock_ended.dtype, stock_cut.dtype)
    assert rewards.shape == (4,)


def test_a_vector_wrapper_of_gymnasium_works_on_it() -> None:
    many = gymnasium.wrappers.vector.RecordEpisodeStatistics(ConfigBanditVectorEnv(3, small_table()))
    many.reset(seed=0)
    for _ in range(2):
        _, rewards, _, _, infos = many.step(np.zeros((3, 3), dtype=np.int64))
        assert infos["episode"]["r"].tolist() == pytest.approx(rewards.tolist())
        assert infos["episode"]["l"].tolist() == [1, 1, 1]
