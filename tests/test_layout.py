"""The shape of the project: which way imports go, what stands where, what is installed."""

import ast
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from commands import SIMULATED

from knobwise import __version__

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("losses", "envs", "profiling", "agents", "experiments")
MAY_IMPORT = {
    "common": {"common"},
    "losses": {"losses", "common"},
    "envs": {"envs", "common"},
    "profiling": {"profiling", "envs", "common"},
    "agents": {"agents", "envs", "losses", "profiling", "common"},
    "experiments": {*FOLDERS, "common"},
}
COMMON = ROOT / "knobwise" / "common"
EXPORTED = ROOT / "agents" / "policy"
"""What is copied beside an exported controller, where it is a package of its own."""
SOURCES = [path for folder in (*FOLDERS, COMMON) for path in sorted((ROOT / folder).rglob("*.py"))]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
MOST_MODULES = 12
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
LONGEST_FILE = 4300
"""In tokens, so that line breaks, comments and docstrings are free."""
BANNED = re.compile(
    r"^_?(one|found|said|told|own|there|ends|asked|given|shown|near|look|apart|called|beside|here|of|looked_s|spoken_of)$",
    re.IGNORECASE,
)
"""Names that name nothing; CONTRIBUTING.md has the project's words."""


def top_of(path):
    """The part of the project that a file is in: one of `MAY_IMPORT`."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "knobwise" else parts[0]


def imported(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if path.parent == EXPORTED and node.level == 1:
                assert (EXPORTED / f"{node.module}.py").exists(), f"{path}: {node.module}"
                continue
            modules.add(node.module)
            assert node.level == 0, f"{path}: relative import"
    return modules


def test_what_is_exported_needs_numpy_alone():
    for path in sorted(EXPORTED.glob("*.py")):
        parts = {name.split(".")[0] for name in imported(path)}
        assert parts - sys.stdlib_module_names <= {"numpy"}, path


def test_imports_go_one_way():
    for path in SOURCES:
        names = imported(path)
        parts = {name.split(".")[1] for name in names if name.startswith("knobwise.")} & {
            *FOLDERS,
            "common",
        }
        assert parts <= MAY_IMPORT[top_of(path)], path
        assert not {name.split(".")[0] for name in names} & set(FOLDERS), (
            f"{path}: bare import of one of our folders"
        )


def test_no_circle_between_folders():
    """Imports inside functions count too; those for type checkers and in `__main__` blocks do
    not."""
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    modules = {path: f"knobwise.{name.removeprefix('knobwise.')}" for path, name in modules.items()}
    folder_of = {name: str(path.parent.relative_to(ROOT)) for path, name in modules.items()}
    edges = {folder: set() for folder in folder_of.values()}

    def visit(node, folder):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and re.search(
                "TYPE_CHECKING|__name__", ast.unparse(child.test)
            ):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names} | {child.module}
                edges[folder] |= {folder_of[name] for name in names if name in folder_of} - {folder}
            visit(child, folder)

    for path, name in modules.items():
        visit(ast.parse(path.read_text()), folder_of[name])
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the folders


def test_tests_never_import_our_folders_bare():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & set(FOLDERS), path


def names_in(tree):
    """Every name that a file gives to something: functions, classes, arguments, variables,
    fields."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name


def test_names_say_what_a_thing_is():
    for path in (*SOURCES, *BENCHMARKS):
        assert not {name for name in names_in(ast.parse(path.read_text())) if BANNED.match(name)}, (
            path
        )


