"""The native bandit as TorchRL people use it: workers, wrappers, transforms, steps by hand, sparse
profiles."""

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import (
    ActionMask,
    CatTensors,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
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
    check_env_specs,
)

from knobwise.common.errors import InputError
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import TRAINING_REWARD, BudgetConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit

FULL, SPARSE = small_table(), small_table(holes=0.68)
FORMS: list[dict[str, Any]] = [
    {"action": action, "group_size": group}
    for action in ("knobs", "configuration")
    for group in (None, 1, 3)
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def make(**options: Any) -> ConfigBandit:
    """Picklable, on a table with holes."""
    return ConfigBandit(SPARSE, batch_size=4, **options)


def contexts(tensordict: TensorDictBase) -> list[tuple[int, float]]:
    """Rows with their budgets."""
    return list(
        zip(
            tensordict["row"].flatten().tolist(),
            tensordict["budget_ms"].flatten().tolist(),
            strict=True,
        )
    )


def reward_of(rows: Tensor, action: Tensor, budgets_ms: Tensor) -> Tensor:
    """By the formula, [P, 1], of knob actions [P, K] in the full table."""
    return RewardTable(FULL, TRAINING_REWARD).chosen(
        rows, FULL.find(action.unsqueeze(1)), budgets_ms
    )


# -- seeds -----------------------------------------------------------------------------------------


def test_without_a_seed_environments_draw_different_contexts_which_manual_seed_fixes() -> None:
    first, second = make().rollout(1), make().rollout(1)
    assert not set(contexts(first)) & set(contexts(second))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(contexts(make().reset()))
    assert drawn[0] == drawn[1]
    # with a seed nobody else's random numbers matter
    env, same = make(seed=3), make()
    same.set_seed(3)
    env.reset()
    torch.rand(100)
    env.rollout(1)
    same.reset()
    same.rollout(1)
    assert contexts(env.reset()) == contexts(same.reset())


FORKED = """
import multiprocessing
from knobwise.envs.configurations.contexts import fresh_seed
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
for _ in range(2):
    context.Process(target=lambda: queue.put(fresh_seed())).start()
print(queue.get(), queue.get(), fresh_seed())
"""


def test_forked_processes_which_share_torchs_generator_draw_different_seeds() -> None:
    """In a process of its own, because threads of this one may hold locks that a fork would keep
    for ever."""
    printed = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=120
    )
    seeds = {int(seed) for seed in printed.stdout.split()}
    assert len(seeds) == 3
    assert min(seeds) >= 0


@pytest.mark.parametrize("workers", [make, [make, lambda: make()]])
def test_workers_of_serial_draw_different_contexts_and_take_seeds(workers: Any) -> None:
    env = SerialEnv(2, workers)
    drawn = contexts(env.reset())
    assert len(set(drawn)) == 8
    following = env.set_seed(5)
    alone = ConfigBandit(SPARSE, batch_size=4)
    wanted = []
    seed = 5
    for _ in range(2):
        seed = alone.set_seed(seed)
        wanted += contexts(alone.reset())
    assert following == seed
    assert contexts(env.reset()) == wanted


def test_parallel_workers_draw_different_contexts_and_replay_them() -> None:
    env = ParallelEnv(
        2, functools.partial(ConfigBandit, FULL, batch_size=4), mp_start_method="spawn"
    )
    try:
        out = env.rollout(3, break_when_any_done=False)
        assert len(set(contexts(out))) == 24
        flat = out.flatten()
        assert torch.equal(
            flat["next", "reward"], reward_of(flat["row"], flat["action"], flat["budget_ms"])
        )
        assert torch.equal(out["row"], out["next", "row"])
        runs = []
        for _ in range(2):
            env.set_seed(5)
            runs.append(contexts(env.reset()))
        assert runs[0] == runs[1]
        state = env.state_dict()
        drawn = contexts(env.reset())
        env.load_state_dict(state)
        assert contexts(env.reset()) == drawn
    finally:
        env.close()


