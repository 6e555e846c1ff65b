"""The shape of the project: which way imports go, what is installed, what stands where."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("losses", "envs", "profiling", "agents", "experiments")
MAY_IMPORT = {
    "losses": {"losses"},
    "envs": {"envs"},
    "profiling": {"profiling", "envs"},
    "agents": {"agents", "envs", "losses", "profiling"},
    "experiments": set(FOLDERS),
}
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            assert node.level == 0, f"{path}: relative import"
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    names = imported(path)
    own = {name.split(".")[1] for name in names if name.startswith("knobwise.")}
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]] | {"_version", "common", "__main__"}
    assert own <= allowed
    assert not {name.split(".")[0] for name in names} & set(FOLDERS), "bare import of one of our folders"


def test_tests_never_import_our_folders_bare() -> None:
    for path in (ROOT / "tests").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & set(FOLDERS), path


def test_the_links_point_to_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "knobwise" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder


def test_the_spine_can_be_read_in_one_sitting() -> None:
    spine = [
        "envs/tables/profile_table.py",
        "envs/configurations/torchrl_env.py",
        "agents/controller/controller.py",
        "losses/grpo.py",
        "agents/training/loop.py",
    ]
    lines = [line for path in spine for line in (ROOT / path).read_text().splitlines() if line.strip()]
    assert len(lines) <= 1000


def test_no_path_of_this_machine_and_no_registry_in_the_project() -> None:
    here = "|".join(re.escape(f"{path}/") for path in (ROOT, ROOT.parent, Path.home()) if len(path.parts) > 1)
    suspicious = re.compile(rf"(?<![\w.])(?:{here})|--(?:extra-)?index-url|--find-links")
    for path in [*SOURCES, *ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]:
        if path.is_file() and path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".yaml", ""}:
            assert not suspicious.search(path.read_text()), path


def test_the_readme_tree_names_every_file_of_code_and_nothing_else() -> None:
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"^(\S+/\S*|\S+\.\w+|Makefile)\s", tree, re.MULTILINE))
    assert all((ROOT / name).exists() for name in named)
    code = {str(path.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py"}
    assert code <= named


def test_the_readme_holds_no_placeholder() -> None:
    assert not re.search(r"^RESULTS$|SEEDS", (ROOT / "README.md").read_text(), re.MULTILINE)
