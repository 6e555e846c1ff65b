"""The bandit in gymnasium: one context by hand, many at once, and TorchRL's wrappers of both."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import input_error, repeated, small_table, table_of
from torchrl.envs import GymEnv, GymWrapper, check_env_specs

import knobwise  # noqa: F401  (registers the environment)
from knobwise.envs.bandit.gymnasium_env import ConfigBanditEnv
from knobwise.envs.bandit.gymnasium_vector_env import ConfigBanditVectorEnv, oracle
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import TRAINING_REWARD, BudgetConfig, RewardConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit

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
WORTH = BudgetConfig(constraint="mean")
TWELVE = BudgetConfig("fixed", values_ms=(12.0,))
NOTHING = np.zeros((3, 3), dtype=np.int64)


def profiled_action(table, mask, number=0):
    return table.configurations[torch.from_numpy(mask.astype(bool))][number].numpy()


# -- the checks of gymnasium and TorchRL -----------------------------------------------------------


@pytest.mark.parametrize("budget", [None, WORTH], ids=["deadline", "mean"])
@pytest.mark.parametrize(("table", "action"), FORMS)
def test_gymnasium_and_torchrl_check_it(table, action, budget):
    arguments = {"table": TABLES[table], "action": action, "budget": budget}
    check_env(ConfigBanditEnv(**arguments), skip_render_check=True)
    check_env_specs(GymWrapper(gymnasium.make(ID, **arguments)))
    env = GymEnv(ID, **arguments, categorical_action_encoding=True)
    check_env_specs(env)
    played = env.rollout(5, break_when_any_done=False)
    profile = TABLES[table]
    several = action == "knobs" and len(profile.knobs) > 1
    assert played["action"].shape == ((5, len(profile.knobs)) if several else (5,))
    assert played["mask"].shape == (5, profile.num_configurations)


def vector(mode, **options):
    return ConfigBanditVectorEnv(3, autoreset_mode=mode, **options)


def side_by_side(mode, **options):
    env = [lambda: gymnasium.make(ID, numeric_infos=True, **options)]
    return SyncVectorEnv(env * 3, autoreset_mode=mode)


@pytest.mark.parametrize("make", [vector, side_by_side])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize(("table", "action"), FORMS[:4] + FORMS[-2:])
def test_torchrl_wraps_many_at_once_and_sees_the_right_contexts(make, mode, table, action):
    profile = TABLES[table]
    many = make(mode, table=profile, action=action)
    env = GymWrapper(many, categorical_action_encoding=True)
    check_env_specs(env)
    env.set_seed(0)
    played = env.rollout(4, break_when_any_done=False)
    assert played["next", "done"].all()
    for name in ("budget_ms", "mask", *profile.features):
        # after the decision the context is still the same one
        assert torch.equal(played["next", name], played[name])
    assert len(played["budget_ms"].unique()) >= 8
    if mode == AutoresetMode.SAME_STEP and make is vector:
        assert torch.equal(played["mask"].bool(), profile.mask[played["row"]])
        for name, block in profile.features.items():
            assert torch.equal(played[name], block[played["row"]])


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
    table = small_table(holes=0.3) if repeats is None else TABLES["repeated"]
    options = {"budget": budget, "reward": reward, "repeats": repeats or "draw"}
    limit = "worth_ms" if budget is WORTH else "budget_ms"
    one = ConfigBanditEnv(table, **options)
    many = ConfigBanditVectorEnv(1, table, autoreset_mode="Disabled", **options)
    native = ConfigBandit(table, seed=5, **options)
    medians = []
    for step in range(8):
        seed = 5 if step == 0 else None
        context = native.reset()
        seen, info = one.reset(seed=seed)
        seen_by_many, infos = many.reset(seed=seed)
        assert info["row"] == infos["row"][0] == context["row"].item()
        assert info["sample_id"] == table.sample_ids[info["row"]]
        assert info[limit] == seen[limit]
        for name in (limit, "image_features", "language_features", "mask"):
            wanted = context[name].reshape(-1).tolist()
            assert seen[name].tolist() == seen_by_many[name][0].tolist() == wanted
        action = profiled_action(table, info["mask"], step % int(info["mask"].sum()))
        out = native.step(context.set("action", torch.from_numpy(action)[None]))["next"]
        _, got, _, _, told = one.step(action)
        _, rewards, _, _, outcomes = many.step(action[None])
        assert got == rewards[0] == out["reward"].item()
        took = told["latency_ms"]
        assert took == outcomes["latency_ms"][0] == out["latency_ms"].item()
        medians.append(took == table.latency_ms[info["row"], table.find(torch.tensor(action))])
        if limit == "worth_ms":
            assert got == pytest.approx(told["accuracy"] - took / told[limit], rel=1e-6)
            assert not {"budget_ms", "violation"} & {*info, *infos, *told, *context.keys()}
        else:
            assert told["violation"] == (took > told[limit])
    assert all(medians) == (repeats != "draw")
    observed, infos = ConfigBanditVectorEnv(7, table, **options).reset(seed=3)
    context = ConfigBandit(table, batch_size=7, seed=3, **options).reset()
    assert observed[limit].flatten().tolist() == context[limit].tolist()
    assert infos["row"].tolist() == context["row"].tolist()


def test_infos_tell_the_outcome_by_hand():
    env = ConfigBanditEnv(TABLE, TWELVE)
    _, before = env.reset(seed=0)
    row = before["row"]
    *_, info = env.step(np.array([2, 1, 0]))
    assert before["budget_ms"] == info["budget_ms"] == 12
    assert info["configuration"] == {"max_crops": 10, "top_k": 8, "num_active_blocks": 12}
    assert info["accuracy"] == TABLE.accuracy[row, 10]
    assert info["latency_ms"] == TABLE.latency_ms[row, 10]
    best = int(oracle(RewardTable(TABLE, UTILITY), torch.tensor([row]), torch.tensor([12.0])))
    assert info["oracle_configuration"] == TABLE.configuration(best)
    assert info["oracle_accuracy"] == TABLE.accuracy[row, best]


@pytest.mark.parametrize("holes", [0.0, 0.7])
def test_the_oracle_is_the_best_by_brute_force(holes):
    table = small_table(holes=holes)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    budgets = torch.linspace(2, 30, 60)[order]
    result = oracle(RewardTable(table, UTILITY), torch.arange(60), budgets)
    for row in range(60):
        candidates = []
        for c in table.mask[row].nonzero().squeeze(1).tolist():
            latency = table.latency_ms[row, c].item()
            gain = table.accuracy[row, c].item() if latency <= budgets[row].item() else 0.0
            candidates.append((-gain, latency, c))
        assert result[row].item() == min(candidates)[2]


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
def test_a_reward_of_another_constraint_is_refused(budget, kind):
    with input_error(f"reward.kind={kind}"):
        ConfigBandit(TABLE, budget=budget, reward=kind)


# -- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "wrong", "fault"),
    [
        ("knobs", [0, 0], r"must be int64 \[3\]"),
        ("knobs", {"top_k": 0}, "action_keys"),
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
        (ConfigBanditVectorEnv(1, TABLE, action=action), np.asarray([wrong])),
    ):
        env.reset(seed=0)
        with input_error(f"action: .*{fault}"):
            env.step(actions)
        env.step(env.action_space.sample())


def test_action_masks_draw_profiled_actions_only():
    # an unprofiled one would be an error
    options = {"action": "configuration", "unprofiled": "error"}
    env = ConfigBanditEnv(SPARSE, **options)
    for seed in range(30):
        _, info = env.reset(seed=seed)
        env.step(env.action_space.sample(info["action_mask"]))
    many = ConfigBanditVectorEnv(5, SPARSE, **options)
    _, infos = many.reset(seed=0)
    for _ in range(10):
        actions = many.action_space.sample(tuple(infos["action_mask"]))
        *_, infos = many.step(actions)


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
    drawn = {tuple(env.action_space.sample(info["action_mask"])) for _ in range(40)}
    assert drawn == set(map(tuple, profiled))


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
        with input_error(r"max_crops.*top_k.*num_active_blocks"):
            env.step(wrong)
    many = ConfigBanditVectorEnv(3, TABLE, action_keys="knobs")
    many.reset(seed=0)
    actions = many.action_space.sample()
    final = many.step(actions)[-1]["final_info"]
    columns = [actions[name].tolist() for name in sizes]
    assert final["configuration"].T.tolist() == columns


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
        others = (after, *infos["final_obs"])
        assert not any(np.shares_memory(value, other[key]) for other in others)


def test_a_missing_feature_shows_as_the_median_of_its_column():
    table = small_table()
    block = table.features["image_features"]
    block[:, 0] = torch.arange(60.0)
    block[:10, 0] = NAN  # of 10 … 59 the lower median is 34
    env = ConfigBanditEnv(table, rows=torch.arange(10))
    assert env.reset(seed=0)[0]["image_features"][0] == 34
    assert block[:10, 0].isnan().all()


def test_the_observation_space_fits_on_a_screen_and_holds_what_is_observed():
    env = gymnasium.make(ID)
    space = env.observation_space
    assert len(str(space)) < 800
    assert list(space) == ["budget_ms", "image_features", "language_features", "mask"]
    assert space["budget_ms"].shape == (1,)
    features = env.unwrapped.table.features["image_features"]
    assert space["image_features"].low.max() == features.min()
    assert space["image_features"].high.min() == features.max()
    # of constant features too
    constant = replace(TABLE, features={"x": torch.zeros(60, 2)})
    space = ConfigBanditEnv(constant).observation_space["x"]
    assert (space.low < space.high).all()


# -- many at once ----------------------------------------------------------------------------------

IN_THE_OBSERVATION = {"image_features", "language_features", "budget_ms", "mask"}
NO_NUMBERS = {"sample_id", "action_mask"}
OUTCOMES = {"accuracy", "latency_ms", "violation", "configuration"}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_reset_mode_goes_as_gymnasium_goes(mode):
    rows = torch.arange(7, 8)  # one sample and one budget, so that values can be compared too
    one = [lambda: ConfigBanditEnv(TABLE, TWELVE, rows=rows)]
    stock = SyncVectorEnv(one * 4, autoreset_mode=mode)
    ours = ConfigBanditVectorEnv(4, TABLE, TWELVE, rows=rows, autoreset_mode=mode.value)
    assert ours.metadata["autoreset_mode"] == ours.autoreset_mode == mode
    actions = np.array([[0, 0, 0], [2, 1, 1], [1, 0, 1], [0, 1, 0]])
    results = []
    for env in (stock, ours):
        told = [env.reset(seed=0)]
        for _ in range(3):
            told.append(env.step(actions))
            if mode == AutoresetMode.DISABLED:
                mask = np.array([True, False, True, True])
                told += [env.reset(options={"reset_mask": m}) for m in (mask, ~mask)]
        results.append(told)
    for theirs, mine in zip(*results, strict=True):
        compare(theirs[0], mine[0])
        for expected, got in zip(theirs[1:-1], mine[1:-1], strict=True):
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
        compare_infos(theirs[-1], mine[-1])


def compare(theirs, mine):
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name])
        assert value.dtype == theirs[name].dtype


def unknown(infos):
    """The outcomes, if there are none yet, which single environments say by NaN and such."""
    if "accuracy" in infos and np.isnan(infos["accuracy"][infos["_accuracy"]]).all():
        return {name for name in infos if "oracle" in name} | OUTCOMES
    return set()


def compare_infos(theirs, mine):
    """Vector infos hold numbers only, and nothing twice; `configuration` is indices of values."""
    public = {name for name in theirs if not name.startswith("_")} - unknown(theirs)
    known = {name for name in mine if not name.startswith("_")}
    assert public - NO_NUMBERS - {"mask", "budget_ms"} == known - IN_THE_OBSERVATION
    for name in public & known:
        expected, value = theirs[name], mine[name]
        if f"_{name}" in theirs:
            assert mine[f"_{name}"].tolist() == theirs[f"_{name}"].tolist()
        if name == "final_info":
            compare_infos(expected, value)
        elif name == "final_obs":
            list(map(compare, expected, value))
        elif "configuration" not in name:
            given = mine[f"_{name}"]
            if name == "budget_ms":
                value = value[:, 0]  # of an observation; theirs is a number for people
            np.testing.assert_array_equal(value[given], expected[given])


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_contexts_are_kept_or_drawn_at_the_right_step(mode):
    env = vector(mode, table=TABLE)
    ahead = ConfigBanditVectorEnv(3, TABLE)
    drawn = [ahead.reset(seed=1)[0], *(ahead.reset()[0] for _ in range(3))]
    compare(env.reset(seed=1)[0], drawn[0])
    for number in range(3):
        observations, _, ended, _, infos = env.step(NOTHING)
        assert ended.all()
        if mode == AutoresetMode.NEXT_STEP:
            compare(observations, drawn[number])
            assert "accuracy" in infos
            observations, rewards, ended, cut, infos = env.step(NOTHING)
            assert rewards.tolist() == [0, 0, 0]
            assert not (ended | cut).any()
            assert "accuracy" not in infos
        compare(observations, drawn[number + 1])


def test_with_reset_mode_disabled_no_context_is_decided_twice():
    env = vector(AutoresetMode.DISABLED, table=TABLE)
    first = {"reset_mask": np.array([True, False, True])}
    before, _ = env.reset(seed=0, options=first)  # the first one draws all
    env.step(NOTHING)
    after, infos = env.reset(options=first)
    assert infos["_row"].tolist() == [True, False, True]
    assert (after["budget_ms"] != before["budget_ms"]).tolist() == [[True], [False], [True]]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(NOTHING)
    env.reset(options={"reset_mask": np.array([False, True, False])})
    env.step(NOTHING)
    for mask in (np.array([1, 0, 1]), np.array([True]), [True, 0, 1]):
        with input_error("reset_mask"):
            env.reset(options={"reset_mask": mask})
    with input_error("reset_mask"):
        vector(AutoresetMode.SAME_STEP, table=TABLE).reset(options=first)


@pytest.mark.parametrize("rows", [[3, 5], np.array([3, 5])])
def test_rows_may_be_any_whole_numbers(rows):
    env = ConfigBanditEnv(TABLE, rows=rows)
    assert {env.reset()[1]["row"] for _ in range(20)} == {3, 5}
    with input_error("row="):
        env.reset(options={"row": 4})


def test_a_path_instead_of_a_table_says_how_to_read_it():
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(TypeError, match=r"^the environment .*'tabel'"):
            make("knobwise/ConfigBandit-v0", tabel=1)
    with pytest.raises(TypeError, match=r"^the environment .*'groupsize'"):
        ConfigBandit(small_table(), groupsize=8)
    with input_error(r"table=.*read"):
        gymnasium.make(ID, table="measured.csv")


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_make_vec_takes_every_reset_mode(mode, vectorization):
    arguments = {"autoreset_mode": mode}
    if vectorization == "sync":
        arguments = {"vector_kwargs": arguments}
    env = gymnasium.make_vec(
        ID, num_envs=2, vectorization_mode=vectorization, table=TABLE, **arguments
    )
    assert env.metadata["autoreset_mode"] == mode
    statistics = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    observations, _ = statistics.reset(seed=0)
    assert env.observation_space.contains(observations)
    observations, rewards, *_, infos = statistics.step(env.action_space.sample())
    assert env.observation_space.contains(observations)
    assert infos["episode"]["r"].tolist() == pytest.approx(rewards.tolist())


# -- a seed for each environment -------------------------------------------------------------------


def many_and_single(count=3, **options):
    singles = [ConfigBanditEnv(TABLE, **options) for _ in range(count)]
    return ConfigBanditVectorEnv(count, TABLE, **options), singles


@pytest.mark.parametrize("seeds", [[5, 7, 9], (9, 7, 5), np.array([0, 1, 2]), [4, 4, 4]], ids=str)
@pytest.mark.parametrize("options", [None, {"row": [3, 1, 2]}, {"budget_ms": 9.0}], ids=str)
def test_each_environment_gets_the_context_of_its_own_seed(seeds, options):
    many, singles = many_and_single()
    observations, infos = many.reset(seed=seeds, options=options)
    for i, (env, seed) in enumerate(zip(singles, seeds, strict=True)):
        of_one = options and {
            name: value[i] if isinstance(value, list) else value for name, value in options.items()
        }
        wanted, info = env.reset(seed=int(seed), options=of_one)
        assert infos["row"][i] == info["row"]
        for name, block in wanted.items():
            np.testing.assert_array_equal(observations[name][i], block)
    # it is gymnasium's own way too
    theirs, _ = SyncVectorEnv([lambda: ConfigBanditEnv(TABLE)] * 3).reset(seed=[5, 7, 9])
    mine, _ = many.reset(seed=[5, 7, 9])
    compare(theirs, mine)


def test_the_same_seeds_repeat_everything_and_a_seed_may_be_left_out():
    many, singles = many_and_single(2)
    for _ in range(2):
        steps = []
        for env in (many, ConfigBanditVectorEnv(2, TABLE)):
            env.reset(seed=[5, 7])
            steps.append([env.step(NOTHING[:2])[0] for _ in range(3)])
        for first, second in zip(*steps, strict=True):
            compare(first, second)
    wanted, _ = singles[0].reset(seed=7)
    drawn = set()
    for _ in range(20):
        observations, infos = many.reset(seed=[None, 7])
        drawn.add(int(infos["row"][0]))
        np.testing.assert_array_equal(observations["image_features"][1], wanted["image_features"])
    assert len(drawn) > 1


def test_seeds_and_a_mask_of_resets():
    many = ConfigBanditVectorEnv(2, TABLE, autoreset_mode=AutoresetMode.DISABLED)
    _, before = many.reset(seed=[1, 2])
    mask = np.array([False, True])
    _, after = many.reset(seed=[8, 9], options={"reset_mask": mask})
    _, fresh = many.reset(seed=[8, 9])
    assert after["row"].tolist() == [before["row"][0], fresh["row"][1]]


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3], [-1, 2], []], ids=str)
def test_seeds_of_other_environments_are_refused(seeds):
    with input_error("seed="):
        ConfigBanditVectorEnv(2, TABLE).reset(seed=seeds)
