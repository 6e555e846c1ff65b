"""The wheel holds everything: it runs from another folder, without the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = folder / "source"
    # a copy, because building leaves build/ and *.egg-info beside the sources
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    ours = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in ours.split("\0"):
        if name and not name.startswith("tests/") and (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                target.symlink_to((ROOT / name).readlink())
            else:
                target.write_bytes((ROOT / name).read_bytes())
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def run(installed: Path, folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_only_knobwise_is_installed(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if path.is_dir()} - {"bin"} == {
        "knobwise",
        *(path.name for path in installed.glob("knobwise-*.dist-info")),
    }


def test_help_and_a_training_run_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import knobwise; print(knobwise.__file__)")
    assert where.startswith(str(installed))
    assert "knobwise train" in run(installed, tmp_path, "-m", "knobwise", "--help")
    assert "samples" in run(installed, tmp_path, "-m", "knobwise", "inspect")  # the built-in profile is in it
    words = ["optimiser.warmup_iterations=2", "optimiser.iterations=2", "seeds=[0]", "tracking=disabled"]
    words += ["profile=simulated", "profile.samples=60", "policy.experts=[ridge]"]
    out = run(installed, tmp_path, "-m", "knobwise", "train", *words)
    assert "report.html" in out
    assert (tmp_path / "runs" / "latest" / "results.json").exists()