def lines_with_tokens(source):
    """Count the tokens of each line of Python, without docstrings, comments and line breaks."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    counts = Counter[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type in COUNTED and line not in docstrings:
            counts[line] += 1
    return counts


def test_no_folder_is_crowded_and_every_file_can_be_read_at_one_sitting():
    counts = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_MODULES}
    lengths = {
        str(path.relative_to(ROOT)): lines_with_tokens(path.read_text()).total() for path in SOURCES
    }
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def test_code_is_open():
    """Few statements say several things at once; counted in 1,000 lines."""
    counts = Counter[str]()
    lines = 0
    for path in (*SOURCES, *BENCHMARKS):
        source = path.read_text().splitlines()
        lines += len(source)
        counts["comments"] += sum(line.strip().startswith("#") for line in source)
        counts["long lines"] += sum(len(line) > 100 for line in source)
        for node in ast.walk(ast.parse("\n".join(source))):
            match node:
                case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                    counts["tuple = tuple"] += 1
                case ast.IfExp():
                    counts["conditional expressions"] += 1
                case ast.ListComp() | ast.DictComp() | ast.SetComp() | ast.GeneratorExp():
                    inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
                    counts["nested comprehensions"] += len(inner) > 1 or len(node.generators) > 1
    most = {
        "tuple = tuple": 3,
        "conditional expressions": 9,
        "nested comprehensions": 0.5,
        "long lines": 0,
    }
    per_1000 = {name: 1000 * count / lines for name, count in counts.items()}
    assert per_1000.pop("comments") >= 25
    assert not {name: share for name, share in per_1000.items() if share > most[name]}


def test_the_links_point_to_the_folders():
    for folder in FOLDERS:
        link = ROOT / "knobwise" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder


def test_the_spine_can_be_read_in_one_sitting():
    spine = [
        "envs/tables/profile_table.py",
        "envs/configurations/torchrl_env.py",
        "agents/controller/controller.py",
        "losses/grpo.py",
        "agents/training/loop.py",
    ]
    assert sum(len(lines_with_tokens((ROOT / path).read_text())) for path in spine) <= 1000


def test_no_path_of_this_machine_and_no_registry_in_the_project():
    places = "|".join(
        re.escape(f"{path}/") for path in (ROOT, ROOT.parent, Path.home()) if len(path.parts) > 1
    )
    suspicious = re.compile(rf"(?<![\w.])(?:{places})|--(?:extra-)?index-url|--find-links")
    for path in [*SOURCES, *ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]:
        if path.is_file() and path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".yaml", ""}:
            assert not suspicious.search(path.read_text()), path


def test_the_readme_holds_no_placeholder_and_its_tree_names_every_folder_and_nothing_else():
    readme = (ROOT / "README.md").read_text()
    assert not re.search(r"^RESULTS$|SEEDS", readme, re.MULTILINE)
    tree = readme.split("## The tree")[1].split("```")[1].strip("\n").splitlines()
    assert len(tree) <= 30
    named, top = set(), ""
    for line in tree:
        names = re.findall(r"[a-z_]+(?=/(?:\s|$))", re.split(r"\s{2,}(?=[^/]*$)", line)[0] + " ")
        if line.startswith(" "):
            names = [f"{top}/{name}" for name in names]
        else:
            top = names[0]
        named |= set(names)
    folders = {path.parent for path in SOURCES} - {COMMON} | {COMMON.parent}
    code = {str(folder.relative_to(ROOT)) for folder in folders}
    assert code <= named
    assert all((ROOT / name).is_dir() for name in named)


PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from what git keeps or would keep."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # a copy, because building leaves build/ and *.egg-info beside the sources
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    ours = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in ours.split("\0"):
        if name and not name.startswith("tests/") and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([sys.executable, *PIP, *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(python, wheel, folder):
    """Put nothing but the wheel into a folder; pip refuses it where its metadata does not allow
    this Python."""
    words = ["install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel)]
    subprocess.run([python, *PIP, *words], check=True)
    return folder


@pytest.fixture
def installed(wheel, tmp_path_factory):
    return install(sys.executable, wheel, tmp_path_factory.mktemp("installed") / "site")


def works(python):
    return subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0


@functools.cache
def pythons():
    """An interpreter of each supported version, as far as there is one: this one, pyenv's, those on
    the path."""
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    by_version = {}
    for version in supported:
        candidates = [sys.executable] if version == "{}.{}".format(*sys.version_info) else []
        candidates += map(
            str, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")
        )
        candidates += filter(None, [shutil.which(f"python{version}")])
        if python := next(filter(works, candidates), None):
            by_version[version] = python
    return by_version


INSTALLED = """
import compileall, importlib.metadata, sys
about = importlib.metadata.distribution("knobwise")
(command,) = about.entry_points
print(about.version, command.name, compileall.compile_dir(sys.argv[1], quiet=1))
"""


@pytest.mark.parametrize("version", pythons())
def test_the_wheel_installs_and_compiles_on_each_python(version, wheel, tmp_path):
    """Where the dependencies are installed it also trains, below; elsewhere this does not download
    them."""
    python = pythons()[version]
    site = install(python, wheel, tmp_path / "site")
    done = run(site, tmp_path, "-c", INSTALLED, str(site), python=python)
    assert done.split() == [__version__, "knobwise", "True"]


def run(installed, folder, *words, python=sys.executable):
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [python, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


COMMANDS = """
import sys
import knobwise, knobwise.__main__
print(knobwise.__file__)
knobwise.__main__.main(["--help"])
knobwise.__main__.main(["inspect"])  # the built-in profile is in it
sys.exit(knobwise.__main__.main(["train", *sys.argv[1:]]))
"""


def test_the_wheel_holds_everything_and_only_knobwise(installed, tmp_path):
    """Help and a training run from another folder, without the checkout."""
    folders = {path.name for path in installed.iterdir() if path.is_dir()} - {"bin"}
    assert folders == {"knobwise", *(path.name for path in installed.glob("knobwise-*.dist-info"))}
    words = [
        "optimiser.warmup_iterations=2",
        "optimiser.iterations=2",
        "seeds=[0]",
        "tracking=disabled",
    ]
    words += [*SIMULATED, "policy.experts=[ridge]", "policy.members=2", "baselines=false"]
    where, printed = run(installed, tmp_path, "-c", COMMANDS, *words).split("\n", 1)
    assert where.startswith(str(installed))
    for part in ("knobwise train", "samples", "report.html"):
        assert part in printed
    assert (tmp_path / "runs" / "latest" / "results.json").exists()
