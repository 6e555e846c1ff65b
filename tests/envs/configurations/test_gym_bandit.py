"""The bandit in gymnasium: one context by hand, many at once, and TorchRL's wrappers of both."""

import functools
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import identical, input_error, repeated, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import GymEnv, GymWrapper, check_env_specs

from knobwise.envs import (
    BudgetConfig,
    ConfigBandit,
    ConfigBanditEnv,
    ConfigBanditVectorEnv,
    RewardConfig,
)
from knobwise.envs.configurations.gymnasium_vector_env import oracle
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import TRAINING_REWARD

ID = "knobwise/ConfigBandit-v0"
NAN = torch.nan
TABLE = small_table()
SPARSE = small_table(holes=0.68)
ONE_KNOB = table_of([[0.25, 0.75, 1.0], [0.5, 0.5, NAN]], [[1.0, 2.0, 4.0], [3.0, 2.0, NAN]])
TABLES = {
    "full": TABLE,
    "sparse": SPARSE,
    "no features": small_table(features=False),
    "repeated": repeated(small_table(holes=0.3), jitter=0.5),
    "one knob": ONE_KNOB,
}
FORMS = [(table, action) for table in TABLES for action in ("knobs", "configuration")]
WORTH = BudgetConfig(sense="mean")
TWELVE = BudgetConfig("fixed", values_ms=(12.0,))
NOTHING = np.zeros((3, 3), dtype=np.int64)


# -- the checks of gymnasium and TorchRL -----------------------------------------------------------


@pytest.mark.parametrize("budget", [None, WORTH], ids=["deadline", "mean"])
@pytest.mark.parametrize(("table", "action"), FORMS)
def test_gymnasium_and_torchrl_check_it(table, action, budget):
    arguments = {"table": TABLES[table], "action": action, "budget": budget}
    check_env(ConfigBanditEnv(**arguments), skip_render_check=True)
    if table == "one knob":
        return  # TorchRL takes no MultiDiscrete of one number
    check_env_specs(GymEnv(ID, **arguments))
    env = GymEnv(ID, **arguments, categorical_action_encoding=True)
    check_env_specs(env)
    played = env.rollout(5, break_when_any_done=False)
    assert played["action"].shape == ((5, 3) if action == "knobs" else (5,))
    assert played["mask"].shape == (5, 12)


def vector(**options):
    return ConfigBanditVectorEnv(3, **options)


def side_by_side(mode=AutoresetMode.SAME_STEP, **options):
    env = [lambda: gymnasium.make(ID, numeric_infos=True, **options)]
    return SyncVectorEnv(env * 3, autoreset_mode=mode)


disabled = functools.partial(side_by_side, AutoresetMode.DISABLED)


@pytest.mark.parametrize("make", [vector, side_by_side, disabled])
@pytest.mark.parametrize(("table", "action"), FORMS[:4] + FORMS[-2:])
def test_torchrl_wraps_many_at_once_and_sees_the_right_contexts(make, table, action):
    profile = TABLES[table]
    env = GymWrapper(make(table=profile, action=action), categorical_action_encoding=True)
    check_env_specs(env)
    env.set_seed(0)
    played = env.rollout(4, break_when_any_done=False)
    assert played["next", "done"].all()
    for name in ("budget_ms", "mask", *profile.features):
        # after the decision the context is still the same one
        identical(played["next", name], played[name])
    assert len(played["budget_ms"].unique()) >= 8
    if make is vector:
        for name, block in {**profile.features, "mask": profile.mask}.items():
            identical(played[name].to(block), block[played["row"]])


# -- contexts, rewards and infos -------------------------------------------------------------------

UTILITY = RewardConfig(alpha=2.0, miss=0.5, kind="utility")


