"""Simulated streams: what is drawn, who decides, and that following the drift pays."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_table

from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.studies.streams import (
    FOLLOWERS,
    KINDS,
    KNOWN,
    StreamsConfig,
    World,
    draw,
    run,
    serve,
    streams_page,
)


def fitted_stack(table: ProfileTable, split: Split) -> StackedController:
    """A network of one member in the guard of another stack, as a student."""
    rows, policy = split.train[:300], PolicyConfig(structure="utility", members=2, hidden=4, experts=("ridge",))
    two = Controller.for_table(table, rows, policy).eval()
    stack = fit_stack(table, rows, two, policy, default_budgets(table), 0)
    one_member = Controller.for_table(table, rows, PolicyConfig(structure="utility", hidden=4)).eval()
    return StackedController(one_member, [], torch.ones(1), stack.guard, stack.static).eval()


def saved(path: Path, stack: StackedController, table: ProfileTable, split: Split) -> str:
    save_checkpoint(path, stack, table, {f"{part}_rows": rows for part, rows in split._asdict().items()})
    return str(path)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, StackedController, str]:
    table = builtin_profile()
    split = table.split()
    stack = fitted_stack(table, split)
    checkpoint = saved(tmp_path_factory.mktemp("streams") / "best.pt", stack, table, split)
    return World(checkpoint), stack, checkpoint


@pytest.mark.parametrize("deployed", [5, 2])
def test_the_controller_decides_as_it_does_in_front_of_a_model(case: Any, deployed: int) -> None:
    world, stack = copy.deepcopy(case[:2])
    stack.guard.deploy[:] = torch.arange(5) < deployed
    world.deploy = stack.guard.deploy.numpy()
    table, numpy = builtin_profile(), to_numpy(stack)
    test = table.split().test
    rng = np.random.default_rng(0)
    rows, logs = rng.integers(len(test), size=40), np.log(rng.choice(world.budgets_ms, 40))
    offset, scale = rng.normal(0.2, 0.05, 64), 1.3
    choice, mean, spread = world.by_controller(rows, logs, np.tile(offset, (40, 1)), np.full((40, 1), scale))
    blocks = {name: block[test][rows].numpy() for name, block in table.features.items()}
    expected = numpy.choose_expected(blocks, np.exp(logs), None, (offset, scale))
    assert (choice == expected[0]).mean() > 0.97  # rounding
    same = choice == expected[0]
    np.testing.assert_allclose(mean[same], expected[1][same], atol=1e-4)
    np.testing.assert_allclose(spread[same], expected[2][same], rtol=1e-2)


def test_streams_are_what_their_names_say(case: Any) -> None:
    world, *_ = case
    streams = {kind: draw(kind, world, 3000, 4) for kind in KINDS}
    for kind, stream in streams.items():
        assert np.array_equal(stream.rows, streams["as profiled"].rows)
        assert np.array_equal(stream.logs, streams["as profiled"].logs)
        assert (stream.offset != 0).any() == (kind == "values")
    assert not streams["as profiled"].noise.any()
    assert streams["no drift"].noise.std() == pytest.approx(0.03, rel=0.05)
    assert np.unique(streams["× 1.15"].drift).tolist() == pytest.approx([np.log(1.15)])
    assert streams["step"].drift[:, [0, 999, 1000, 1999, 2000]].any(0).tolist() == [False, False, True, True, False]
    assert (np.diff(streams["ramp"].drift) > 0).all()
    wandering = streams["wandering"].drift
    assert wandering.mean() == pytest.approx(np.log(1.08), abs=0.03)
    assert wandering.std() == pytest.approx(0.05, rel=0.4)
    stalled = streams["stalls"].noise > 0.5
    assert 0.01 < stalled.mean() < 0.06
    assert streams["values"].offset.max() < 0.9


def test_following_the_drift_pays_and_costs_little_without(case: Any) -> None:
    world, *_ = case

    def utility(kind: str, *names: str) -> list[float]:
        stream = draw(kind, world, 400, 3)
        followers = [None if name == "known" else [FOLLOWERS[name](world) for _ in range(3)] for name in names]
        return [float(serve(world, stream, world.by_controller, each)[0].mean()) for each in followers]

    known, frozen, tracked = utility("as profiled", "known", "frozen", "tracked")
    assert known == frozen
    assert tracked > known - 0.02
    for kind in ("× 1.40", "values"):
        known, frozen, tracked = utility(kind, "known", "frozen", "tracked")
        assert tracked > known - 0.03 > frozen


def test_a_page_has_every_kind_and_every_policy(case: Any, tmp_path: Path) -> None:
    assert run(StreamsConfig(case[2], requests=20, seeds=2, out=str(tmp_path / "streams.md"))) == []
    page = (tmp_path / "streams.md").read_text()
    for kind in KINDS:
        assert page.count(f"\n| {kind}") == 2
    heads = [line for line in page.splitlines() if line.startswith("| stream |")]
    assert len(set(heads)) == 1
    assert heads[0].count("|") == 7
    assert page.count("static, tracked") == 2


def test_the_lines_under_the_tables_by_hand() -> None:
    """Two streams of each kind; the tracker gains .2 points as profiled, costs .2 without drift, and loses 1.6 of
    knowing the drift on the ramp."""
    tracked = {"as profiled": (0.602, 0.96), "no drift": (0.598, 0.94), "ramp": (0.584, 0.929), "stalls": (0.6, 0.971)}
    row = {"level": 0.95, "unattainable": False, "too_dear": False, "unshown": False}
    guard = [row, row | {"too_dear": True}]
    served = {}
    for kind in KINDS:
        known, spread = np.full(2, 0.6), np.array([-0.1, 0.1])
        utility, share = tracked.get(kind, (0.6, 0.95))
        served[kind] = {KNOWN: (known + spread, known + 0.4), "frozen": (known + spread, known)}
        served[kind]["tracked"] = (utility + spread, np.full(2, share))
    page = streams_page(served, guard, StreamsConfig(seeds=2))
    assert "tracked − frozen: 0.20 ± 0.00 points on the stream `as profiled`, -0.20 ± 0.00 points" in page
    assert "at most 0.1 points, and costs more." in page
    assert "-1.60 ± 0.00 points on the stream `ramp`. It should stay within 1.5 points, and does not." in page
    assert "The guard keeps 95 % at 1 of 2 budgets; at the others" in page
    assert "tracked − knowing the drift: from -7.1 (`ramp`) to -2.9 points (`stalls`)" in page
    assert "from 92.9 % (`ramp`) to 97.1 % (`stalls`). It should stay within 2 points of the level" in page
    assert page.count("and does not.") == 2
    served |= dict.fromkeys(tracked, served["× 1.05"])
    page = streams_page(served, guard, StreamsConfig(seeds=2))
    assert page.count(" and does.") == 3


def test_a_run_decides_as_it_is_deployed(case: Any, tmp_path: Path) -> None:
    world, stack, checkpoint = case
    table = builtin_profile()
    teacher = StackedController(stack.network, [], torch.ones(1)).eval()
    (tmp_path / "checkpoints").mkdir()
    saved(tmp_path / "checkpoints" / "best.pt", teacher, table, table.split())
    shutil.copy(checkpoint, tmp_path / "checkpoints" / "student.pt")
    np.testing.assert_array_equal(World(str(tmp_path)).mean, world.mean)


def test_a_checkpoint_of_another_profile_or_without_guard_is_refused(case: Any, tmp_path: Path) -> None:
    table = small_table(60)
    split = table.split()
    network = Controller.for_table(table, split.train, PolicyConfig(structure="utility", hidden=4)).eval()
    with pytest.raises(InputError, match="profile=builtin"):
        World(saved(tmp_path / "a.pt", StackedController(network, [], torch.ones(1)), table, split))
    stack = case[1]
    with pytest.raises(InputError, match="profile=builtin"):
        World(saved(tmp_path / "b.pt", stack, table, split))