@pytest.mark.usefixtures("_forked")
def test_workers_of_a_collector_draw_different_contexts() -> None:
    collector = MultiSyncCollector([make, make], None, frames_per_batch=16, total_frames=32)
    drawn = [context for batch in collector for context in contexts(batch)]
    collector.shutdown()
    assert len(set(drawn)) == 32


# -- state -----------------------------------------------------------------------------------------


def test_the_state_of_an_environment_carries_its_generator() -> None:
    env, other = make(), make()
    env.reset()
    other.load_state_dict(env.state_dict())
    assert contexts(other.reset()) == contexts(env.reset())
    serial, same = SerialEnv(2, make), SerialEnv(2, make)
    serial.reset()
    same.reset()
    same.load_state_dict(serial.state_dict())
    assert contexts(same.reset()) == contexts(serial.reset())


def test_environments_of_one_creator_do_not_share_a_generator() -> None:
    creator = EnvCreator(make)
    assert contexts(creator().reset()) != contexts(creator().reset())


class Slowest(nn.Module):
    def forward(self, row: Tensor) -> Tensor:
        return torch.tensor([2, 1, 1]).expand(*row.shape, 3)


def test_the_state_of_a_collector_is_loaded() -> None:
    def collector(env: EnvBase) -> Collector:
        options = {
            "frames_per_batch": 8,
            "reset_at_each_iter": True,
            "auto_register_policy_transforms": False,
        }
        return Collector(env, TensorDictModule(Slowest(), ["row"], ["action"]), **options)

    plain = collector(make())  # of an environment without workers TorchRL saves nothing
    plain.load_state_dict(plain.state_dict())
    first, second = (collector(SerialEnv(2, make)) for _ in range(2))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert contexts(next(iter(second))) == contexts(next(iter(first)))


# -- steps by hand ---------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("contiguous", [True, False])
def test_specs_hold_in_every_form(form: dict[str, Any], contiguous: bool) -> None:
    for batch_size, lean in ((1, False), (4, True)):
        env = ConfigBandit(SPARSE, batch_size=batch_size, lean=lean, **form)
        # without this TorchRL compares three steps with one, also of other environments whose
        # episodes are one step
        check_env_specs(env, return_contiguous=contiguous, break_when_any_done=False)
    check_env_specs(
        SerialEnv(2, lambda: make(**form)), return_contiguous=contiguous, break_when_any_done=False
    )


@pytest.mark.parametrize("group", [None, 1, 3])
def test_knobs_under_their_own_keys_get_what_one_tensor_gets(group: int | None) -> None:
    env = make(group_size=group, action_keys="knobs", unprofiled="error", seed=0)
    for contiguous in (True, False):
        check_env_specs(env, return_contiguous=contiguous)
    check_env_specs(SerialEnv(2, lambda: make(action_keys="knobs", group_size=group)))
    assert env.action_keys == sorted(knob.name for knob in SPARSE.knobs)
    out = env.rollout(1)  # of random actions, all profiled
    together = torch.stack([out[knob.name] for knob in SPARSE.knobs], -1)
    context = {name: out[name].squeeze(1) for name in ("row", "budget_ms")}
    other = make(group_size=group).step(TensorDict({**context, "action": together.squeeze(1)}, [4]))
    assert torch.equal(other["next", "reward"], out["next", "reward"].squeeze(1))


def test_keys_of_knobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="action_keys=knobs: action='configuration'"):
        make(action_keys="knobs", action="configuration")
    with pytest.raises(InputError, match="action_keys='knob'"):
        make(action_keys="knob")
    named = replace(FULL, knobs=(replace(FULL.knobs[0], name="mask"), *FULL.knobs[1:]))
    assert ConfigBandit(named).action_keys == ["action"]
    with pytest.raises(InputError, match="knob mask is called like another key"):
        ConfigBandit(named, action_keys="knobs")


