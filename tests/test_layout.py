"""The shape of the project: which way imports go, what stands where, what is installed."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from commands import SIMULATED, words_of

from knobwise import __version__

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("losses", "envs", "profiling", "agents", "serving", "testbeds", "experiments")
MAY_IMPORT = {
    "common": {"common"},
    "losses": {"losses", "common"},
    "envs": {"envs", "common"},
    "profiling": {"profiling", "envs", "common"},
    "agents": {"agents", "envs", "losses", "profiling", "common"},
    "serving": {"serving", "agents", "envs", "losses", "profiling", "common"},
    "testbeds": {"testbeds", "agents", "envs", "losses", "profiling", "common"},
    "experiments": {*FOLDERS, "common"},
}
COMMON = ROOT / "knobwise/common"
EXPORTED = ROOT / "agents/deployed"
"""What is copied beside an exported controller, where it is a package of its own."""
SOURCES = [path for folder in (*FOLDERS, COMMON) for path in sorted((ROOT / folder).rglob("*.py"))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
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
    """The modules that a file imports; in what is exported, files of that folder stand for
    themselves."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == (path.parent == EXPORTED and is_exported(node.module)), path
            if not node.level:
                modules.add(node.module)
    return modules


def is_exported(module):
    return (EXPORTED / f"{module}.py").exists()


def test_imports_go_one_way():
    for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")):
        names = [name.split(".") for name in imported(path)]
        bare = {name[0] for name in names}
        assert bare.isdisjoint(FOLDERS), f"{path}: bare import of one of our folders"
        if path in SOURCES:
            parts = {name[1] for name in names if name[0] == "knobwise" and len(name) > 1}
            assert parts & MAY_IMPORT.keys() <= MAY_IMPORT[top_of(path)], path
        if path.parent == EXPORTED:
            assert bare - sys.stdlib_module_names <= {"numpy"}, path


def strings_in(tree):
    """The strings of the code; docstrings are not among them."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def test_what_decides_and_learns_names_no_testbed():
    """Also not by a string, such as those of lazy imports and of gymnasium's entry points."""
    apart = [path for path in SOURCES if top_of(path) in ("envs", "losses", "agents", "serving")]
    for path in (*apart, ROOT / "knobwise/__init__.py"):
        words = [*imported(path), *strings_in(ast.parse(path.read_text()))]
        assert not [word for word in words if "testbeds" in word], path


def test_only_what_made_the_shipped_files_imports_what_made_them():
    """It is not in the wheel."""
    for path in (*SOURCES, *(ROOT / "knobwise").glob("*.py")):
        if path.parent != ROOT / "testbeds/make":
            words = [*imported(path), *strings_in(ast.parse(path.read_text()))]
            assert not [word for word in words if "testbeds.make" in word], path


PLAIN = ("evidence", "inspection", "settings", "tracking", "train")
"""Folders of `experiments` that make no page."""


def test_only_what_makes_pages_imports_the_report():
    for folder in PLAIN:
        for path in (ROOT / "experiments" / folder).glob("*.py"):
            # a run ends with its report
            if path.name != "finish.py":
                pages = [name for name in imported(path) if "experiments.report" in name]
                assert not pages, path


def test_no_circle_between_folders():
    """Imports inside functions count too; those for type checkers and in `__main__` blocks do
    not."""
    folders = {}
    for path in SOURCES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        folders[f"knobwise.{name.removeprefix('knobwise.')}"] = str(path.parent.relative_to(ROOT))
    edges = {folder: set() for folder in folders.values()}

    def visit(node, folder):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and re.search(
                "TYPE_CHECKING|__name__", ast.unparse(child.test)
            ):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                names = [child.module, *(f"{child.module}.{alias.name}" for alias in child.names)]
                edges[folder] |= {folders[name] for name in names if name in folders} - {folder}
            visit(child, folder)

    for path, folder in zip(SOURCES, folders.values(), strict=True):
        visit(ast.parse(path.read_text()), folder)
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the folders


