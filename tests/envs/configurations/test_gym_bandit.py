import contextlib
import inspect
import os
import signal
import subprocess
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from helpers import small_table, table_of
from torchrl.envs import GymEnv, GymWrapper, check_env_specs

import knobwise  # noqa: F401  (registers the environment)
from knobwise.common.errors import InputError
from knobwise.envs.configurations.gymnasium_env import (
    ConfigBanditEnv,
    ConfigBanditVectorEnv,
    oracle,
)
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable

ID = "knobwise/ConfigBandit-v0"


def profiled_action(table: ProfileTable, info: dict, number: int = 0) -> np.ndarray:
    return table.configurations[torch.from_numpy(info["mask"])][number].numpy()


TABLES = {
    "full": small_table(),
    "sparse": small_table(holes=0.68),
    "no features": small_table(features=False),
    "one knob": table_of(
        [[0.25, 0.75, 1.0], [0.5, 0.5, torch.nan]], [[1.0, 2.0, 4.0], [3.0, 2.0, torch.nan]]
    ),
}
FORMS = [(table, action) for table in TABLES for action in ("knobs", "configuration")]
PRICED = BudgetConfig(sense="mean")


@pytest.mark.parametrize("budget", [None, PRICED], ids=["deadline", "mean"])
@pytest.mark.parametrize(("table", "action"), FORMS)
def test_gymnasium_checks_it(table: str, action: str, budget: BudgetConfig | None) -> None:
    env = gymnasium.make(ID, table=TABLES[table], action=action, budget=budget)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize(
    ("table", "action"), FORMS[:-2]
)  # TorchRL takes no MultiDiscrete of one number
def test_torchrl_checks_it(table: str, action: str) -> None:
    arguments = {"table": TABLES[table], "action": action}
    check_env_specs(GymWrapper(gymnasium.make(ID, **arguments)))
    env = GymEnv(ID, **arguments, categorical_action_encoding=True)
    check_env_specs(env)
    played = env.rollout(5, break_when_any_done=False)
    assert played["action"].shape == ((5, 3) if action == "knobs" else (5,))
    assert played["budget_ms"].shape == (
        5,
        1,
    )  # TorchRL has no numbers: it reads a Box of shape () as [1]
    assert played["mask"].shape == (5, 12)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize(("table", "action"), FORMS)
def test_torchrl_wraps_many_at_once_and_sees_the_right_contexts(
    table: str, action: str, mode: AutoresetMode, categorical: bool
) -> None:
    profile = TABLES[table]
    env = GymWrapper(
        ConfigBanditVectorEnv(3, profile, action=action, autoreset_mode=mode),
        categorical_action_encoding=categorical,
    )
    check_env_specs(env)
    env.set_seed(0)
    played = env.rollout(4, break_when_any_done=False)
    assert played["next", "done"].all()
    for name in (
        "budget_ms",
        "mask",
        *profile.features,
    ):  # after the decision the context is still the same one
        assert torch.equal(played["next", name], played[name])
    assert len(played["budget_ms"].unique()) >= 8
    if mode == AutoresetMode.SAME_STEP:
        assert torch.equal(played["mask"].bool(), profile.mask[played["row"]])
        for name, block in profile.features.items():
            assert torch.equal(played[name], block[played["row"]])


def test_torchrl_takes_the_reset_modes_that_it_takes_of_cartpole() -> None:
    for make in (
        lambda: gymnasium.make_vec(
            "CartPole-v1", 2, "sync", {"autoreset_mode": AutoresetMode.NEXT_STEP}
        ),
        lambda: ConfigBanditVectorEnv(2, small_table(), autoreset_mode=AutoresetMode.NEXT_STEP),
    ):
        with pytest.raises(RuntimeError, match="must be one of SAME_STEP or DISABLED"):
            GymWrapper(make())


UTILITY = RewardConfig(alpha=2.0, miss=0.5, kind="utility")


