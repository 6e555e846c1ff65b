from __future__ import annotations

import functools
import operator
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import equal_states, small_beams, small_table, table_of

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint, started_from
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable


@pytest.mark.parametrize("structure", ["utility", "independent"])
@pytest.mark.parametrize(("width", "project"), [(1, 0), (9, 0), (32, 3)])
def test_a_loaded_controller_decides_like_the_saved_one(
    tmp_path: Path, structure: str, width: int, project: int
) -> None:
    table = small_table(50)
    table.features["image_features"][3, 1] = torch.nan
    config = PolicyConfig(structure=structure, budget_width=width, hidden=16, project=project)
    controller = Controller.for_table(table, torch.arange(50), config).eval()
    save_checkpoint(tmp_path / "c.pt", controller, table, {"note": 1})
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded.profile_digest == table.digest
    assert loaded.extra == {"note": 1}
    assert loaded.controller.knobs == table.knobs
    budgets = torch.linspace(3, 30, 50)
    assert torch.equal(loaded.controller.choose(table.features, budgets), controller.choose(table.features, budgets))


@pytest.mark.parametrize(("width", "inputs"), [(9, 9), (8, 7)])
def test_an_earlier_checkpoint_has_the_width_that_it_was_trained_with(tmp_path: Path, width: int, inputs: int) -> None:
    table, budgets = small_table(30), torch.linspace(3, 30, 30)
    config = PolicyConfig(budget_width=inputs, hidden=16)
    controller = Controller.for_table(table, torch.arange(30), config).eval()
    save_checkpoint(tmp_path / "c.pt", controller, table, {})
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    for name in ("budget_encoding", "project", "dataset_input"):
        del content["controller"]["policy"][name]
    del content["controller"]["datasets"]
    content["controller"]["policy"]["budget_width"] = width  # of an even one it used one less
    torch.save(content, tmp_path / "c.pt")
    loaded = load_checkpoint(tmp_path / "c.pt").controller
    assert torch.equal(loaded.choose(table.features, budgets), controller.choose(table.features, budgets))


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no")
    torch.save({"state": {}}, tmp_path / "other.pt")
    messages = {"none": "no such checkpoint", "text": "not a checkpoint", "other": "not a checkpoint of knobwise"}
    for name, message in messages.items():
        with pytest.raises(InputError, match=message):
            load_checkpoint(tmp_path / f"{name}.pt")


@pytest.mark.parametrize("structure", ["additive", "autoregressive", "joint"])
def test_a_structure_that_was_removed_is_named(tmp_path: Path, structure: str) -> None:
    table = small_table(20)
    save_checkpoint(
        tmp_path / "c.pt", Controller.for_table(table, torch.arange(20), PolicyConfig(hidden=16)), table, {}
    )
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    content["controller"]["policy"]["structure"] = structure
    torch.save(content, tmp_path / "c.pt")
    message = rf"c\.pt: cannot be used any more: policy\.structure='{structure}': must be one of .*; train again$"
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "c.pt")


def test_loading_executes_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "touched",)

    with (tmp_path / "evil.pt").open("wb") as file:
        pickle.dump(Evil(), file)
    with pytest.raises(InputError):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "touched").exists()


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    table = small_table(20)
    controller = Controller.for_table(table, torch.arange(20), PolicyConfig(hidden=16))
    save_checkpoint(tmp_path / "c.pt", controller, table, {})
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    del content["controller"]["state"]["network.layers.0.weight"]
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt"):
        load_checkpoint(tmp_path / "c.pt")


# -- damage ------------------------------------------------------------------------------------------------------------


