"""What people expect around a project says the same as the project itself."""

import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

import yaml

import knobwise

ROOT = Path(__file__).resolve().parents[1]
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSIONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_version_and_date_agree_everywhere():
    """A version without a date is not released."""
    citation, changelog = read_yaml("CITATION.cff"), (ROOT / "CHANGELOG.md").read_text()
    version = knobwise.__version__
    assert citation["version"] == version
    released = citation.get("date-released")
    newest = re.search(r"^## (.*)$", changelog, re.M)[1]
    assert newest == (f"{version}, {released}" if released else "Unreleased")
    assert citation["license"] == SETUP["metadata"]["license"]


def commands_of(job):
    """What its steps run, as one text."""
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_each_supported_python_is_tested_by_targets_of_the_makefile():
    jobs = read_yaml(".github/workflows/test.yml")["jobs"]
    assert jobs.keys() == {"lint", "docs", "wheel", "test"}
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["python"] == VERSIONS
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in ("lint", "docs", "test"):
        assert commands_of(jobs[name]).strip() == f"make {name} PYTHON=python"
        assert name in targets


def test_the_wheel_job_runs_tests_that_exist():
    job = read_yaml(".github/workflows/test.yml")["jobs"]["wheel"]
    folders = re.findall(r"(?<= )tests/[\w/]+", commands_of(job))
    assert folders
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_what_the_wheel_job_tests_needs_nothing_that_it_has_not():
    """It runs away from the sources, with the wheel and what is copied."""
    commands = commands_of(read_yaml(".github/workflows/test.yml")["jobs"]["wheel"])
    copied = re.search(r"cp -r ([\w ]+)", commands)[1].split()
    lacking = {path.parent.name for path in ROOT.glob("*/*.py")} - {"knobwise", *copied}
    assert {"campaign", "losses"} <= lacking
    names = "|".join(lacking)
    needed = re.compile(rf"^(?:from|import) (?:{names})\b|\"(?:{names})\.\w+:", re.MULTILINE)
    for folder in re.findall(r"(?<= )tests/[\w/]+", commands):
        for path in (ROOT / folder).rglob("*.py"):
            assert not needed.findall(path.read_text()), path


def test_a_release_names_its_version_passes_the_tests_and_needs_no_password():
    workflow = read_yaml(".github/workflows/release.yml")
    # YAML reads `on` as true
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "tests"
    assert jobs["tests"]["needs"] == "version"
    tests = jobs["tests"]["uses"]
    assert "workflow_call" in read_yaml(tests)[True]
    built = read_yaml(tests)["jobs"]["wheel"]["steps"][-1]
    assert built["uses"].startswith("actions/upload-artifact")
    assert built["with"] == jobs["publish"]["steps"][0]["with"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(jobs)
    check = commands_of(jobs["version"]).strip()
    for name, status in ((f"v{knobwise.__version__}", 0), ("v9.9.9", 1)):
        environment = {"GITHUB_REF_NAME": name, "PATH": "/usr/bin:/bin"}
        assert subprocess.run(["sh", "-c", check], cwd=ROOT, env=environment).returncode == status


def name_of(requirement):
    return re.split(r"[><=\[]", requirement)[0].lower()


def requirements(extra):
    """What an extra installs, that of the extras which it names included."""
    lines = set()
    for line in SETUP["options.extras_require"][extra].split():
        if line.startswith("knobwise["):
            lines |= set().union(*map(requirements, line[len("knobwise[") : -1].split(",")))
        else:
            lines.add(line)
    return lines


def test_every_tool_that_a_project_file_runs_is_installed_with_the_tests():
    for extra in SETUP["options.extras_require"]:
        assert requirements(extra) <= requirements("test"), extra
    tested = set(map(name_of, requirements("test")))
    assert tested <= set(map(name_of, (ROOT / "constraints.txt").read_text().splitlines()))
    hooks = read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    tools = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert tools == {"ruff", "mypy"}
    assert tools <= tested
    container = read_yaml(".devcontainer/devcontainer.json")
    goal = container["postCreateCommand"].removeprefix("make ")
    assert f"{goal}:" in (ROOT / "Makefile").read_text()


def test_templates_ask_for_what_helps():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = read_yaml(path)
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= form.keys()
            names = [part["id"] for part in form["body"]]
            assert len(names) == len(set(names)) > 1