@pytest.mark.parametrize(
    ("budget", "reward", "limit"),
    [(BudgetConfig(strategy), UTILITY, "budget_ms") for strategy in ("relative", "quantiles")]
    + [(BudgetConfig(sense="mean"), None, "worth_ms")],
)
def test_all_three_environments_give_the_same_contexts_and_rewards(
    budget: BudgetConfig, reward: RewardConfig | None, limit: str
) -> None:
    table = small_table(holes=0.3)
    one = ConfigBanditEnv(table, budget, reward)
    many = ConfigBanditVectorEnv(1, table, budget, reward)
    native = ConfigBandit(table, budget=budget, reward=reward, lean=False)
    seen, info = one.reset(seed=5)
    seen_by_many, infos = many.reset(seed=5)
    native.set_seed(5)
    for step in range(6):
        context = native.reset()
        action = profiled_action(table, info, step % int(info["mask"].sum()))
        assert info["row"] == infos["row"][0] == context["row"].item()
        assert info["sample_id"] == table.sample_ids[info["row"]]
        assert info[limit] == seen[limit] == seen_by_many[limit][0] == context[limit].item()
        for name in ("image_features", "language_features", "mask"):
            assert (
                seen[name].tolist() == seen_by_many[name][0].tolist() == context[name][0].tolist()
            )
        out = native.step(context.set("action", torch.from_numpy(action)[None, None]))["next"]
        _, got, _, _, told = one.step(action)
        seen_by_many, rewards, _, _, infos = many.step(action[None])
        assert got == rewards[0] == out["reward"].item()
        assert (
            told["latency_ms"] == infos["final_info"]["latency_ms"][0] == out["latency_ms"].item()
        )
        if limit == "worth_ms":
            assert got == pytest.approx(
                told["accuracy"] - told["latency_ms"] / told["worth_ms"], rel=1e-6
            )
            assert not {"budget_ms", "violation"} & {*info, *infos, *told, *context.keys()}
        seen, info = one.reset()
    observed, infos = ConfigBanditVectorEnv(7, table, budget, reward).reset(seed=3)
    context = ConfigBandit(table, batch_size=7, budget=budget, reward=reward, seed=3).reset()
    assert observed[limit].tolist() == context[limit].tolist()
    assert infos["row"].tolist() == context["row"].tolist()


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
    budgets = torch.linspace(2, 30, 60)[
        torch.randperm(60, generator=torch.Generator().manual_seed(0))
    ]
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
    env = ConfigBanditEnv(table, unprofiled="error")
    _, info = env.reset(seed=0)
    hole = table.configurations[torch.from_numpy(~info["mask"])][0].numpy()
    with pytest.raises(InputError, match=f"sample {info['sample_id']!r} of 'small'"):
        env.step(hole)
    many = ConfigBanditVectorEnv(2, table, unprofiled="error")
    observations, infos = many.reset(seed=0)
    masks = observations["mask"].astype(bool)
    actions = np.stack([profiled_action(table, {"mask": mask}) for mask in masks])
    actions[1] = table.configurations[torch.from_numpy(~masks[1])][0].numpy()
    with pytest.raises(InputError, match=f"1 of the actions.*sample '{infos['row'][1]}'"):
        many.step(actions)
    # nor is an action before a context is drawn
    for mode in AutoresetMode:
        with pytest.raises(gymnasium.error.ResetNeeded):
            ConfigBanditVectorEnv(2, small_table(), autoreset_mode=mode).step(
                np.zeros((2, 3), dtype=np.int64)
            )
    with pytest.raises(gymnasium.error.ResetNeeded):
        ConfigBanditEnv(small_table()).step([0, 0, 0])


