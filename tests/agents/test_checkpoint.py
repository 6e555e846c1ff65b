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
from helpers import small_beams, small_table, table_of

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint, selector_start
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
from knobwise.losses.settings import LossConfig


@pytest.mark.parametrize("structure", ["utility", "independent"])
@pytest.mark.parametrize("width", [1, 9])
def test_a_loaded_controller_decides_like_the_saved_one(tmp_path: Path, structure: str, width: int) -> None:
    table = small_table(50)
    table.features["image_features"][3, 1] = torch.nan
    config = PolicyConfig(structure=structure, budget_width=width, hidden=16)
    controller = Controller.for_table(table, torch.arange(50), config).eval()
    save_checkpoint(tmp_path / "c.pt", controller, table, {"note": 1})
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded.profile_digest == table.digest
    assert loaded.extra == {"note": 1}
    assert loaded.controller.knobs == table.knobs
    budgets = torch.linspace(3, 30, 50)
    assert torch.equal(loaded.controller.choose(table.features, budgets), controller.choose(table.features, budgets))


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


# -- training that starts from a checkpoint ----------------------------------------------------------------------------


WARM = OptimiserConfig(warmup_iterations=8, iterations=0, contexts=16, minibatch=16, evaluate_every=4)
GRPO = replace(WARM, warmup_iterations=0, iterations=8)
POLICIES = {
    "RCE": PolicyConfig(hidden=16, dropout=0.0),
    "regression": PolicyConfig(structure="utility", members=2, hidden=16, dropout=0.0),
}
TABLE = small_table(60, holes=0.2)
CUT = {name: getattr(TABLE, name)[:, :11] for name in ("accuracy", "latency_ms", "mask")}
FEWER = replace(TABLE, configurations=TABLE.configurations[:11], **CUT)


