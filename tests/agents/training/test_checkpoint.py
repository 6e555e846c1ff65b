import functools
import operator
import pickle
import random
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    BRIEF,
    WITH_TEACHER,
    Harmful,
    close,
    driven_apart,
    equal_states,
    input_error,
    small_beams,
    small_table,
    some_configurations,
    table_of,
    trained,
)
from torch.utils._python_dispatch import TorchDispatchMode

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training import claims
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint, started_from
from knobwise.common.errors import InputError
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.evidence.evaluate import check_fits
from knobwise.losses.settings import LossConfig


def heads(table, **settings):
    """A controller without teacher and guard, which was not trained."""
    return DeployedController(driven_apart(table, PolicyConfig(hidden=16, **settings)))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("width", "project"), [(1, 0), (9, 0), (32, 3)])
def test_a_loaded_controller_decides_like_the_saved_one(tmp_path, members, width, project):
    table = small_table(50)
    table.features["image_features"][3, 1] = torch.nan
    agent = heads(table, budget_width=width, project=project, fold_networks=members)
    save_checkpoint(tmp_path / "c.pt", agent, table, {"note": 1})
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert (loaded.profile_digest, loaded.extra) == (table.digest, {"note": 1})
    assert loaded.controller.knobs == table.knobs
    assert loaded.network is loaded.controller.controller
    assert equal_states(loaded.network, agent.controller)
    # of all that decides, by content
    assert loaded.controller.decider.digest == agent.decider.digest


def test_another_file_is_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no")
    torch.save({"state": {}}, tmp_path / "other.pt")
    for name in ("none.pt", "text.pt", "other.pt", "."):
        with input_error("checkpoint"):
            load_checkpoint(tmp_path / name)


def test_loading_executes_no_code(tmp_path, capsys):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Harmful()))
    with input_error("evil.pt"):
        load_checkpoint(tmp_path / "evil.pt")
    assert capsys.readouterr().out == ""


# -- damage ----------------------------------------------------------------------------------------


TABLE = small_table(60, holes=0.2)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """What a run deploys, with a teacher, experts and a guard."""
    trainer = trained(TABLE)
    agent = calibrate_controller(trainer.setup, trainer.setup.limits)
    path = tmp_path_factory.mktemp("taught") / "taught.pt"
    save_checkpoint(path, agent, TABLE, trainer.provenance(trainer))
    return path


def test_a_flipped_bit_is_noticed(taught, tmp_path):
    whole, path, draw = taught.read_bytes(), tmp_path / "c.pt", random.Random(0)
    good = load_checkpoint(taught).controller.decider.digest
    for place in draw.sample(range(len(whole)), 60):
        flipped = bytes([whole[place] ^ 1 << draw.randrange(8)])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        try:
            result = load_checkpoint(path).controller.decider.digest
        except InputError as error:
            result = str(error)
        # refused in a line, or the bit is in what nobody reads
        assert result == good or re.fullmatch(f"{re.escape(str(path))}: .*", result)


@pytest.mark.parametrize(
    ("place", "mutation", "named"),
    [
        ("format", lambda _: "knobwise.Controller/2", "Controller/3"),
        # a setting that was removed
        ("controller/controller/policy/budget_encoding", lambda _: "fourier", "budget_encoding"),
        ("controller/controller/state/network.layers.0.weight", lambda x: x * torch.nan, "NaN"),
        ("controller/controller/state/network.layers.0.weight", lambda x: x[:, :3], ""),
        ("controller/teacher/network/layers.0.weight", lambda x: x * torch.nan, "NaN"),
        ("controller/teacher/weights", lambda x: x * torch.nan, "NaN"),
        ("controller/static/latency_ms", lambda x: x[:3], ""),
        ("controller/static/running", lambda x: x[:3], ""),
        ("controller/latency/weight", lambda x: x[:3], ""),
        ("controller/guard", lambda rows: [*rows[:1], {}], ""),
    ],
)
def test_what_cannot_decide_is_refused_on_loading(taught, tmp_path, place, mutation, named):
    content = torch.load(taught, weights_only=True)
    *path, last = place.split("/")
    part = functools.reduce(operator.getitem, path, content)
    part[last] = mutation(part[last])
    torch.save(content, tmp_path / "c.pt")
    with input_error(rf"c\.pt: .*{named}") as refused:
        load_checkpoint(tmp_path / "c.pt")
    assert "\n" not in str(refused.value)


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor has that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(
    ("place", "claim"),
    [
        ("controller/features/image_features", 10**6),
        ("controller/policy/hidden", 10**3),
        ("controller/policy/layers", 10**6),
        ("controller/policy/fold_networks", 10**5),
        ("controller/policy/budget_width", 10**7),
        ("controller/policy/teacher_hidden", 10**5),
        ("controller/state/normaliser.mean", torch.zeros(1).expand(10**6)),
    ],
)
def test_claims_are_refused_before_they_take_memory(taught, tmp_path, monkeypatch, place, claim):
    content = torch.load(taught, weights_only=True)
    *path, last = place.split("/")
    functools.reduce(operator.getitem, path, content["controller"])[last] = claim
    torch.save(content, tmp_path / "c.pt")
    monkeypatch.setattr(claims, "FREE", 0)
    with Largest() as made, input_error(r"c\.pt: claims"):
        load_checkpoint(tmp_path / "c.pt")
    # no more than the file may ask for, at eight bytes a number
    assert made.size <= 8 * claims.TIMES * (tmp_path / "c.pt").stat().st_size