@pytest.mark.parametrize(
    ("action", "wrong", "message"),
    [
        (
            "knobs",
            [1],
            r"action: is torch.int64 \[1\]; must be int64 \[1, 1, 3\]: 3 indices, one for each "
            r"knob$",
        ),
        ("knobs", [[0, 0, 0]] * 2, r"action: is torch.int64 \[2, 3\]; must be int64 \[1, 1, 3\]"),
        ("knobs", [0.0, 1.0, 0.0], "action: is torch.float64"),
        ("knobs", [0, 2, 0], "knob top_k has no index 2; its 2 values have indices 0 to 1"),
        ("knobs", [0, 0, -1], "knob num_active_blocks has no index -1"),
        (
            "configuration",
            [0, 1],
            r"action: is torch.int64 \[2\]; must be int64 \[1, 1\]: one index",
        ),
        ("configuration", 12, "the configuration has no index 12; its 12 values"),
        ("configuration", -1, "the configuration has no index -1"),
    ],
)
def test_an_action_that_cannot_be_is_refused_and_can_be_corrected(
    action: str, wrong: object, message: str
) -> None:
    env = ConfigBanditEnv(small_table(), action=action)
    env.reset(seed=0)
    with pytest.raises(InputError, match=message):
        env.step(wrong)
    env.step(env.action_space.sample())
    many = ConfigBanditVectorEnv(1, small_table(), action=action)
    many.reset(seed=0)
    with pytest.raises(InputError, match=r"action: "):
        many.step(np.asarray(wrong)[None])


@pytest.mark.parametrize("unprofiled", ["nearest", "penalty"])
def test_an_unprofiled_action_replays_the_nearest_configuration_by_hand(unprofiled: str) -> None:
    # three values of one knob: the middle one of sample 0 was never profiled; the lower neighbour
    # comes first
    table = table_of(
        [[0.5, torch.nan, 1.0], [1.0, 1.0, 1.0]], [[2.0, torch.nan, 4.0], [1.0, 2.0, 3.0]]
    )
    env = ConfigBanditEnv(table, unprofiled=unprofiled)
    env.reset(seed=0, options={"row": 0, "budget_ms": 3.0})
    _, reward, *_, info = env.step([1])
    assert info["configuration"] == {"size": 0}
    assert info["latency_ms"] == 2
    # the worst of sample 0 is the one that is late, -0.2
    assert (info["accuracy"], reward) == (
        (0.5, 0.5) if unprofiled == "nearest" else (0.0, pytest.approx(-1.2))
    )


def test_both_kinds_of_action_do_the_same() -> None:
    table = small_table()
    by_knobs, by_number = ConfigBanditEnv(table), ConfigBanditEnv(table, action="configuration")
    for number, knobs in enumerate(table.configurations.tolist()):
        infos = []
        for env, action in (
            (by_knobs, knobs),
            (by_knobs, [knobs]),
            (by_number, number),
            (by_number, [number]),
        ):
            env.reset(seed=number)
            *_, info = env.step(action)
            infos.append(
                {
                    name: info[name]
                    for name in ("row", "budget_ms", "accuracy", "latency_ms", "configuration")
                }
            )
            assert info["configuration"] == table.configuration(number)
        assert all(info == infos[0] for info in infos)
    grouped = ConfigBanditVectorEnv(2, table)
    grouped.reset(seed=0)
    *_, infos = grouped.step(table.configurations[[3, 5]].unsqueeze(1).numpy())
    assert infos["final_info"]["configuration"].tolist() == table.configurations[[3, 5]].tolist()


def test_action_masks_draw_profiled_actions_only() -> None:
    table = small_table(holes=0.7)
    env = ConfigBanditEnv(table, action="configuration", unprofiled="error")
    for seed in range(30):
        _, info = env.reset(seed=seed)
        assert info["action_mask"].dtype == np.int8
        env.step(
            env.action_space.sample(info["action_mask"])
        )  # an unprofiled one would be an error
    many = ConfigBanditVectorEnv(5, table, action="configuration", unprofiled="error")
    observations, infos = many.reset(seed=0)
    assert many.action_space.nvec.tolist() == [12] * 5
    for _ in range(10):
        assert infos["action_mask"].tolist() == observations["mask"].tolist()
        assert infos["action_mask"].dtype == np.int8
        actions = many.action_space.sample(tuple(infos["action_mask"]))
        observations, *_, infos = many.step(actions)