def test_a_rollout_goes_on_unless_it_is_told_to_stop_when_an_episode_ends() -> None:
    env = make(seed=0)
    for contiguous in (True, False):
        check_env_specs(env, return_contiguous=contiguous)
    assert env.rollout(3).shape == (4, 3)
    assert (
        env.rollout(3, break_when_any_done=True).shape
        == env.rollout(3, break_when_all_done=True).shape
        == (4, 1)
    )


def test_an_environment_prints_its_table_and_settings_on_a_line() -> None:
    size = "'small': 60 samples × 12 configurations"
    assert (
        repr(make(group_size=3))
        == f"ConfigBandit({size}, budget quantiles, reward utility, batch 4, group 3)"
    )
    priced = make(budget=BudgetConfig(sense="mean"))
    assert repr(priced) == f"ConfigBandit({size}, budget mean, reward priced, batch 4, group 1)"


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: TransformedEnv(env, DoubleToFloat())]
)
def test_a_step_from_row_budget_and_action_alone(
    reset: bool, lean: bool, wrap: Callable[..., EnvBase]
) -> None:
    env = wrap(ConfigBandit(FULL, batch_size=2, lean=lean, seed=0))
    rows, budgets = torch.tensor([17, 3]), torch.tensor([12.0, 30.0])
    if reset:
        assert not torch.equal(env.reset()["row"], rows)
    action = torch.tensor([[0, 1, 0], [2, 0, 1]])
    out = env.step(TensorDict({"row": rows, "budget_ms": budgets, "action": action}, [2]))["next"]
    assert torch.equal(out["reward"], reward_of(rows, action, budgets))
    assert torch.equal(out["row"], rows)
    assert torch.equal(out["budget_ms"], budgets)
    if not lean:
        assert torch.equal(out["image_features"], FULL.features["image_features"][rows])
        assert torch.equal(out["accuracy"], FULL.accuracy[rows, FULL.find(action)])


def test_contexts_given_to_the_first_step_leave_the_generator_alone() -> None:
    env = ConfigBandit(FULL, batch_size=2, seed=0)
    given_contexts = {"row": torch.tensor([17, 3]), "budget_ms": torch.tensor([12.0, 30.0])}
    env.rand_step(TensorDict(given_contexts, [2]))
    assert contexts(env.reset()) == contexts(ConfigBandit(FULL, batch_size=2, seed=0).reset())


@pytest.mark.parametrize("lean", [True, False])
def test_what_a_person_changes_in_a_context_holds(lean: bool) -> None:
    env = ConfigBandit(FULL, batch_size=3, lean=lean)
    action = torch.zeros(3, 3, dtype=torch.int64)
    context = env.reset().set("action", action)
    context["budget_ms"] = budgets = torch.full((3,), 7.0)
    out = env.step(context.clone())
    assert torch.equal(out["next", "reward"], reward_of(context["row"], action, budgets))
    context = env.reset().set("action", action)
    context["row"][:] = 5  # in place
    context["budget_ms"] *= 2
    out = env.step(context)
    assert torch.equal(
        out["next", "reward"], reward_of(context["row"], action, context["budget_ms"])
    )
    if not lean:
        assert torch.equal(
            out["next", "image_features"], FULL.features["image_features"][context["row"]]
        )


@every_form
def test_what_is_missing_is_as_in_the_last_reset(form: dict[str, Any]) -> None:
    env = ConfigBandit(SPARSE, batch_size=4, unprofiled="error", **form)
    assert env.rand_step()["next", "reward"].isfinite().all()  # before any reset contexts are drawn
    context = env.reset()
    for _ in range(20):
        alone = env.rand_action()
        assert set(alone.keys()) == {"action"}
        full = env.step(context.clone().update(alone))
        torch.testing.assert_close(
            env.step(alone)["next"].to_dict(), full["next"].to_dict(), rtol=0, atol=0
        )


