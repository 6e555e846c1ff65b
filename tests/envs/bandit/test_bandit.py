"""The native bandit: what a step gives, and how it goes with TorchRL's workers, wrappers and
transforms."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import close, identical, input_error, repeated, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Categorical
from torchrl.envs import (
    ActionMask,
    CatTensors,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EnvCreator,
    ExcludeTransform,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNormV2,
    check_env_specs,
)

from knobwise.envs import ConfigBandit, ContextState, RewardConfig
from knobwise.envs.bandit.replay import Replay
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import TRAINING_REWARD

FULL = small_table()
SPARSE = small_table(holes=0.68)
SPARSE_REPEATED = repeated(small_table(holes=0.6, features=False))
NAN = math.nan
KEYS = {"action_keys": "knobs"}
FORMS = [
    {**kind, "group_size": group}
    for kind in ({"action": "knobs"}, {"action": "configuration"}, KEYS)
    for group in (None, 1, 3)
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def slowest(row):
    return torch.tensor([2, 1, 1]).expand(*row.shape, 3)


def right(step, budgets_ms=None):
    """Whether the rewards are those of the formula, for knob actions [P, K] in the full table."""
    budgets_ms = step["budget_ms"] if budgets_ms is None else budgets_ms
    chosen = FULL.find(step["action"].unsqueeze(1))
    wanted = RewardTable(FULL, TRAINING_REWARD).chosen(step["row"], chosen, budgets_ms)
    return torch.equal(step["next", "reward"], wanted)


def make(table=SPARSE, **options):
    """Picklable, by default on a table with holes."""
    return ConfigBandit(table, batch_size=4, **options)


def contexts(tensordict):
    """Rows with their budgets."""
    pairs = (tensordict[name].flatten().tolist() for name in ("row", "budget_ms"))
    return list(zip(*pairs, strict=True))


# -- observations and outcomes ---------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("contiguous", [True, False])
def test_specs_hold_in_every_form(form, contiguous):
    for env in (
        ConfigBandit(SPARSE, batch_size=1, full_information=True, **form),
        make(SPARSE_REPEATED, observe_features=False, full_information=True, **form),
        SerialEnv(2, lambda: make(**form)),
        TransformedEnv(make(group_size=3), TRANSFORMS["several"]()),
    ):
        # without this TorchRL compares three steps with one, also of other environments whose
        # episodes are one step
        check_env_specs(env, return_contiguous=contiguous, break_when_any_done=False)


def test_shapes_of_everything():
    env = make(FULL, group_size=3, full_information=True)
    out = env.rollout(1).squeeze(-1)
    assert {key: tuple(value.shape) for key, value in out.exclude("next").items()} == {
        "row": (4,),
        "budget_ms": (4,),
        "mask": (4, 12),
        "reward_per_configuration": (4, 12),
        "image_features": (4, 4),
        "language_features": (4, 4),
        "accuracy": (4, 3),
        "latency_ms": (4, 3),
        "action": (4, 3, 3),
        "done": (4, 1),
        "terminated": (4, 1),
    }
    assert out["next", "reward"].shape == (4, 3)
    contexts_alone = ConfigBandit(FULL, observe_features=False).reset()
    assert set(contexts_alone.keys()) == {"row", "budget_ms", "done", "terminated"}
    assert "60 samples × 12 configurations, budget quantiles, reward utility" in repr(env)


def test_every_episode_is_one_decision_and_a_rollout_goes_on():
    env = make(group_size=2)
    out = env.rollout(5)
    assert out["next", "done"].all()
    assert contexts(out["next"]) == contexts(out)
    assert len(out["budget_ms"].unique()) == 20  # and the next one is another
    for stop in ("break_when_any_done", "break_when_all_done"):
        assert env.rollout(3, **{stop: True}).shape == (4, 1)


@pytest.mark.parametrize("kind", ["shaped", "utility"])
def test_a_step_gives_what_was_measured_for_the_sample_and_the_action(kind):
    table = small_table(holes=0.3)
    config = RewardConfig(kind=kind)
    env = ConfigBandit(table, batch_size=30, group_size=4, full_information=True, reward=config)
    out = env.rollout(1).squeeze(-1)
    rows, following = out["row"], out["next"]
    chosen = table.find(out["action"])
    for name in ("accuracy", "latency_ms"):
        identical(following[name], getattr(table, name)[rows[:, None], chosen])
    identical(out["mask"], table.mask[rows])
    identical(out["image_features"], table.features["image_features"][rows])
    wanted = RewardTable(table, config).chosen(rows, chosen, out["budget_ms"])
    identical(following["reward"], wanted)
    every = out["reward_per_configuration"]
    identical(every.isnan(), ~out["mask"])
    close(every.gather(1, chosen), wanted)


def test_random_actions_are_drawn_evenly_among_what_was_profiled():
    table = small_table(holes=0.5)
    env = ConfigBandit(table, group_size=8_000)
    for row in range(3):
        action = env.rand_action(env.reset().set("row", torch.tensor([row])))["action"]
        share = table.find(action).flatten().bincount(minlength=12) / 8_000
        mask = table.mask[row]
        close(share, mask / mask.sum(), within=0.02)
        identical(share > 0, mask)


# -- seeds and state -------------------------------------------------------------------------------


def test_without_a_seed_environments_draw_different_contexts_which_manual_seed_fixes():
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([contexts(make().reset()) for _ in range(2)])
    assert drawn[0] == drawn[1]
    assert not {*drawn[0][0]} & {*drawn[0][1]}
    # with a seed nobody else's random numbers matter
    env, same = make(seed=3), make(seed=3)
    env.rollout(2)
    torch.rand(100)
    same.rollout(2)
    assert contexts(env.reset()) == contexts(same.reset())


@pytest.mark.parametrize("workers", [make, [make, lambda: make()]])
def test_workers_draw_different_contexts_and_take_seeds(workers):
    env = SerialEnv(2, workers)
    assert len(set(contexts(env.reset()))) == 8
    following = env.set_seed(5)
    alone = make()
    wanted = []
    seed = 5
    for _ in range(2):
        seed = alone.set_seed(seed)
        wanted += contexts(alone.reset())
    assert following == seed
    assert contexts(env.reset()) == wanted


def collector(env, policy):
    options = {"reset_at_each_iter": True, "auto_register_policy_transforms": False}
    return Collector(env, policy, frames_per_batch=8, total_frames=-1, **options)


def test_the_state_carries_the_generator():
    for new in (make, EnvCreator(make), lambda: SerialEnv(2, make)):
        env, other = new(), new()
        env.reset()
        assert contexts(env.reset()) != contexts(other.reset())
        other.load_state_dict(env.state_dict())
        assert contexts(other.reset()) == contexts(env.reset())


def kept():
    """Picklable, with a transform that saves the contexts."""
    return TransformedEnv(make(), Compose(StepCounter(), ContextState()))


PLACES = {
    "in one": kept,
    "in workers": partial(SerialEnv, 2, kept),
    "workers": partial(SerialEnv, 2, make),
    "around workers": lambda: TransformedEnv(SerialEnv(2, make), ContextState()),
    "around processes": lambda: TransformedEnv(
        ParallelEnv(2, make, mp_start_method="forkserver"), ContextState()
    ),
}


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("place", PLACES)
def test_a_collector_goes_on_with_the_contexts_that_it_saved(place):
    policy = TensorDictModule(slowest, ["row"], ["action"])
    first, second = (collector(PLACES[place](), policy) for _ in range(2))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert contexts(next(iter(second))) == contexts(next(iter(first)))
    for each in (first, second):
        each.shutdown()


def test_of_an_environment_alone_a_collector_saves_nothing_and_it_is_said():
    plain = collector(make(), TensorDictModule(slowest, ["row"], ["action"]))
    with pytest.warns(UserWarning, match="ContextState"):
        plain.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="ContextState"):
        ContextState().state_dict()


# -- the contexts that a step decides for ----------------------------------------------------------


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("observe_features", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_step_from_row_budget_and_action_alone(reset, observe_features, wrapped):
    env = bandit = ConfigBandit(FULL, batch_size=2, observe_features=observe_features, seed=0)
    if wrapped:
        env = TransformedEnv(bandit, DoubleToFloat())
    context = TensorDict({"row": [17, 3], "budget_ms": [12.0, 30.0]}, [2])
    if reset:
        assert not torch.equal(env.reset()["row"], context["row"])
    generator = bandit.get_extra_state()
    out = env.rand_step(context)
    assert right(out)
    following = out["next"]
    assert contexts(following) == [(17, 12.0), (3, 30.0)]
    if observe_features:
        identical(following["image_features"], FULL.features["image_features"][[17, 3]])
    identical(bandit.get_extra_state(), generator)


def test_what_a_person_changes_in_a_context_holds():
    env = make(FULL)
    context = env.rand_action(env.reset())
    context["row"][:] = 5  # in place
    context["budget_ms"] *= 2
    context["image_features"].fill_(7.0)
    context["mask"] = torch.zeros_like(context["mask"])
    out = env.step(context)
    assert right(out)
    # features and mask are those of the table, whatever was done to them
    identical(out["next", "image_features"], FULL.features["image_features"][[5] * 4])
    assert out["next", "mask"].all()


CHANGES = {
    "in place": lambda values: values.fill_(7),
    "through a view": lambda values: values[1:].zero_(),
    "in NumPy": lambda values: values.numpy().fill(7),
    "from the memory": lambda values: values.untyped_storage().fill_(1),
}


class LogBudget(Transform):
    """Shows ln of the budget, perhaps written over the budget."""

    def __init__(self, in_place):
        super().__init__(in_keys=["budget_ms"], out_keys=["budget_ms"])
        self.in_place = in_place

    def _apply_transform(self, values):
        return values.log_() if self.in_place else values.log()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def test_a_transform_that_writes_over_the_limit_changes_no_deadline():
    seen = []
    for in_place in (False, True):
        env = TransformedEnv(make(FULL, full_information=True, seed=0), LogBudget(in_place))
        torch.manual_seed(0)
        seen.append(env.rollout(3, break_when_any_done=False))
    identical(*seen)


def test_rewards_of_all_configurations_follow_a_limit_that_was_changed_in_place():
    env = make(FULL, full_information=True)
    context = env.rand_step(env.reset())
    for limit in (1e6, 1e-6):
        context["budget_ms"].fill_(limit)
        rewards = env.step(context)["next", "reward_per_configuration"]
        identical(rewards, env.rewards.all(context["row"], context["budget_ms"]))


@pytest.mark.parametrize("when", ["before the step", "after it"])
@pytest.mark.parametrize("changed", CHANGES)
def test_what_was_returned_may_be_changed_and_changes_nothing_else(changed, when):
    env = make(FULL)
    context = env.rand_action(env.reset())
    untouched = context.clone()
    names = ["image_features", "mask"]
    if when == "before the step":
        for name in names:
            CHANGES[changed](context[name])
    following = env.step(context)["next"]
    again = env.step(untouched.clone())["next"]
    if when == "after it":
        for name in names:
            CHANGES[changed](following[name])
            identical(context[name], untouched[name])
        following = env.step(untouched.clone())["next"]
    for name in names:
        identical(following[name], untouched[name])
        identical(again[name], untouched[name])


def test_an_outcome_that_is_there_is_replaced_and_what_a_person_added_stays():
    env = make(FULL)
    context = env.rand_action(env.reset())
    wanted = env.step(context.clone())["next"]
    added = torch.arange(4)
    old = wanted.clone().set("reward", torch.full_like(wanted["reward"], 9.0)).set("mine", added)
    following = env.step(context.set("next", old))["next"]
    identical(following["mine"], added)
    identical(following.exclude("mine"), wanted)


@every_form
def test_what_is_missing_is_as_in_the_last_reset(form):
    env = make(unprofiled="error", **form)
    assert env.rand_step()["next", "reward"].isfinite().all()  # before any reset contexts are drawn
    context = env.reset()
    for _ in range(5):
        alone = env.rand_action()
        assert not {"row", "budget_ms"} & set(alone.keys())
        full = env.step(context.clone().update(alone))["next"]
        identical(env.step(alone)["next"], full)


def test_a_partial_reset_leaves_the_other_contexts():
    env = make(FULL)
    before = env.reset()
    wanted = torch.tensor([True, False, False, True])
    after = env.reset(before.clone().set("_reset", wanted.unsqueeze(1)))
    identical(after["budget_ms"] != before["budget_ms"], wanted)
    assert right(after.update(env.rand_step()))


# -- transforms ------------------------------------------------------------------------------------

BLOCKS = ["image_features", "language_features"]
SEEN = ["budget_ms", *BLOCKS]
TRANSFORMS = {
    "ObservationNorm": lambda: ObservationNorm(0.0, 2.0, in_keys=SEEN),
    "CatTensors": lambda: Compose(
        UnsqueezeTransform(-1, in_keys=["budget_ms"]), CatTensors(SEEN, "observation")
    ),
    "DTypeCastTransform": lambda: DTypeCastTransform(torch.float32, torch.float64, in_keys=SEEN),
    "several": lambda: Compose(RewardSum(), StepCounter(), DoubleToFloat()),
}


@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_each_observation_once(name, collect):
    plain = make(FULL, seed=0)
    env = TransformedEnv(make(FULL), TRANSFORMS[name]())
    check_env_specs(env)
    env.set_seed(0)
    if collect:
        out = next(iter(Collector(env, None, frames_per_batch=12)))
    else:
        out = env.rollout(3, break_when_any_done=False)
    for step in out.unbind(1):
        context = plain.reset()
        following = step["next"]
        wanted = plain.step(context.clone().set("action", step["action"]))["next"]
        for key in ("reward", "row", "accuracy"):
            identical(following[key], wanted[key])
        for result, raw in ((step, context), (following, wanted)):
            if name == "CatTensors":
                blocks = [raw["budget_ms"][:, None], *(raw[block] for block in BLOCKS)]
                identical(result["observation"], torch.cat(blocks, 1))
                continue
            factor = 2 if name == "ObservationNorm" else 1
            dtype = torch.float64 if name == "DTypeCastTransform" else torch.float32
            for key in SEEN:
                identical(result[key], (factor * raw[key]).to(dtype))
        if name == "several":
            assert following["step_count"].eq(1).all()
            identical(following["episode_reward"], following["reward"])


@pytest.mark.parametrize("outside", [True, False])
def test_transforms_around_workers_and_in_them(outside):
    def normalised(env):
        return TransformedEnv(env, ObservationNorm(0.0, 2.0, in_keys=["budget_ms"]))

    plain = partial(make, FULL)
    env = normalised(SerialEnv(2, plain)) if outside else SerialEnv(2, lambda: normalised(plain()))
    out = env.rollout(3, break_when_any_done=False).flatten()
    identical(out["next", "budget_ms"], out["budget_ms"])
    assert right(out, out["budget_ms"] / 2)


@pytest.mark.parametrize(
    "hides", [ObservationNorm(0.0, 2.0, in_keys=["budget_ms"]), ExcludeTransform("budget_ms")]
)
def test_limits_that_a_transform_hides_are_never_guessed(hides):
    env = TransformedEnv(make(FULL), hides)
    context = env.reset()
    env.rand_step(context)
    env.reset()  # another loop in between
    with input_error("row: .* budget_ms"):
        env.rand_step(context.exclude("next"))


def test_two_loops_may_share_an_environment_whose_limits_no_transform_changes():
    env = TransformedEnv(make(FULL), StepCounter())
    context = env.reset()
    env.rollout(1)
    assert right(env.rand_step(context))


# -- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, 1, 3])
def test_every_kind_of_action_gets_what_knobs_get(group):
    env = make(group_size=group, seed=0)
    out = env.rand_action(env.reset())
    wanted = env.step(out.clone())["next"]
    action = out["action"]
    names = [knob.name for knob in SPARSE.knobs]
    for other, changed in (
        (make(group_size=group, **KEYS), dict(zip(names, action.unbind(-1), strict=True))),
        (make(group_size=group, action="configuration"), {"action": SPARSE.find(action)}),
        (env, {"action": action.int()}),
    ):
        assert other.action_keys == sorted(changed)
        identical(other.step(out.clone().update(changed))["next"], wanted)


@every_form
def test_the_group_axis_of_one_decision_may_be_missing(form):
    env = make(**form, seed=0)
    context = env.rand_action(env.reset())
    wanted = env.step(context.clone())["next", "reward"]
    group = form["group_size"]
    changed = context.clone()
    for key in env.action_keys:
        action = context[key]
        changed[key] = action.unsqueeze(1) if group is None else action[:, 0]
        context[key] = action.float()
    if group == 3:
        with input_error("action: is"):
            env.step(changed)
    else:
        identical(env.step(changed)["next", "reward"], wanted)
    with input_error("float32"):
        env.step(context)


def test_the_mask_keeps_random_policies_to_profiled_configurations():
    base = make(action="configuration", unprofiled="error")
    env = TransformedEnv(base, ActionMask(mask_key="mask"))
    check_env_specs(env)
    out = env.rollout(50, break_when_any_done=False)
    assert SPARSE.mask[out["row"], out["action"]].all()
    drawn = env.reset().set("action", env.action_spec.rand())
    assert env.step(drawn)["next", "reward"].isfinite().all()


@pytest.mark.filterwarnings("ignore:Support of VecNormV2 .* experimental:UserWarning")
@pytest.mark.parametrize("table", [FULL, SPARSE], ids=["full", "holes"])
@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize("action", ["knobs", "configuration"])
@pytest.mark.parametrize("name", [*TRANSFORMS, "VecNormV2"])
def test_under_any_transform_random_actions_are_profiled_ones(name, action, group, table):
    options = {"action": action, "group_size": group, "unprofiled": "error"}
    transform = TRANSFORMS.get(name, lambda: VecNormV2(in_keys=["budget_ms"]))()
    env = TransformedEnv(make(table, **options), transform)
    check_env_specs(env)
    env.rollout(5)  # an action that was not profiled would be an error


def test_the_spec_of_an_action_is_that_of_every_context():
    env = make(action="configuration")
    before = env.action_spec.clone()
    env.rollout(2)
    assert env.action_spec.mask is None
    assert env.action_spec == before
    masked = before.clone()
    masked.update_mask(SPARSE.mask[:4])
    assert masked == before
    fewer = type(before)(11, before.shape)
    other = Categorical(12, before.shape)
    assert before not in (fewer, other)


@pytest.mark.parametrize("unprofiled", ["nearest", "penalty", "error"])
@pytest.mark.parametrize(
    ("action", "wrong", "fault"),
    [
        ("knobs", [0, -1, 0], "top_k has no index -1; .* 0 to 1"),
        ("knobs", [0, 2, 0], "top_k has no index 2; .* 0 to 1"),
        ("configuration", -1, "has no index -1; .* 0 to 11"),
        ("configuration", 12, "has no index 12; .* 0 to 11"),
    ],
)
def test_actions_outside_their_range_are_refused(unprofiled, action, wrong, fault):
    env = ConfigBandit(SPARSE, unprofiled=unprofiled, action=action)
    with input_error(fault):
        env.step(TensorDict({"action": torch.tensor([wrong])}, [1]))


def test_settings_that_cannot_be_are_refused():
    for options in (
        {**KEYS, "action": "configuration"},
        {"action_keys": "knob"},
        {"repeats": "mean"},
        {"unprofiled": "guess"},
    ):
        with input_error(f"^{next(iter(options))}"):
            make(**options)
    named = replace(FULL, knobs=(replace(FULL.knobs[0], name="mask"), *FULL.knobs[1:]))
    assert ConfigBandit(named).action_keys == ["action"]
    with input_error("knob mask"):
        ConfigBandit(named, **KEYS)


# -- what was not profiled -------------------------------------------------------------------------


def test_each_answer_to_an_unprofiled_action_by_hand():
    table = table_of([[0.1, NAN, NAN, 0.9], [0.5] * 4], [[1.0, NAN, NAN, 4.0], [1.0] * 4])
    decisions = torch.tensor([0]), torch.tensor([[[0], [1], [2], [3]]]), torch.tensor([2.0])
    # the worst of the sample is late: −0.2
    for unprofiled, rewards, accuracies in (
        ("nearest", [0.1, 0.1, -0.2, -0.2], [0.1, 0.1, 0.9, 0.9]),
        ("penalty", [0.1, -1.2, -1.2, -0.2], [0.1, 0.0, 0.0, 0.9]),
    ):
        out = Replay(table, unprofiled=unprofiled)(*decisions)
        identical(out.configuration, [[0, 0, 3, 3]])
        assert out.reward[0].tolist() == pytest.approx(rewards)
        assert out.accuracy[0].tolist() == pytest.approx(accuracies)
        identical(out.latency_ms, [[1.0, 1.0, 4.0, 4.0]])
    with input_error("2 of .*sample '0' of 'by hand'"):
        Replay(table, unprofiled="error")(*decisions)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(0.1, 0.95), st.booleans())
def test_the_nearest_profiled_configuration_is_replayed(seed, holes, by_knobs):
    table = small_table(samples=20, seed=seed, holes=holes)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(20, (8,), generator=generator)
    index = torch.randint(12, (8, 3), generator=generator)
    action = table.configurations[index]
    replay = Replay(table, action="knobs" if by_knobs else "configuration")
    out = replay(rows, action if by_knobs else index, limits := torch.full((8,), 10.0))
    profiled = table.mask[rows]
    steps = (action.unsqueeze(2) - table.configurations).abs().sum(-1)  # [8, 3, C]
    steps = steps.where(profiled[:, None], 99)
    identical(steps.gather(2, out.configuration[..., None])[..., 0], steps.amin(-1))
    assert profiled.gather(1, out.configuration).all()
    identical(out.reward, replay.rewards.chosen(rows, out.configuration, limits))
    identical(out.configuration == index, profiled.gather(1, index))


# -- cells that were measured repeatedly -----------------------------------------------------------


@pytest.mark.parametrize("unprofiled", ["nearest", "penalty"])
def test_every_measurement_is_drawn_about_equally_often_and_what_is_shown_is_rewarded(unprofiled):
    first, second = [1.0, 2.0, 3.0], [4.0, 5.0]
    table = table_of(
        [[0.9, 0.8, NAN], [1.0] * 3], [[first, [*second, NAN], [NAN] * 3], [[1.0] * 3] * 3]
    )
    options = {"action": "configuration", "unprofiled": unprofiled, "rows": torch.tensor([0])}
    env = ConfigBandit(table, batch_size=6000, seed=0, **options)
    for configuration, values in enumerate((first, second, second)):
        context = env.reset().set("action", torch.full((6000,), configuration))
        out = env.step(context)["next"]
        latency_ms = out["latency_ms"]
        share = torch.tensor([(latency_ms == value).float().mean() for value in values])
        # some five standard errors
        close(share, torch.full_like(share, 1 / len(values)), within=0.03)
        if configuration < 2 or unprofiled == "nearest":
            wanted = torch.where(latency_ms <= out["budget_ms"], out["accuracy"], -0.2)
            identical(out["reward"].squeeze(1), wanted)


def test_single_measurements_take_no_draw():
    for table, draws in ((FULL, False), (repeated(FULL), True)):
        env = ConfigBandit(table, seed=3)
        env.reset()
        before = env.get_extra_state()
        env.rand_step()
        assert torch.equal(env.get_extra_state(), before) != draws