@pytest.mark.parametrize(
    ("budget", "reward", "repeats"),
    [
        (BudgetConfig("relative"), UTILITY, None),
        (BudgetConfig("quantiles"), UTILITY, "draw"),
        (BudgetConfig("quantiles"), UTILITY, "median"),
        (WORTH, None, None),
    ],
)
def test_all_three_environments_give_the_same_contexts_and_rewards(budget, reward, repeats):
    table = TABLES["repeated"] if repeats else small_table(holes=0.3)
    options = {"budget": budget, "reward": reward, "repeats": repeats or "draw"}
    limit = "worth_ms" if budget is WORTH else "budget_ms"
    one = ConfigBanditEnv(table, **options)
    many = ConfigBanditVectorEnv(1, table, **options)
    native = ConfigBandit(table, seed=5, **options)
    seen_by_many, infos = many.reset(seed=5)
    medians = []
    for step in range(8):
        context = native.reset()
        seen, info = one.reset(seed=None if step else 5)
        row = info["row"]
        assert row == infos["row"][0] == context["row"].item()
        assert (info["sample_id"], info[limit]) == (table.sample_ids[row], seen[limit])
        for name in (limit, *table.features, "mask"):
            for other in (seen_by_many, context):
                identical(seen[name], other[name][0].tolist())
        profiled = table.mask[row].nonzero()
        action = table.configurations[profiled[step % len(profiled), 0]].numpy()
        out = native.step(context.set("action", torch.from_numpy(action)[None]))["next"]
        _, reward, _, _, outcome = one.step(action)
        seen_by_many, rewards, _, _, infos = many.step(action[None])
        assert reward == rewards[0] == out["reward"].item()
        latency_ms = outcome["latency_ms"]
        assert latency_ms == infos["final_info"]["latency_ms"][0] == out["latency_ms"].item()
        medians.append(latency_ms == table.latency_ms[row, table.find(torch.tensor(action))])
        if limit == "worth_ms":
            wanted = outcome["accuracy"] - latency_ms / outcome[limit]
            assert reward == pytest.approx(wanted, rel=1e-6)
            assert not {"budget_ms", "violation"} & {*info, *infos, *outcome, *context.keys()}
        else:
            assert outcome["violation"] == (latency_ms > outcome[limit])
    assert all(medians) == (repeats != "draw")
    observed, infos = ConfigBanditVectorEnv(7, table, **options).reset(seed=3)
    context = ConfigBandit(table, batch_size=7, seed=3, **options).reset()
    identical(context[limit], observed[limit].tolist())
    identical(context["row"], infos["row"].tolist())


def test_infos_tell_the_outcome_by_hand():
    env = ConfigBanditEnv(TABLE, TWELVE)
    row = env.reset(seed=0)[1]["row"]
    *_, info = env.step([2, 1, 0])
    best = int(oracle(RewardTable(TABLE, UTILITY), torch.tensor([row]), torch.tensor([12.0])))
    wanted = {
        "budget_ms": 12,
        "configuration": {"max_crops": 10, "top_k": 8, "num_active_blocks": 12},
        "accuracy": TABLE.accuracy[row, 10],
        "latency_ms": TABLE.latency_ms[row, 10],
        "oracle_configuration": TABLE.configuration(best),
        "oracle_accuracy": TABLE.accuracy[row, best],
    }
    assert {name: info[name] for name in wanted} == wanted


@pytest.mark.parametrize("holes", [0.0, 0.7])
def test_the_oracle_is_the_best_by_brute_force(holes):
    table = small_table(holes=holes)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    budgets = torch.linspace(2, 30, 60)[order]
    result = oracle(RewardTable(table, UTILITY), torch.arange(60), budgets)
    for row, budget in enumerate(budgets):
        latency = table.latency_ms[row]
        gain = table.accuracy[row] * (latency <= budget)
        profiled = table.mask[row].nonzero().squeeze(1).tolist()
        assert result[row] == min(profiled, key=lambda c: (-gain[c], latency[c], c))


# at 2.5 ms the first is in time twice of three times, and so is its median; the second once
OFTEN = table_of([[0.6, 1.0, 0.5]], [[[1.0, 2.0, 9.0], [2.0, 3.0, 4.0], [1.0, 2.0, 2.0]]])
PRICED = RewardConfig(kind="priced")


@pytest.mark.parametrize(
    ("table", "row", "config", "repeats", "limits", "wanted"),
    [
        # the first gains .5 for one ms more, .25 for two more; the second loses nothing by 2 ms
        (ONE_KNOB, 0, PRICED, "draw", [1.0, 3.0, 7.9, 8.1], [0, 1, 1, 2]),
        (ONE_KNOB, 1, PRICED, "draw", [1.0, 8.1], [1, 1]),
        (OFTEN, 0, TRAINING_REWARD, "draw", [2.5], [2]),  # .4, .333, .5
        (OFTEN, 0, TRAINING_REWARD, "median", [2.5], [0]),
        (OFTEN, 0, PRICED, "draw", [4.0], [1]),  # mean latencies 4, 3, 1.67: -.4, .25, .083
    ],
)
def test_the_oracle_by_hand(table, row, config, repeats, limits, wanted):
    rewards = RewardTable(table, config, repeats=repeats)
    rows = torch.full((len(limits),), row)
    assert oracle(rewards, rows, torch.tensor(limits)).tolist() == wanted