@pytest.mark.parametrize(
    ("profiled", "masks"),
    [
        ([[0, 0, 0], [0, 0, 1], [2, 0, 0], [2, 0, 1]], [[1, 0, 1], [1, 0], [1, 1]]),
        ([[1, 1, 0]], [[0, 1, 0], [0, 1], [1, 0]]),
        ([[0, 0, 0], [1, 1, 0]], None),  # knobs by themselves would allow 0, 1, 0
    ],
)
def test_under_knobs_there_is_a_mask_where_the_profiled_configurations_are_a_product(
    profiled: list[list[int]], masks: list[list[int]] | None
) -> None:
    table = small_table()
    mask = table.mask.clone()
    mask[0] = False
    mask[0, table.find(torch.tensor(profiled))] = True
    cells = {
        name: getattr(table, name).masked_fill(~mask, torch.nan)
        for name in ("accuracy", "latency_ms")
    }
    env = ConfigBanditEnv(replace(table, mask=mask, **cells), unprofiled="error")
    _, info = env.reset(seed=0, options={"row": 0})
    if masks is None:
        assert info["action_mask"] is None
        return
    assert [knob.tolist() for knob in info["action_mask"]] == masks
    drawn = set()
    for _ in range(40):
        env.reset(seed=0, options={"row": 0})
        action = env.action_space.sample(info["action_mask"])
        drawn.add(tuple(action))
        env.step(action)
    assert drawn == set(map(tuple, profiled))


def test_observations_share_no_memory() -> None:
    table = small_table()
    env = ConfigBanditEnv(table)
    first, info = env.reset(seed=0)
    for value in first.values():
        value[...] = 7.0
    info["mask"][:] = False
    assert table.mask.all()
    assert not (table.features["image_features"] == 7).any()
    many = ConfigBanditVectorEnv(3, table)
    before, _ = many.reset(seed=0)
    after, _, _, _, infos = many.step(np.zeros((3, 3), dtype=np.int64))
    for key, value in before.items():
        assert not any(
            np.shares_memory(value, other[key]) for other in (after, *infos["final_obs"])
        )


def test_a_missing_feature_shows_as_the_median_of_its_column() -> None:
    table = small_table()
    block = table.features["image_features"]
    block[:, 0] = torch.arange(60.0)
    block[:10, 0] = torch.nan  # of 10 … 59 the lower median is 34
    env = ConfigBanditEnv(table, rows=torch.arange(10))
    assert env.reset(seed=0)[0]["image_features"][0] == 34
    assert block[:10, 0].isnan().all()


def test_the_observation_space_fits_on_a_screen_and_holds_what_is_observed() -> None:
    env = gymnasium.make(ID)
    assert len(str(env.observation_space)) < 800
    assert list(env.observation_space) == [
        "budget_ms",
        "image_features",
        "language_features",
        "mask",
    ]
    assert env.observation_space["budget_ms"].shape == ()
    assert env.observation_space["budget_ms"].is_bounded()
    assert env.observation_space["mask"].shape == (64,)
    features = env.unwrapped.table.features["image_features"]
    assert env.observation_space["image_features"].low.max() == features.min()
    assert env.observation_space["image_features"].high.min() == features.max()
    # of constant features too
    space = ConfigBanditEnv(
        replace(small_table(), features={"x": torch.zeros(60, 2)})
    ).observation_space["x"]
    assert (space.low < space.high).all()
    priced = ConfigBanditEnv(small_table(features=False), BudgetConfig(sense="mean"))
    assert list(priced.observation_space) == ["mask", "worth_ms"]