def trainer(how: str, table: ProfileTable = TABLE, **settings: Any) -> ControllerTrainer:
    options = {"policy": POLICIES[how], "optimiser": GRPO} | settings
    return ControllerTrainer(table, table.split(), **options)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of warm-up, trained without GRPO; in `regression` also the stack around the network."""
    folder = tmp_path_factory.mktemp("starts")
    for how, policy in POLICIES.items():
        student = trainer(how, optimiser=WARM, folder=folder / how)
        network = student.run()
        if how == "regression":
            fitted = torch.cat([student.split.train, student.split.validation])
            stack = fit_stack(TABLE, fitted, network, policy, student.limits, 0)
            save_checkpoint(folder / how / "stack.pt", stack, TABLE, student.provenance())
    table, _ = small_beams()
    selector = Selector.fitted(SelectorConfig(width=16, heads=2), table.queries, table.candidates)
    save_checkpoint(folder / "selector.pt", selector, table, {})
    return folder


def weights(agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    """But for the sharpness, which GRPO sets by its own schedule."""
    return {name: w.clone() for name, w in agent.state_dict().items() if not name.endswith("sharpness")}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize("table", [TABLE, small_table(50, seed=5)], ids=["its profile", "another profile"])
@pytest.mark.parametrize("how", ["RCE/best.pt", "regression/best.pt", "regression/stack.pt", "RCE/last.pt"])
def test_grpo_starts_from_the_weights_of_a_warm_up(starts: Path, how: str, table: ProfileTable) -> None:
    student = trainer(how.split("/")[0], table, init_from=starts / how, loss=LossConfig(kl_to_ref_coeff=0.1))
    start = weights(load_checkpoint(starts / how).network)
    assert same(start, weights(student.agent))
    assert not student.optimiser.state
    assert [stage.iterations for stage in student.stages] == [0, 8]
    student.run()
    assert student.best["iteration"] >= 0
    # the reference is the start, but as sharp as the policy was in the last of eight iterations
    assert same(start, weights(student.reference))
    if "network.sharpness" in student.reference.state_dict():
        assert float(student.reference.state_dict()["network.sharpness"]) == pytest.approx(20 * 3 ** (7 / 8))


def test_a_warm_up_may_go_on_and_dropout_may_change(starts: Path) -> None:
    policy = replace(POLICIES["RCE"], dropout=0.3)
    student = trainer("RCE", init_from=starts / "RCE" / "best.pt", policy=policy, optimiser=WARM)
    assert student.agent.config == policy
    start = weights(student.agent)
    student.iterate(iter(student.collector))
    assert not same(start, weights(student.agent))


def test_what_the_start_has_seen_is_not_forgotten(starts: Path) -> None:
    first = load_checkpoint(starts / "regression" / "best.pt").extra
    again = trainer("regression", init_from=starts / "regression" / "best.pt", seed=3)
    # the folds are those of the start, so what is held out of a member never was its training data
    assert (again.fold_seed, first["fold_seed"]) == (0, 0)
    assert set(again.provenance()["seen"]) == set(first["seen"])
    other = trainer("regression", small_table(50, seed=5), init_from=starts / "regression" / "best.pt", seed=3)
    assert other.fold_seed == 3
    assert set(first["seen"]) < set(other.provenance()["seen"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": PolicyConfig(hidden=8)}, r"was trained with policy\.hidden=16"),
        ({"policy": PolicyConfig("utility", hidden=16)}, r"was trained with policy\.structure=independent"),
        ({"policy": PolicyConfig(hidden=16, members=2, layers=1)}, r"with policy\.layers=2, policy\.members=1"),
        ({"budget": BudgetConfig(sense="mean")}, "was trained for deadlines, and this run is for mean budgets"),
        ({"table": small_table(60, features=False)}, r"reads the features \{'image_features': 4, .* has \{\}"),
        ({"table": table_of([[0.0, 1.0]] * 20, [[1.0, 2.0]] * 20)}, r"knobs are max_crops=\[2, 6, 10\], .* has size"),
        ({"table": FEWER}, "was trained for 12 configurations of its knobs; profile 'small' has 11"),
        ({"init_from": "selector.pt"}, "holds a selector"),
        ({"init_from": "none.pt"}, "no such checkpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_started_from_is_refused(starts: Path, settings: dict[str, Any], message: str) -> None:
    settings = {"init_from": "RCE/best.pt"} | settings
    settings["init_from"] = starts / settings["init_from"]
    with pytest.raises(InputError, match=message) as refused:
        trainer("RCE", **settings)
    assert str(settings["init_from"]) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "config", "features", "message"),
    [
        ("selector.pt", SelectorConfig(width=32, heads=2), 4, r"was trained with selector\.width=16; train"),
        ("selector.pt", SelectorConfig(width=16, heads=2), 5, "reads embeddings 4 wide, and these are 5 wide"),
        ("RCE/best.pt", SelectorConfig(width=16, heads=2), 4, "holds a controller"),
    ],
)
def test_a_selector_that_does_not_fit_is_refused(
    starts: Path, file: str, config: SelectorConfig, features: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        selector_start(starts / file, config, features)
    again, _ = selector_start(starts / "selector.pt", SelectorConfig(width=16, heads=2, dropout=0.5), 4)
    assert again.config.dropout == 0.5


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_noticed(starts: Path, tmp_path: Path) -> None:
    whole, path, draw, refused = (starts / "regression/stack.pt").read_bytes(), tmp_path / "c.pt", random.Random(0), 0
    good = load_checkpoint(starts / "regression/stack.pt").controller.choose(TABLE.features, torch.full((60,), 9.0))
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
    starts: Path, tmp_path: Path, place: tuple[str, ...], mutation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    content = torch.load(starts / "regression/stack.pt", weights_only=True)
    part = functools.reduce(operator.getitem, place[:-1], content["controller"])
    part[place[-1]] = mutation(part[place[-1]])
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt: ") as refused:
        load_checkpoint(tmp_path / "c.pt")
    assert "\n" not in str(refused.value)