def test_a_step_does_not_depend_on_what_others_did_to_the_features() -> None:
    env = ConfigBandit(FULL, batch_size=2)
    context = env.rand_action(env.reset())
    context["image_features"].fill_(7.0)
    context["mask"] = torch.zeros_like(context["mask"])
    out = env.step(context)["next"]
    assert torch.equal(out["image_features"], FULL.features["image_features"][out["row"]])
    assert out["mask"].all()


def test_a_partial_reset_leaves_the_other_contexts() -> None:
    env = ConfigBandit(FULL, batch_size=4, seed=0)
    before = env.reset()
    after = env.reset(
        before.clone().set("_reset", torch.tensor([[True], [False], [False], [True]]))
    )
    assert torch.equal(
        after["budget_ms"] == before["budget_ms"], torch.tensor([False, True, True, False])
    )
    action = torch.zeros(4, 3, dtype=torch.int64)
    reward = env.step(TensorDict({"action": action}, [4]))["next", "reward"]
    assert torch.equal(reward, reward_of(after["row"], action, after["budget_ms"]))


# -- transforms ------------------------------------------------------------------------------------

BLOCKS = ["image_features", "language_features"]
TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "ObservationNorm": lambda: ObservationNorm(0.0, 2.0, in_keys=["budget_ms", *BLOCKS]),
    "CatTensors": lambda: Compose(
        UnsqueezeTransform(-1, in_keys=["budget_ms"]),
        CatTensors(["budget_ms", *BLOCKS], "observation"),
    ),
    "RewardSum": RewardSum,
    "StepCounter": StepCounter,
    "DTypeCastTransform": lambda: DTypeCastTransform(
        torch.float32, torch.float64, in_keys=["budget_ms", *BLOCKS]
    ),
    "DoubleToFloat": DoubleToFloat,
}


@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_each_observation_once(name: str, collect: bool) -> None:
    env = TransformedEnv(ConfigBandit(FULL, batch_size=4, seed=0), TRANSFORMS[name]())
    check_env_specs(env)
    env.set_seed(0)
    if collect:
        collector = Collector(env, None, frames_per_batch=12, total_frames=12)
        out = next(iter(collector))
        collector.shutdown()
    else:
        out = env.rollout(3, break_when_any_done=False)
    plain = ConfigBandit(FULL, batch_size=4, seed=0)
    for step in out.unbind(1):
        context = plain.reset()
        action, following = step["action"], step["next"]
        wanted = plain.step(context.clone().set("action", action))["next"]
        assert torch.equal(
            following["reward"], reward_of(context["row"], action, context["budget_ms"])
        )
        for result, raw in ((step, context), (following, wanted)):
            assert torch.equal(result["row"], raw["row"])
            assert torch.equal(result["accuracy"], raw["accuracy"])
            if name == "CatTensors":
                joined = torch.cat(
                    [raw["budget_ms"][:, None], *(raw[block] for block in BLOCKS)], 1
                )
                assert torch.equal(result["observation"], joined)
                continue
            for key in ("budget_ms", *BLOCKS):
                assert torch.equal(result[key], (2 if name == "ObservationNorm" else 1) * raw[key])
                assert (result[key].dtype == torch.float64) == (name == "DTypeCastTransform")
        if name == "StepCounter":
            assert following["step_count"].eq(1).all()
        if name == "RewardSum":
            assert torch.equal(following["episode_reward"], following["reward"])


def test_transforms_take_rewards_of_groups() -> None:
    env = TransformedEnv(
        make(group_size=3), Compose(RewardSum(), StepCounter(), TRANSFORMS["CatTensors"]())
    )
    check_env_specs(env)
    out = env.rollout(2, break_when_any_done=False)
    assert out["next", "episode_reward"].shape == (4, 2, 3)