@pytest.mark.parametrize(("budget", "kind"), [(WORTH, "utility"), (None, "priced")])
def test_a_reward_of_another_sense_is_refused(budget, kind):
    with input_error(f"reward.kind={kind}"):
        ConfigBandit(TABLE, budget=budget, reward=kind)


# -- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "wrong", "fault"),
    [
        ("knobs", [1], "int64"),
        ("knobs", [[0, 0, 0]] * 2, "int64"),
        ("knobs", [0.0, 1.0, 0.0], "float64"),
        ("knobs", [0, 2, 0], "top_k has no index 2"),
        ("knobs", [0, 0, -1], "num_active_blocks has no index -1"),
        ("configuration", [0, 1], "int64"),
        ("configuration", 12, "no index 12"),
    ],
)
def test_an_action_that_cannot_be_is_refused_and_can_be_corrected(action, wrong, fault):
    for env, actions in (
        (ConfigBanditEnv(TABLE, action=action), wrong),
        (ConfigBanditVectorEnv(1, TABLE, action=action), np.array([wrong])),
    ):
        env.reset(seed=0)
        with input_error(f"action: .*{fault}"):
            env.step(actions)
        env.step(env.action_space.sample())


def test_action_masks_draw_profiled_actions_only():
    # an unprofiled one would be an error
    options = {"action": "configuration", "unprofiled": "error"}
    env = ConfigBanditEnv(SPARSE, **options)
    many = ConfigBanditVectorEnv(5, SPARSE, **options)
    _, infos = many.reset(seed=0)
    for _ in range(30):
        _, info = env.reset()
        env.step(env.action_space.sample(info["action_mask"]))
        *_, infos = many.step(many.action_space.sample(tuple(infos["action_mask"])))


@pytest.mark.parametrize(
    ("profiled", "masks"),
    [
        ([[0, 0, 0], [0, 0, 1], [2, 0, 0], [2, 0, 1]], [[1, 0, 1], [1, 0], [1, 1]]),
        ([[1, 1, 0]], [[0, 1, 0], [0, 1], [1, 0]]),
        ([[0, 0, 0], [1, 1, 0]], None),  # knobs by themselves would allow 0, 1, 0
    ],
)
def test_under_knobs_there_is_a_mask_where_the_profiled_configurations_are_a_product(
    profiled, masks
):
    cells = torch.ones(2, 12)
    cells[0] = NAN
    cells[0, TABLE.find(torch.tensor(profiled))] = 1.0
    table = table_of(cells, cells, knobs=TABLE.knobs, configurations=TABLE.configurations)
    env = ConfigBanditEnv(table, rows=[0])
    _, info = env.reset()
    if masks is None:
        assert info["action_mask"] is None
        return
    assert [knob.tolist() for knob in info["action_mask"]] == masks
    drawn = [env.action_space.sample(info["action_mask"]).tolist() for _ in range(40)]
    assert sorted(map(list, set(map(tuple, drawn)))) == profiled


def test_knobs_under_their_own_keys_are_a_dict_of_actions():
    env = ConfigBanditEnv(TABLE, action_keys="knobs")
    sizes = {knob.name: spaces.Discrete(len(knob.values)) for knob in TABLE.knobs}
    assert env.action_space == spaces.Dict(sizes)
    check_env(env, skip_render_check=True)
    check_env_specs(GymWrapper(env, categorical_action_encoding=True))
    _, info = env.reset(seed=0)
    chosen = env.action_space.sample(info["action_mask"])
    *_, info = env.step(chosen)
    wanted = {knob.name: knob.values[chosen[knob.name]] for knob in TABLE.knobs}
    assert info["configuration"] == wanted
    env.reset()
    for wrong in ([0, 0, 0], {"max_crops": 0}, {**chosen, "top_k": [0, 1]}):
        with input_error("max_crops.*top_k.*num_active_blocks"):
            env.step(wrong)
    many = ConfigBanditVectorEnv(3, TABLE, action_keys="knobs")
    many.reset(seed=0)
    actions = many.action_space.sample()
    final = many.step(actions)[-1]["final_info"]
    identical(final["configuration"], np.stack([actions[name] for name in sizes], 1))


