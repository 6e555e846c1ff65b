from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from helpers import small_table

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.heads import HEADS
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.common.errors import InputError


@pytest.mark.parametrize("head", ["utility", *sorted(HEADS)])
@pytest.mark.parametrize("encoding", ["linear", "sinusoidal"])
def test_a_loaded_controller_decides_like_the_saved_one(tmp_path: Path, head: str, encoding: str) -> None:
    table = small_table(50)
    table.features["image_features"][3, 1] = torch.nan
    rows = torch.arange(50)
    controller = Controller.for_table(
        table, rows, PolicyConfig(structure=head, budget_encoding=encoding, hidden=16)
    ).eval()
    save_checkpoint(tmp_path / "c.pt", controller, table, {"note": 1})
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded.profile_digest == table.digest
    assert loaded.extra == {"note": 1}
    assert loaded.controller.knobs == table.knobs
    budgets = torch.linspace(3, 30, 50)
    assert torch.equal(loaded.controller.choose(table.features, budgets), controller.choose(table.features, budgets))


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no")
    with pytest.raises(InputError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "text.pt")
    torch.save({"state": {}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="not a checkpoint of knobwise"):
        load_checkpoint(tmp_path / "other.pt")


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