@pytest.mark.parametrize("outside", [True, False])
def test_transforms_around_workers_and_in_them(outside: bool) -> None:
    def normalised(env: EnvBase) -> EnvBase:
        return TransformedEnv(env, ObservationNorm(0.0, 2.0, in_keys=["budget_ms"]))

    def plain() -> ConfigBandit:
        return ConfigBandit(FULL, batch_size=4)

    env = normalised(SerialEnv(2, plain)) if outside else SerialEnv(2, lambda: normalised(plain()))
    out = env.rollout(3, break_when_any_done=False).flatten()
    assert torch.equal(out["next", "budget_ms"], out["budget_ms"])
    assert torch.equal(
        out["next", "reward"], reward_of(out["row"], out["action"], out["budget_ms"] / 2)
    )


def test_limits_that_a_transform_hides_are_never_guessed() -> None:
    for transform in (
        ObservationNorm(0.0, 2.0, in_keys=["budget_ms"]),
        ExcludeTransform("budget_ms"),
    ):
        env = TransformedEnv(ConfigBandit(FULL, batch_size=4, seed=0), transform)
        context = env.reset()
        env.rand_step(context)
        env.reset()  # another loop in between
        with pytest.raises(InputError, match=r"row: .* budget_ms; reset before each step"):
            env.rand_step(context.exclude("next"))


def test_two_loops_may_share_an_environment_whose_limits_no_transform_changes() -> None:
    env = TransformedEnv(ConfigBandit(FULL, batch_size=4), StepCounter())
    context = env.reset()
    env.rollout(1)
    out = env.rand_step(context)
    assert torch.equal(
        out["next", "reward"], reward_of(out["row"], out["action"], out["budget_ms"])
    )


# -- actions ---------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("unprofiled", ["nearest", "penalty"])
def test_random_policies_live_on_a_sparse_profile(form: dict[str, Any], unprofiled: str) -> None:
    for env in (
        make(unprofiled=unprofiled, **form),
        SerialEnv(2, lambda: make(unprofiled=unprofiled, **form)),
    ):
        collector = Collector(env, None, frames_per_batch=64, total_frames=64)
        batch = next(iter(collector))
        collector.shutdown()
        assert batch["next", "reward"].isfinite().all()
        assert batch["next", "latency_ms"].isfinite().all()


def test_configurations_as_actions_get_what_their_knobs_get() -> None:
    knobs, whole = (
        ConfigBandit(SPARSE, batch_size=50, action=action) for action in ("knobs", "configuration")
    )
    context = knobs.reset()
    index = torch.randint(12, (50,))
    by_knobs = knobs.step(context.clone().set("action", SPARSE.configurations[index]))["next"]
    by_index = whole.step(context.clone().set("action", index))["next"]
    torch.testing.assert_close(by_index.to_dict(), by_knobs.to_dict(), rtol=0, atol=0)


def test_the_mask_keeps_random_policies_to_profiled_configurations() -> None:
    base = make(action="configuration", unprofiled="error")
    env = TransformedEnv(base, ActionMask(mask_key="mask"))
    check_env_specs(env)
    out = env.rollout(50, break_when_any_done=False)
    assert SPARSE.mask[out["row"], out["action"]].all()
    assert env.action_spec.mask is not None
    drawn = env.reset().set("action", env.action_spec.rand())
    assert env.step(drawn)["next", "reward"].isfinite().all()


@pytest.mark.parametrize("unprofiled", ["nearest", "penalty", "error"])
def test_actions_outside_their_range_are_refused(unprofiled: str) -> None:
    knobs, whole = (
        make(unprofiled=unprofiled, action=action) for action in ("knobs", "configuration")
    )
    for wrong in (-1, 2):
        with pytest.raises(
            InputError, match=rf"knob top_k has no index {wrong}; its 2 values have indices 0 to 1"
        ):
            knobs.step(TensorDict({"action": torch.tensor([[0, wrong, 0]]).expand(4, 3)}, [4]))
    for wrong in (-1, 12):
        with pytest.raises(
            InputError, match=rf"the configuration has no index {wrong}; its 12 values"
        ):
            whole.step(TensorDict({"action": torch.tensor([0, wrong, 0, 0])}, [4]))