def test_settings_that_a_checkpoint_does_not_hold_have_their_defaults(taught, tmp_path):
    content, whole = torch.load(taught, weights_only=True), load_checkpoint(taught).controller
    for name in ("budget_encoding", "project", "dataset_input", "drift"):
        del content["controller"]["controller"]["policy"][name]
    torch.save(content, tmp_path / "c.pt")
    loaded = load_checkpoint(tmp_path / "c.pt").controller
    assert loaded.controller.config == whole.controller.config
    assert loaded.decider.digest == whole.decider.digest


# -- training that starts from a checkpoint --------------------------------------------------------

WARM = replace(BRIEF, iterations=0)
GRPO = replace(BRIEF, pretrain_iterations=0, iterations=8)
POLICIES = {
    "RCE": PolicyConfig(hidden=16, dropout=0.0),
    "taught": replace(WITH_TEACHER, experts=()),
}
OTHER = small_table(50, seed=5)


def trainer(how, table=TABLE, **settings):
    options = {"policy": POLICIES[how], "optimiser": GRPO, "split": table.split()}
    options |= {"loss": LossConfig(objective="exact")} | settings
    return distillation_trainer(table, **options)


@pytest.fixture(scope="module")
def starts(taught):
    """A folder with the best and the last checkpoint of RCE, with a taught one, and with a
    selector."""
    folder = taught.parent
    trainer("RCE", optimiser=WARM, folder=folder / "RCE").run()
    table, _ = small_beams()
    selector = Selector.fitted(SelectorConfig(width=16, heads=2), table.queries, table.candidates)
    save_checkpoint(folder / "selector.pt", selector, table, {"fitted": []})
    return folder


@pytest.mark.parametrize("table", [TABLE, OTHER], ids=["its profile", "another profile"])
@pytest.mark.parametrize(("file", "how"), [("RCE/best.pt", "RCE"), ("taught.pt", "taught")])
def test_grpo_starts_from_weights_and_from_their_statistics(starts, file, how, table):
    student = trainer(how, table, init_from=starts / file)
    start = load_checkpoint(starts / file).network
    assert equal_states(start, student.setup.controller)
    mean = start.normaliser.mean
    assert torch.equal(student.setup.controller.normaliser.mean, mean)
    fresh = trainer(how, table).setup.controller
    assert torch.equal(fresh.normaliser.mean, mean) == (table is TABLE)
    assert [stage.iterations for stage in student.stages] == [0, 8]
    assert isinstance(student.run(), Controller)
    assert equal_states(start, student.setup.reference)


def test_what_an_earlier_version_had_as_text_fits_true_and_false(tmp_path):
    knobs = (*TABLE.knobs[:2], Knob("cache", ("false", "true")))
    old = replace(TABLE, knobs=knobs)
    new = replace(TABLE, knobs=(*knobs[:2], Knob("cache", (False, True))))
    trainer("RCE", old, optimiser=WARM, folder=tmp_path).run()
    loaded = load_checkpoint(tmp_path / "best.pt")
    # it decides as before, and is judged on its profile as it is read now
    assert loaded.controller.decider.configuration(0)["cache"] == "false"
    assert loaded.profile_digest == new.digest
    check_fits("best.pt", loaded.controller, new)
    # what starts from it has the knobs of its own profile
    student = trainer("RCE", new, init_from=tmp_path / "best.pt")
    assert equal_states(loaded.network, student.setup.controller)
    assert student.setup.controller.knobs == new.knobs
    agent = DeployedController(student.setup.controller)
    save_checkpoint(tmp_path / "new.pt", agent, new, {})
    decider = load_checkpoint(tmp_path / "new.pt").controller.decider
    assert decider.configuration(0)["cache"] is False