# -- observations ----------------------------------------------------------------------------------


def test_observations_share_no_memory():
    first, info = ConfigBanditEnv(TABLE).reset(seed=0)
    first["image_features"][...] = 7.0
    info["mask"][:] = False
    assert TABLE.mask.all()
    assert not (TABLE.features["image_features"] == 7).any()
    many = ConfigBanditVectorEnv(3, TABLE)
    before, _ = many.reset(seed=0)
    after, _, _, _, infos = many.step(NOTHING)
    for key, value in before.items():
        for other in (after, *infos["final_obs"]):
            assert not np.shares_memory(value, other[key])


def test_a_missing_feature_shows_as_the_median_of_its_column():
    table = small_table()
    block = table.features["image_features"]
    block[:, 0] = torch.arange(60.0)
    block[:10, 0] = NAN  # of 10 … 59 the lower median is 34
    observation, _ = ConfigBanditEnv(table, rows=torch.arange(10)).reset()
    assert observation["image_features"][0] == 34
    assert block[:10, 0].isnan().all()


def test_the_observation_space_fits_on_a_screen_and_holds_what_is_observed():
    env = gymnasium.make(ID)
    space = env.observation_space
    assert len(str(space)) < 800
    assert list(space) == ["budget_ms", "image_features", "language_features", "mask"]
    assert space["budget_ms"].shape == ()
    features = env.unwrapped.table.features["image_features"]
    shown = space["image_features"]
    assert (shown.low.max(), shown.high.min()) == (features.min(), features.max())
    # of constant features too
    constant = replace(TABLE, features={"x": torch.zeros(60, 2)})
    space = ConfigBanditEnv(constant).observation_space["x"]
    assert (space.low < space.high).all()


# -- many at once ----------------------------------------------------------------------------------

IN_THE_OBSERVATION = {"image_features", "language_features", "budget_ms", "mask"}
NO_NUMBERS = {"sample_id", "action_mask"}


def test_many_at_once_go_as_gymnasium_goes():
    rows = [7]  # one sample and one budget, so that values can be compared too
    one = [lambda: ConfigBanditEnv(TABLE, TWELVE, rows=rows)]
    stock = SyncVectorEnv(one * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = ConfigBanditVectorEnv(4, TABLE, TWELVE, rows=rows)
    actions = np.array([[0, 0, 0], [2, 1, 1], [1, 0, 1], [0, 1, 0]])
    for step in range(4):
        theirs, mine = (env.step(actions) if step else env.reset(seed=0) for env in (stock, ours))
        compare(theirs[0], mine[0])
        for expected, got in zip(theirs[1:-1], mine[1:-1], strict=True):
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
        compare_infos(theirs[-1], mine[-1])


def compare(theirs, mine):
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name])
        assert value.dtype == theirs[name].dtype


def compare_infos(theirs, mine):
    """Vector infos hold numbers only, and nothing twice; `configuration` is indices of values."""
    public = {name for name in theirs if not name.startswith("_")}
    known = {name for name in mine if not name.startswith("_")}
    assert public - NO_NUMBERS - {"mask", "budget_ms"} == known - IN_THE_OBSERVATION
    for name in public & known:
        expected, value = theirs[name], mine[name]
        given = mine[f"_{name}"]
        np.testing.assert_array_equal(given, theirs.get(f"_{name}", given))
        if name == "final_info":
            compare_infos(expected, value)
        elif name == "final_obs":
            list(map(compare, expected, value))
        elif "configuration" not in name:
            np.testing.assert_array_equal(value[given], expected[given])


@pytest.mark.parametrize("rows", [[3, 5], np.array([3, 5])])
def test_rows_may_be_any_whole_numbers(rows):
    env = ConfigBanditEnv(TABLE, rows=rows)
    assert {env.reset()[1]["row"] for _ in range(20)} == {3, 5}
    with input_error("row="):
        env.reset(options={"row": 4})


def test_a_path_instead_of_a_table_says_how_to_read_it():
    with input_error(r"table=.*read"):
        gymnasium.make(ID, table="measured.csv")


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_make_vec_takes_every_reset_mode(mode):
    """Without one it is ours, else gymnasium's own."""
    options = {"vectorization_mode": "vector_entry_point"}
    if mode:
        options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}}
    env = gymnasium.make_vec(ID, num_envs=2, table=TABLE, **options)
    assert env.metadata["autoreset_mode"] == (mode or AutoresetMode.SAME_STEP)
    statistics = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    first, _ = statistics.reset(seed=0)
    second, rewards, *_, infos = statistics.step(env.action_space.sample())
    for observations in (first, second):
        assert env.observation_space.contains(observations)
    assert infos["episode"]["r"] == pytest.approx(rewards)


