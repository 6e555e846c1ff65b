"""The study of requests that wait for one another, with few traces: its page and its mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.experiments.studies.service import ServiceStudyConfig, run

FEW = {"loads": [0.8, "bursts 0.3 1.3"], "judged_loads": [0.9, "ramp 0.3 1.3"], "tuned_at": [0.9]}


@pytest.fixture
def config(tmp_path: Path) -> ServiceStudyConfig:
    """On top of a small stack that was never trained."""
    table, path = builtin_profile(), str(tmp_path / "best.pt")
    network = Controller.for_table(table, torch.arange(200), PolicyConfig(structure="utility", hidden=8, layers=1))
    rows = {"train_rows": torch.arange(200), "validation_rows": torch.arange(200, 300)}
    stack = StackedController(network.eval(), [], torch.ones(1)).eval()
    save_checkpoint(path, stack, table, rows | {"test_rows": torch.arange(300, 400)})
    return ServiceStudyConfig(path, requests=10, traces=3, out=str(tmp_path / "service.md"), **FEW)


def test_the_page(config: ServiceStudyConfig) -> None:
    assert run(config) == []
    page = Path(config.out).read_text()
    utility, differences = page.split("## Utility")[1].split("## Price by backlog minus")
    table = {row[0]: [float(cell) for cell in row[1:]] for row in map(cells, utility.splitlines()[4:]) if row}
    assert {"price by backlog", "single price", "price backlog at 0.9", "myopic", "best static"} <= table.keys()
    compared = [row for row in map(cells, differences.splitlines()) if row and row[0] in table]
    assert len(compared) == len(table) - 1
    for row in compared:
        gaps = [float(cell.split()[0]) for cell in row[1:]]
        wanted = [100 * (a - b) for a, b in zip(table["price by backlog"], table[row[0]], strict=True)]
        assert gaps == pytest.approx(wanted, abs=0.16)  # both were rounded
    assert all(sum(row[:2]) / 2 == pytest.approx(row[2], abs=1.1e-3) for row in table.values())


def cells(line: str) -> list[str]:
    """Of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": 0}, "servers=0: must be at least 1"),
        ({"loads": []}, "at least one is needed"),
        ({"judged_loads": ["recorded none.txt"]}, "none.txt: cannot be read"),
        ({"checkpoint": "none.pt"}, "no such checkpoint"),
    ],
)
def test_mistakes(change: dict[str, object], message: str, config: ServiceStudyConfig) -> None:
    with pytest.raises(InputError, match=message):
        run(replace(config, **change))  # type: ignore[arg-type]
    assert not Path(config.out).exists()