@every_form
def test_the_group_axis_of_one_decision_may_be_missing(form: dict[str, Any]) -> None:
    env = make(**form, seed=0)
    context, action = env.reset(), env.rand_action()["action"]
    wanted = env.step(context.clone().set("action", action))["next", "reward"]
    wide, group = (env.rand_action()["action"].ndim, form["group_size"])
    if group == 3:
        with pytest.raises(
            InputError, match=r"action: is torch\.int64 \[4.*; must be int64 \[4, 3"
        ):
            env.step(context.clone().set("action", action[:, 0]))
    else:
        other = action.unsqueeze(1) if group is None else action.squeeze(1)
        assert other.ndim != wide
        for same in (other, action.int()):
            assert torch.equal(
                env.step(context.clone().set("action", same))["next", "reward"], wanted
            )
    with pytest.raises(InputError, match=r"action: is torch\.float32"):
        env.step(context.clone().set("action", action.float()))


# -- what was not profiled -------------------------------------------------------------------------


def test_each_answer_to_an_unprofiled_action_by_hand() -> None:
    table = table_of(
        [[0.1, torch.nan, torch.nan, 0.9], [0.5] * 4], [[1.0, torch.nan, torch.nan, 4.0], [1.0] * 4]
    )
    rows, action, limits = (
        torch.tensor([0]),
        torch.tensor([[[0], [1], [2], [3]]]),
        torch.tensor([2.0]),
    )
    nearest = Replay(table)
    out = nearest(rows, action, limits)
    assert out.configuration.tolist() == [[0, 0, 3, 3]]
    assert out.reward.tolist() == [pytest.approx([0.1, 0.1, -0.2, -0.2])]
    assert out.missing is not None
    assert out.missing.tolist() == [[False, True, True, False]]
    assert nearest.outcome(rows, out)[0].tolist() == [pytest.approx([0.1, 0.1, 0.9, 0.9])]
    penalty = Replay(table, unprofiled="penalty")
    out = penalty(rows, action, limits)
    assert out.reward.tolist() == [
        pytest.approx([0.1, -1.2, -1.2, -0.2])
    ]  # the worst is late: −0.2
    accuracy, latency_ms = penalty.outcome(rows, out)
    assert accuracy.tolist() == [pytest.approx([0.1, 0.0, 0.0, 0.9])]
    assert latency_ms.tolist() == [[1.0, 1.0, 4.0, 4.0]]
    assert not any(tensor.requires_grad for tensor in (out.reward, accuracy, latency_ms))
    with pytest.raises(InputError, match=r"2 of the actions.*sample '0' of 'by hand'"):
        Replay(table, unprofiled="error")(rows, action, limits)
    assert Replay(table)(rows, action[:, ::3], limits).missing is None


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 0.95), st.booleans())
def test_the_nearest_profiled_configuration_is_replayed(
    seed: int, holes: float, named: bool
) -> None:
    table = small_table(samples=20, seed=seed, holes=holes)
    generator = torch.Generator().manual_seed(seed)
    rows, index = (
        torch.randint(20, (8,), generator=generator),
        torch.randint(12, (8, 3), generator=generator),
    )
    action = table.configurations[index]
    replay = Replay(table, action="knobs" if named else "configuration")
    out = replay(rows, action if named else index, torch.full((8,), 10.0))
    assert table.mask[rows[:, None], out.configuration].all()
    steps = (action.unsqueeze(2) - table.configurations).abs().sum(-1)  # [8, 3, C]
    least = steps.where(table.mask[rows][:, None], 99).amin(-1)
    assert torch.equal(steps.gather(2, out.configuration[..., None]).squeeze(2), least)
    assert torch.equal(
        out.reward, replay.rewards.chosen(rows, out.configuration, torch.full((8,), 10.0))
    )
    assert torch.equal(out.configuration == index, table.mask[rows[:, None], index])