# -- what a person may choose at a reset ------------------------------------------------------------


TWO_SETS = replace(
    TABLE, sample_ids=(*map(str, range(30)),) * 2, datasets=("a",) * 30 + ("b",) * 30
)


@settings(max_examples=20)
@given(row=st.integers(0, 59), budget=st.floats(2**-20, 2**20, width=32), by_id=st.booleans())
def test_the_person_chooses_the_sample_and_its_budget(row, budget, by_id):
    env = ConfigBanditEnv(TABLE)
    sample = {"sample_id": TABLE.sample_ids[row]} if by_id else {"row": row}
    observation, info = env.reset(options={"budget_ms": budget, **sample})
    assert (info["row"], info["budget_ms"], observation["budget_ms"]) == (row, budget, budget)
    identical(observation["image_features"], TABLE.features["image_features"][row])
    *_, info = env.step([0, 0, 0])
    assert info["latency_ms"] == TABLE.latency_ms[row, 0]
    assert info["violation"] == (info["latency_ms"] > budget)


@pytest.mark.parametrize("strategy", ["relative", "quantiles"])
def test_the_seed_fixes_what_is_not_chosen(strategy):
    env = ConfigBanditEnv(TABLE, BudgetConfig(strategy))

    def context(**options):
        _, info = env.reset(seed=3, options=options)
        return info["row"], info["budget_ms"]

    row, budget = context()
    assert context(row=row) == (row, budget)
    assert context(budget_ms=7.5) == (row, 7.5)
    assert context(row=11) == context(row=11)
    # a choice is for one episode
    assert context(row=11, budget_ms=7.5) == (11, 7.5)
    env.step([0, 0, 0])
    assert len({env.reset()[1]["row"] for _ in range(20)}) > 5


def test_under_a_mean_budget_the_worth_is_chosen():
    env = ConfigBanditEnv(TABLE, BudgetConfig(sense="mean"))
    _, info = env.reset(options={"worth_ms": 40, "row": 2})
    assert info["worth_ms"] == 40
    _, reward, *_, info = env.step([0, 0, 0])
    assert reward == pytest.approx(info["accuracy"] - info["latency_ms"] / 40)
    with input_error("budget_ms"):
        env.reset(options={"budget_ms": 40})


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"budget": 2.0}, "'budget'"),
        *(({"row": wrong}, "row=") for wrong in (60, -1, 1.5, True, [1, 2], [[1]])),
        ({"sample_id": "x"}, "0 samples"),
        ({"sample_id": "7"}, "2 samples"),
        ({"sample_id": "7", "dataset": "c"}, "0 samples"),
        ({"dataset": "a"}, "dataset"),
        ({"row": 3, "sample_id": "7", "dataset": "a"}, "sample_id"),
        *(
            ({"budget_ms": wrong}, "budget_ms=")
            for wrong in (0, -1.0, 1e39, 1e-50, NAN, torch.inf, "fast", True)
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, fault):
    env = ConfigBanditEnv(TWO_SETS)
    with input_error(f"^reset options.*{fault}"):
        env.reset(options=options)
    assert env.reset(options={"sample_id": "7", "dataset": "b"})[1]["row"] == 37


def test_many_at_once_take_a_single_value_or_each_their_own():
    env = ConfigBanditVectorEnv(3, TWO_SETS)
    sample = {"sample_id": "7", "dataset": "b"}
    for options, rows, budgets in (
        ({"row": np.array([4, 5, 6]), "budget_ms": 2.0}, [4, 5, 6], [2.0, 2.0, 2.0]),
        ({**sample, "budget_ms": [1.0, 2.5, 3.0]}, [37, 37, 37], [1.0, 2.5, 3.0]),
    ):
        observations, infos = env.reset(options=options)
        identical(infos["row"], rows)
        identical(observations["budget_ms"], budgets)
    with input_error("row="):
        env.reset(options={"row": [1, 2]})


def test_torchrl_passes_choices_on():
    context = GymEnv(ID, table=TABLE).reset(options={"row": 5, "budget_ms": 3.0})
    assert context["budget_ms"].item() == 3
    identical(context["image_features"], TABLE.features["image_features"][5])