def test_under_a_mean_budget_the_oracle_weighs_accuracy_against_latency_by_hand() -> None:
    table = table_of(
        [[0.25, 0.75, 1.0], [0.5, 0.5, torch.nan]], [[1.0, 2.0, 4.0], [3.0, 2.0, torch.nan]]
    )
    # the first gains .5 for one ms more, .25 for two more; the second loses nothing by the faster
    worths = torch.tensor([1.0, 3.0, 7.9, 8.1])
    assert oracle(table, torch.zeros(4, dtype=torch.int64), worths, priced=True).tolist() == [
        0,
        1,
        1,
        2,
    ]
    assert oracle(table, torch.ones(4, dtype=torch.int64), worths, priced=True).tolist() == [
        1,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("make", [ConfigBanditEnv, ConfigBandit])
def test_a_reward_of_another_sense_is_refused(make: type) -> None:
    with pytest.raises(InputError, match=r"reward\.kind=utility.*budget\.sense=mean"):
        make(small_table(), budget=BudgetConfig(sense="mean"), reward=RewardConfig(kind="utility"))
    with pytest.raises(InputError, match=r"reward\.kind=priced.*budget\.sense=deadline"):
        make(small_table(), reward=RewardConfig(kind="priced"))


IN_THE_OBSERVATION = {"image_features", "language_features", "budget_ms", "mask"}
NO_NUMBERS = {"sample_id", "action_mask"}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_reset_mode_goes_as_gymnasium_goes(mode: AutoresetMode) -> None:
    table, budget = small_table(), BudgetConfig(strategy="fixed", values_ms=(12.0,))
    rows = torch.arange(7, 8)  # one sample and one budget, so that values can be compared too
    stock: VectorEnv = SyncVectorEnv(
        [lambda: ConfigBanditEnv(table, budget, rows=rows)] * 4, autoreset_mode=mode
    )
    ours = ConfigBanditVectorEnv(4, table, budget, rows=rows, autoreset_mode=mode.value)
    assert ours.metadata["autoreset_mode"] == ours.autoreset_mode == mode
    results = {}
    actions = np.array([[0, 0, 0], [2, 1, 1], [1, 0, 1], [0, 1, 0]])
    for env in (stock, ours):
        results[env] = [env.reset(seed=0)]
        for _ in range(3):
            results[env].append(env.step(actions))
            if mode == AutoresetMode.DISABLED:
                with pytest.raises((AssertionError, gymnasium.error.ResetNeeded)):
                    env.step(actions)
                mask = np.array([True, False, True, True])
                results[env].append(env.reset(options={"reset_mask": mask}))
                results[env].append(env.reset(options={"reset_mask": ~mask}))
    for theirs, mine in zip(results[stock], results[ours], strict=True):
        compare(theirs[0], mine[0])
        for expected, got in zip(theirs[1:-1], mine[1:-1], strict=True):
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
        compare_infos(theirs[-1], mine[-1])


def compare(theirs: dict, mine: dict) -> None:
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name])
        assert value.dtype == theirs[name].dtype


def compare_infos(theirs: dict, mine: dict) -> None:
    """Vector infos hold numbers only, and nothing twice; `configuration` is indices of values."""
    public = {name for name in theirs if not name.startswith("_")}
    assert (
        public - NO_NUMBERS - {"mask", "budget_ms"}
        == {n for n in mine if n[0] != "_"} - IN_THE_OBSERVATION
    )
    for name in public & mine.keys():
        expected, value = theirs[name], mine[name]
        if f"_{name}" in theirs:
            assert mine[f"_{name}"].tolist() == theirs[f"_{name}"].tolist()
        if name == "final_info":
            compare_infos(expected, value)
        elif name == "final_obs":
            for its, mine_of_it in zip(expected, value, strict=True):
                compare(its, mine_of_it)
        elif "configuration" not in name:
            given = mine[f"_{name}"]
            np.testing.assert_array_equal(value[given], expected[given])
            assert value.dtype.kind == expected.dtype.kind or name == "mask"


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_contexts_are_kept_or_drawn_at_the_right_step(mode: AutoresetMode) -> None:
    table = small_table()
    env, ahead = (
        ConfigBanditVectorEnv(3, table, autoreset_mode=mode),
        ConfigBanditVectorEnv(3, table),
    )
    drawn = [ahead.reset(seed=1)[0], *(ahead.reset()[0] for _ in range(3))]
    compare(env.reset(seed=1)[0], drawn[0])
    actions = np.zeros((3, 3), dtype=np.int64)
    for number in range(3):
        observations, rewards, ended, _, infos = env.step(actions)
        assert ended.all()
        if mode == AutoresetMode.SAME_STEP:
            compare(observations, drawn[number + 1])
            continue
        compare(observations, drawn[number])
        assert "accuracy" in infos
        observations, rewards, ended, cut, infos = env.step(actions)
        compare(observations, drawn[number + 1])
        assert rewards.tolist() == [0, 0, 0]
        assert not (ended | cut).any()
        assert "accuracy" not in infos


