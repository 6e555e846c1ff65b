"""The tutorial notebook: runs it as it stands, in a fresh kernel.

    python tests/tutorial.py     # runs docs/tutorial.ipynb and keeps what came out in it

The pictures and numbers in the committed file are then those of its own code, which `tests/test_tutorial.py` checks.
"""

import base64
import copy
import hashlib
import io
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code of all cells."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Those cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """The notebook as it is after running it from top to bottom in this folder, without the outputs it had before.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    fresh = copy.deepcopy(notebook)
    for cell in code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        fresh, timeout=600, resources={"metadata": {"path": str(folder)}}, record_timing=False, coalesce_streams=True
    )
    client.execute()
    fresh.metadata = {**notebook.metadata, "code": digest(notebook)}
    return fresh


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell printed on stdout."""
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def small(picture: str) -> str:
    """A PNG in base64 with 64 colours, which is enough for a chart: a tenth of the size, and of the repository's."""
    quantised, smaller = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64), io.BytesIO()
    quantised.save(smaller, "png", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def main() -> None:
    """Run it and keep what came out, without warnings and progress."""
    notebook = executed(nbformat.read(NOTEBOOK, as_version=4), NOTEBOOK.parent)
    for cell in code_cells(notebook):
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        for out in cell.outputs:
            if "image/png" in out.get("data", {}):
                out.data["image/png"] = small(out.data["image/png"])
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
