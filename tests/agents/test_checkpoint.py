from __future__ import annotations

import functools
import operator
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import small_table

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError


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
