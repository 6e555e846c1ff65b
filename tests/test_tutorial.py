"""The tutorial notebook runs from top to bottom, and what is committed in it came out of its own code."""

import re
from pathlib import Path

import nbformat
from tutorial import NOTEBOOK, code_cells, digest, executed, printed

AGAIN = "run `python tests/tutorial.py` and commit docs/tutorial.ipynb"
COMMITTED = nbformat.read(NOTEBOOK, as_version=4)


def utility(text: str, policy: str) -> float:
    found = re.search(rf"^{policy} +(?:utility )?(\d\.\d+)", text, re.MULTILINE)
    assert found, f"no utility of {policy} in: {text}"
    return float(found[1])


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell shows: text, pictures."""
    return [out.get("name") or " ".join(sorted(out.data)) for out in cell.outputs if out.get("name") != "stderr"]


def check_what_the_text_says(notebook: nbformat.NotebookNode) -> None:
    """GRPO trains the policy, it is better than the static rule, and the two runs differ."""
    said = {cell.id: printed(cell) for cell in code_cells(notebook)}
    static, learned, best = (
        utility(said["judged"], policy) for policy in ("budget-aware static", "controller", "oracle")
    )
    assert static + 0.01 < learned < best
    iterations = re.search(r"at iteration (\d+) of (\d+)", said["train"])
    assert iterations
    assert 60 < int(iterations[1]) <= int(iterations[2]), "the best policy is not one that GRPO trained"
    heads, predicting = (utility(said["compare"], run) for run in ("heads", "predicting"))
    assert utility(said["launch"], "learned controller") == heads
    assert predicting > heads
    assert "predicting is better than heads" in said["compare"]


def test_every_cell_runs_and_shows_what_is_committed(tmp_path: Path) -> None:
    fresh = executed(COMMITTED, tmp_path)
    assert not list(tmp_path.iterdir()), "the notebook leaves files beside itself"
    cells = code_cells(fresh)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell, committed in zip(cells, code_cells(COMMITTED), strict=True):
        assert kinds(cell) == kinds(committed), f"{cell.id}: {AGAIN}"
        if "exact" in cell.metadata.get("tags", []):  # looked up, and not trained: the same on every machine
            assert printed(cell) == printed(committed), f"{cell.id}: {AGAIN}"
    assert sum("image/png" in kind for cell in cells for kind in kinds(cell)) == 4
    check_what_the_text_says(fresh)


def test_the_outputs_in_the_file_belong_to_its_code() -> None:
    assert COMMITTED.metadata.get("code") == digest(COMMITTED), AGAIN
    assert not [out for cell in code_cells(COMMITTED) for out in cell.outputs if out.output_type == "error"]
    check_what_the_text_says(COMMITTED)


def test_links_lead_to_guides() -> None:
    words = "\n".join(cell.source for cell in COMMITTED.cells if cell.cell_type == "markdown")
    linked = re.findall(r"\]\(([^)#]+)", words)
    assert linked
    assert all((Path(NOTEBOOK).parent / name).exists() for name in linked)