def test_a_reset_mask_that_makes_no_sense_is_refused() -> None:
    for mode in ("SameStep", "NextStep"):
        with pytest.raises(InputError, match="'reset_mask' is unknown; known are"):
            ConfigBanditVectorEnv(2, small_table(), autoreset_mode=mode).reset(
                options={"reset_mask": np.array([1, 0]) > 0}
            )
    for mask in (np.array([1, 0]), np.array([True]), [True, 0]):
        with pytest.raises(InputError, match=r"reset_mask is bool \[2\]"):
            ConfigBanditVectorEnv(2, small_table(), autoreset_mode="Disabled").reset(
                options={"reset_mask": mask}
            )


def test_with_reset_mode_disabled_no_context_is_decided_twice() -> None:
    env, actions = (
        ConfigBanditVectorEnv(2, small_table(), autoreset_mode="Disabled"),
        np.zeros((2, 3), dtype=int),
    )
    first = {"reset_mask": np.array([True, False])}
    before, _ = env.reset(seed=0, options=first)  # the first one draws all
    env.step(actions)
    after, infos = env.reset(options=first)
    assert infos["_row"].tolist() == [True, False]
    assert after["budget_ms"][0] != before["budget_ms"][0]
    assert after["budget_ms"][1] == before["budget_ms"][1]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(actions)
    env.reset(options={"reset_mask": np.array([False, True])})
    env.step(actions)


@pytest.mark.parametrize("rows", [[3, 5], np.array([3, 5])])
def test_rows_may_be_any_whole_numbers(rows: object) -> None:
    env = gymnasium.make(ID, table=small_table(), rows=rows)
    assert {env.reset(seed=seed)[1]["row"] for seed in range(20)} == {3, 5}
    assert env.reset(options={"row": 5})[1]["row"] == 5
    with pytest.raises(InputError, match=r"row=\[4\] is not among the rows"):
        env.reset(options={"row": 4})


def test_a_path_instead_of_a_table_says_how_to_read_it() -> None:
    with pytest.raises(
        InputError, match=r"table='measured.csv': must be a ProfileTable; knobwise.read\(FILE\)"
    ):
        gymnasium.make(ID, table="measured.csv")


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_make_vec_takes_every_reset_mode(mode: AutoresetMode, vectorization: str) -> None:
    arguments = (
        {"vector_kwargs": {"autoreset_mode": mode}}
        if vectorization == "sync"
        else {"autoreset_mode": mode}
    )
    env = gymnasium.make_vec(
        ID, num_envs=2, vectorization_mode=vectorization, table=small_table(), **arguments
    )
    assert isinstance(env, SyncVectorEnv if vectorization == "sync" else ConfigBanditVectorEnv)
    assert env.metadata["autoreset_mode"] == mode
    observations, _ = env.reset(seed=0)
    assert env.observation_space.contains(observations)
    observations, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(observations)
    env.close()