def test_on_another_profile_all_parts_of_a_teacher_read_features_as_the_start_does(starts):
    # those that are shared are fitted for other statistics of the features
    options = {"optimiser": WARM, "experts": Mock(side_effect=AssertionError)}
    policy = replace(WITH_TEACHER, experts=("ridge",))
    student = trainer("taught", OTHER, init_from=starts / "taught.pt", policy=policy, **options)
    student.run()
    start = load_checkpoint(starts / "taught.pt").network.normaliser
    teacher = student.setup.distiller.fitted.teacher
    for normaliser in (student.setup.controller.normaliser, teacher.normaliser):
        assert equal_states(normaliser, start)
    # the weights are of predictions of these features: of all samples the expert's mean is right
    (expert,) = teacher.experts
    predicted = expert(student.setup.rows.all_features[student.setup.fitted])
    close(predicted.accuracy.mean(0), OTHER.accuracy[student.setup.fitted].mean(0), 0.02)


def test_what_the_start_has_seen_is_not_forgotten(starts):
    first = load_checkpoint(starts / "taught.pt").extra
    again = trainer("taught", init_from=starts / "taught.pt", seed=3)
    # the folds are those of the start, so what is held out of a network never was its training data
    assert (again.setup.fold_seed, first["fold_seed"]) == (0, 0)
    assert set(again.provenance(again)["seen"]) == set(first["seen"])
    other = trainer("taught", OTHER, init_from=starts / "taught.pt", seed=3)
    assert other.setup.fold_seed == 3
    assert set(first["seen"]) < set(other.provenance(other)["seen"])


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"policy": PolicyConfig(hidden=8)}, r"policy\.hidden"),
        ({"policy": PolicyConfig(hidden=16, layers=3)}, r"policy\.layers"),
        ({"policy": PolicyConfig(hidden=16, fold_networks=2)}, r"policy\.fold_networks"),
        ({"budget": BudgetConfig(constraint="mean")}, "worth_ms"),
        ({"table": small_table(60, features=False)}, "image_features"),
        ({"table": table_of([[0.0, 1.0]] * 20, [[1.0, 2.0]] * 20)}, "knobs"),
        ({"table": some_configurations(TABLE, slice(11))}, r"\(12, .*\(11, "),
        ({"init_from": "selector.pt"}, "selector"),
        ({"init_from": "none.pt"}, "no such"),
        ({"init_from": "RCE/last.pt"}, "best.pt"),
        ({"split": TABLE.split(seed=7)}, "test samples"),
    ],
)
def test_what_cannot_be_started_from_is_refused(starts, settings, difference):
    path = starts / settings.get("init_from", "RCE/best.pt")
    with input_error(difference) as refused:
        trainer("RCE", **settings | {"init_from": path})
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_selector_starts_from_a_selector_of_the_same_network(starts):
    path, config = starts / "selector.pt", SelectorConfig(width=16, heads=2)
    loaded = load_checkpoint(path)
    fresh = Selector(replace(config, dropout=0.5), 4)
    selector = started_from(path, loaded, fresh)
    assert equal_states(selector, loaded.selector)
    assert not equal_states(selector, fresh)
    assert selector.config.dropout == 0.5
    for difference, start, wanted in (
        ("embeddings", loaded, Selector(config, 5)),
        (r"selector\.width", loaded, Selector(replace(config, width=32), 4)),
        ("controller", load_checkpoint(starts / "taught.pt"), fresh),
    ):
        with input_error(difference):
            started_from(path, start, wanted)


def test_a_training_that_began_with_other_weights_is_not_resumed(starts, tmp_path):
    last, start = tmp_path / "last.pt", starts / "RCE" / "best.pt"
    trainer("RCE", init_from=start, folder=tmp_path).run()
    assert trainer("RCE", init_from=start).resume(last)
    for other in (None, tmp_path / "best.pt"):
        with input_error("last.pt: is of a run"):
            trainer("RCE", init_from=other).resume(last)