def names_in(tree):
    """Every name that a file gives to something: functions, classes, arguments, variables,
    fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


def test_names_say_what_a_thing_is():
    for path in (*SOURCES, *BENCHMARKS):
        names = names_in(ast.parse(path.read_text()))
        assert not list(filter(BANNED.match, names)), path


def test_no_public_class_is_defined_twice():
    """The name of a class says which it is."""
    counts = Counter()
    for path in (*SOURCES, *(ROOT / "knobwise").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                counts[node.name] += 1
    assert not [name for name, count in counts.items() if count > 1]


def test_no_two_files_of_tests_have_one_name():
    """Folders of tests are no packages, so that a whole run would read only the first of them."""
    files = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in files.items() if count > 1]


def test_the_links_point_to_the_folders():
    for folder in FOLDERS:
        assert (ROOT / "knobwise" / folder).readlink() == Path("..") / folder


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
    named, top = set(), ""
    for line in tree:
        names = re.findall(r"[a-z_]+(?=/(?:\s|$))", re.split(r"\s{2,}(?=[^/]*$)", line)[0] + " ")
        if line.startswith(" "):
            names = [f"{top}/{name}" for name in names]
        else:
            top = names[0]
        named |= set(names)
    folders = {path.parent for path in SOURCES} - {COMMON} | {COMMON.parent}
    assert {str(folder.relative_to(ROOT)) for folder in folders} <= named
    assert all((ROOT / name).is_dir() for name in named)


def pip(*words, python=sys.executable):
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    subprocess.run(command, check=True, capture_output=True)


def project_files():
    """What git keeps or would keep; in an unpacked sdist, which has no git, all that is not
    ignored."""
    if (ROOT / ".git").exists():
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")
        return [Path(name) for name in names if name and os.path.lexists(ROOT / name)]
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    paths = []
    for folder, folders, files in os.walk(ROOT):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        kept = [name for name in folders if not any(fnmatch(name, line) for line in ignored)]
        folders[:] = set(kept) - set(links)
        paths += [Path(folder, name).relative_to(ROOT) for name in (*files, *links)]
    # what the archive says of itself
    return [path for path in paths if path != Path("PKG-INFO")]


SDIST = "import setuptools.build_meta as backend; print(backend.build_sdist('..'))"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder that the sdist unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    # a copy, because building leaves build/ and *.egg-info beside the sources
    for path in project_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path, follow_symlinks=False)
    built = subprocess.check_output([sys.executable, "-c", SDIST], cwd=source, text=True)
    name = built.splitlines()[-1]
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the sdist as release.yml does."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_sdist_holds_what_a_clone_holds(sdist):
    """Its tests, with all that they read, and the links, not copies of what they lead to."""
    for path in project_files():
        assert os.path.lexists(sdist / path), path
        assert (sdist / path).is_symlink() == (ROOT / path).is_symlink(), path


def install(python, wheel, folder):
    """Put nothing but the wheel into a folder; pip refuses it where its metadata does not allow
    this Python."""
    pip("install", "--no-deps", "--no-compile", "--target", folder, wheel, python=python)
    return folder


def works(python):
    return subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0


@functools.cache
def pythons():
    """An interpreter of each supported version, as far as there is one: this one, pyenv's, those on
    the path."""
    by_version = {"{}.{}".format(*sys.version_info): sys.executable}
    for version in re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text()):
        name = f"python{version}"
        candidates = [*(Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/{name}")]
        candidates += filter(None, [shutil.which(name)])
        if python := next(filter(works, candidates), None):
            by_version.setdefault(version, python)
    return by_version


INSTALLED = """
import compileall, importlib.metadata, sys
about = importlib.metadata.distribution("knobwise")
(command,) = about.entry_points
print(about.version, command.name, compileall.compile_dir(sys.argv[1], quiet=1))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("version", pythons())
def test_the_wheel_installs_and_compiles_on_each_python(version, wheel, tmp_path):
    """Where the dependencies are installed it also trains, below; elsewhere this does not download
    them."""
    python = pythons()[version]
    site = install(python, wheel, tmp_path / "site")
    done = run(site, tmp_path, "-c", INSTALLED, site, python=python)
    assert done.split() == [__version__, "knobwise", "True"]


def run(installed, folder, *words, python=sys.executable):
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.check_output([python, *words], cwd=folder, env=environment, text=True)


COMMANDS = """
import sys
import knobwise, knobwise.__main__
print(knobwise.__file__)
knobwise.__main__.main(["--help"])
from knobwise.testbeds.profiles import builtin_profile
print(builtin_profile().num_samples, "samples")
sys.exit(knobwise.__main__.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.campaign
def test_the_wheel_holds_everything_and_only_knobwise(wheel, tmp_path):
    """Help and a training run from another folder, without the checkout."""
    installed = install(sys.executable, wheel, tmp_path / "site")
    folders = {path.name for path in installed.iterdir() if path.is_dir()} - {"bin"}
    assert folders == {"knobwise", *(path.name for path in installed.glob("knobwise-*.dist-info"))}
    words = words_of(SIMULATED, """
        optimiser.pretrain_iterations=2 optimiser.iterations=2 seeds=[0] tracking=disabled
        policy.experts=[ridge] policy.fold_networks=2 baselines=false
    """)  # fmt: skip
    where, printed = run(installed, tmp_path, "-c", COMMANDS, *words).split("\n", 1)
    assert where.startswith(str(installed))
    for part in ("knobwise train", "samples", "report.html"):
        assert part in printed
    assert (tmp_path / "runs/latest/results.json").exists()