def play_in_processes(context: str, count: int) -> None:
    """The built-in profile in some processes, where whatever hangs is an error."""
    options = {
        "num_envs": count,
        "vectorization_mode": "async",
        "vector_kwargs": {"context": context},
    }
    env = gymnasium.make_vec("knobwise/ConfigBandit-v0", **options)
    env.reset_async(seed=0, options={"row": 3})
    observations, _ = env.reset_wait(timeout=60)
    assert env.observation_space.contains(observations)
    env.step_async(env.action_space.sample())
    _, _, ended, _, infos = env.step_wait(timeout=60)
    assert ended.all()
    assert infos["row"].tolist() == [3] * count
    env.close()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked there")
def test_make_vec_in_forked_processes() -> None:
    # from a process of its own, with threads: a fork of this one may keep a lock of one of its
    # threads for ever
    code = "import gymnasium, knobwise, torch; torch.set_num_threads(2)"
    code = f"{code}\n{inspect.getsource(play_in_processes)}\nplay_in_processes('fork', 2)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        assert process.wait(150) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it forked


def test_make_vec_in_a_spawned_process() -> None:
    play_in_processes("spawn", 1)


@pytest.mark.parametrize("action", ["knobs", "configuration"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_torchrl_wraps_several_single_environments_whose_infos_are_numbers(
    mode: AutoresetMode, action: str
) -> None:
    table = TABLES["sparse"]
    options = {"table": table, "numeric_infos": True, "action": action}
    many = SyncVectorEnv([lambda: gymnasium.make(ID, **options)] * 3, autoreset_mode=mode)
    env = GymWrapper(many, categorical_action_encoding=True)
    check_env_specs(env)
    played = env.rollout(4, break_when_any_done=False)
    for name in (
        "budget_ms",
        "mask",
        *table.features,
    ):  # after the decision the context is still the same one
        assert torch.equal(played["next", name], played[name])
    assert len(played["budget_ms"].unique()) >= 8
    many.reset(seed=0)
    infos = many.step(many.action_space.sample())[-1]
    assert all(values.dtype != object for values in infos.get("final_info", infos).values())


def test_knobs_under_their_own_keys_are_a_dict_of_actions() -> None:
    table = TABLES["full"]
    env = gymnasium.make(ID, table=table, action_keys="knobs")
    assert env.action_space == spaces.Dict(
        {knob.name: spaces.Discrete(len(knob.values)) for knob in table.knobs}
    )
    check_env(env.unwrapped, skip_render_check=True)
    wrapped = GymWrapper(env, categorical_action_encoding=True)
    check_env_specs(wrapped)
    assert wrapped.action_keys == sorted(knob.name for knob in table.knobs)
    _, info = env.reset(seed=0)
    chosen = env.action_space.sample(info["action_mask"])
    *_, info = env.step(chosen)
    assert info["configuration"] == {
        knob.name: knob.values[chosen[knob.name]] for knob in table.knobs
    }
    env.reset()
    for wrong in ([0, 0, 0], {"max_crops": 0}, {**chosen, "top_k": [0, 1]}):
        with pytest.raises(
            InputError, match="action: must have max_crops, top_k, num_active_blocks"
        ):
            env.unwrapped.step(wrong)
    many = ConfigBanditVectorEnv(3, table, action_keys="knobs")
    many.reset(seed=0)
    actions = many.action_space.sample()
    final = many.step(actions)[-1]["final_info"]
    assert final["configuration"].tolist() == [
        list(row) for row in zip(*(actions[k.name] for k in table.knobs), strict=True)
    ]


def test_a_vector_wrapper_of_gymnasium_works_on_it() -> None:
    many = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        ConfigBanditVectorEnv(3, small_table())
    )
    many.reset(seed=0)
    for _ in range(2):
        _, rewards, _, _, infos = many.step(np.zeros((3, 3), dtype=np.int64))
        assert infos["episode"]["r"].tolist() == pytest.approx(rewards.tolist())
        assert infos["episode"]["l"].tolist() == [1, 1, 1]