TABLE = small_table(60, holes=0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that was trained by regression, in a stack."""
    policy = PolicyConfig(structure="utility", members=2, hidden=16, dropout=0.0)
    settings = OptimiserConfig(warmup_iterations=8, iterations=0, contexts=16, minibatch=16, evaluate_every=4)
    trainer = ControllerTrainer(TABLE, TABLE.split(), policy=policy, optimiser=settings)
    fitted = torch.cat([trainer.split.train, trainer.split.validation])
    stack = fit_stack(TABLE, fitted, trainer.run(), policy, trainer.limits, 0)
    save_checkpoint(path := tmp_path_factory.mktemp("stack") / "stack.pt", stack, TABLE, trainer.provenance())
    return path


def test_a_flipped_bit_is_noticed(stack: Path, tmp_path: Path) -> None:
    whole, path, draw, refused = stack.read_bytes(), tmp_path / "c.pt", random.Random(0), 0
    good = load_checkpoint(stack).controller.choose(TABLE.features, torch.full((60,), 9.0))
    for place in draw.sample(range(len(whole)), 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        try:
            loaded = load_checkpoint(path)
        except InputError as error:
            refused += str(error).startswith(f"{path}: ") and "\n" not in str(error)
            continue
        assert torch.equal(
            loaded.controller.choose(TABLE.features, torch.full((60,), 9.0)), good
        )  # in what nobody reads
        refused += 1
    assert refused == 60


@pytest.mark.parametrize(
    ("place", "mutation"),
    [
        (("network", "state", "network.layers.0.weight"), lambda x: x * torch.nan),
        (("static", "latency_ms"), lambda x: x[:3]),
        (("static", "_running"), lambda x: x[:3]),
        (("guard", "state", "miss"), lambda x: x[:1]),
    ],
)
def test_what_cannot_decide_is_refused_on_loading(
    stack: Path, tmp_path: Path, place: tuple[str, ...], mutation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    content = torch.load(stack, weights_only=True)
    part = functools.reduce(operator.getitem, place[:-1], content["controller"])
    part[place[-1]] = mutation(part[place[-1]])
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt: ") as refused:
        load_checkpoint(tmp_path / "c.pt")
    assert "\n" not in str(refused.value)


# -- training that starts from a checkpoint ----------------------------------------------------------------------------

WARM = OptimiserConfig(warmup_iterations=8, iterations=0, contexts=16, minibatch=16, evaluate_every=4)
GRPO = replace(WARM, warmup_iterations=0, iterations=8)
POLICIES = {
    "RCE": PolicyConfig(hidden=16, dropout=0.0),
    "regression": PolicyConfig(structure="utility", members=2, hidden=16, dropout=0.0),
}
OTHER = small_table(50, seed=5)
CUT = {name: getattr(TABLE, name)[:, :11] for name in ("accuracy", "latency_ms", "mask")}
FEWER = replace(TABLE, configurations=TABLE.configurations[:11], **CUT)


def trainer(how: str, table: ProfileTable = TABLE, **settings: Any) -> ControllerTrainer:
    options = {"policy": POLICIES[how], "optimiser": GRPO, "split": table.split()} | settings
    return ControllerTrainer(table, **options)


@pytest.fixture(scope="module")
def starts(stack: Path) -> Path:
    """A folder with the best and the last checkpoint of RCE, with a stack, and with a selector."""
    folder = stack.parent
    trainer("RCE", optimiser=WARM, folder=folder / "RCE").run()
    table, _ = small_beams()
    selector = Selector.fitted(SelectorConfig(width=16, heads=2), table.queries, table.candidates)
    save_checkpoint(folder / "selector.pt", selector, table, {"fitted": []})
    return folder


def weights(agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    """But for the sharpness, which GRPO sets by its own schedule, and what no decision reads."""
    state = agent.state_dict()
    return {name: state[name].clone() for name in state if not name.endswith(("sharpness", "typical"))}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("table", [TABLE, OTHER], ids=["its profile", "another profile"])
@pytest.mark.parametrize(("file", "how"), [("RCE/best.pt", "RCE"), ("stack.pt", "regression")])
def test_grpo_starts_from_weights_and_from_their_statistics(
    starts: Path, file: str, how: str, table: ProfileTable
) -> None:
    student = trainer(how, table, init_from=starts / file)
    start = weights(load_checkpoint(starts / file).network)
    assert same(start, weights(student.agent))
    mean = load_checkpoint(starts / file).network.normaliser.mean
    assert torch.equal(student.agent.normaliser.mean, mean)
    assert torch.equal(trainer(how, table).agent.normaliser.mean, mean) == (table is TABLE)
    assert [stage.iterations for stage in student.stages] == [0, 8]
    student.run()
    assert same(start, weights(student.reference))


def test_what_is_typical_of_latencies_is_that_of_the_new_profile(starts: Path) -> None:
    student = trainer("RCE", OTHER, init_from=starts / "RCE" / "best.pt")
    assert torch.equal(student.agent.network.typical, trainer("RCE", OTHER).agent.network.typical)


def test_what_the_start_has_seen_is_not_forgotten(starts: Path) -> None:
    first = load_checkpoint(starts / "stack.pt").extra
    again = trainer("regression", init_from=starts / "stack.pt", seed=3)
    # the folds are those of the start, so what is held out of a member never was its training data
    assert (again.fold_seed, first["fold_seed"]) == (0, 0)
    assert set(again.provenance()["seen"]) == set(first["seen"])
    other = trainer("regression", OTHER, init_from=starts / "stack.pt", seed=3)
    assert other.fold_seed == 3
    assert set(first["seen"]) < set(other.provenance()["seen"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": PolicyConfig(hidden=8)}, r"policy\.hidden is 16 in the checkpoint and 8 in this training"),
        ({"policy": PolicyConfig("utility", hidden=16)}, r"policy\.structure is independent in the .* and utility"),
        ({"policy": PolicyConfig(hidden=16, members=2)}, r"policy\.members is 1 in the checkpoint and 2"),
        (
            {"policy": POLICIES["regression"], "budget": BudgetConfig(sense="mean"), "init_from": "stack.pt"},
            "the limit of a request is budget_ms in the checkpoint and worth_ms",
        ),
        (
            {"table": small_table(60, features=False)},
            "the width of feature block image_features is 4 in the checkpoint and None",
        ),
        ({"table": table_of([[0.0, 1.0]] * 20, [[1.0, 2.0]] * 20)}, r"knob size is None .* and \(0, 1\)"),
        ({"table": FEWER}, r"the number of configurations .* is \(12, \d+\) in the checkpoint and \(11, \d+\)"),
        ({"init_from": "selector.pt"}, "holds a selector"),
        ({"init_from": "none.pt"}, "no such checkpoint"),
        ({"init_from": "RCE/last.pt"}, "does not say what it was trained on; use a best.pt"),
        ({"split": TABLE.split(seed=7)}, r"was trained on \d+ of the test samples of profile 'small'"),
    ],
    ids=str,
)
def test_what_cannot_be_started_from_is_refused(starts: Path, settings: dict[str, Any], message: str) -> None:
    settings = {"init_from": "RCE/best.pt"} | settings
    settings["init_from"] = starts / settings["init_from"]
    with pytest.raises(InputError, match=message) as refused:
        trainer("RCE", **settings)
    assert str(settings["init_from"]) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_selector_starts_from_a_selector_of_the_same_network(starts: Path) -> None:
    path, config = starts / "selector.pt", SelectorConfig(width=16, heads=2)
    loaded = load_checkpoint(path)
    fresh = Selector(replace(config, dropout=0.5), 4)
    selector = started_from(path, loaded, fresh)
    assert equal_states(selector, loaded.selector)
    assert not equal_states(selector, fresh)
    assert selector.config.dropout == 0.5
    with pytest.raises(InputError, match="the width of the embeddings is 4 in the checkpoint and 5 in this"):
        started_from(path, loaded, Selector(config, 5))
    with pytest.raises(InputError, match=r"selector\.width is 16 in the checkpoint and 32 in this"):
        started_from(path, loaded, Selector(replace(config, width=32), 4))
    with pytest.raises(InputError, match="holds a controller"):
        started_from(path, load_checkpoint(starts / "stack.pt"), fresh)


def test_a_training_that_began_with_other_weights_is_not_resumed(starts: Path, tmp_path: Path) -> None:
    trainer("RCE", init_from=starts / "RCE" / "best.pt", folder=tmp_path).run()
    assert trainer("RCE", init_from=starts / "RCE" / "best.pt", folder=tmp_path).resume(tmp_path / "last.pt")
    with pytest.raises(InputError, match="from other weights"):
        trainer("RCE", folder=tmp_path).resume(tmp_path / "last.pt")
    with pytest.raises(InputError, match="from other weights"):
        trainer("RCE", init_from=tmp_path / "best.pt", folder=tmp_path).resume(tmp_path / "last.pt")
