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
    citation, changelog = read_yaml("CITATION.cff"), (ROOT / "CHANGELOG.md").read_text()
    version = knobwise.__version__
    assert citation["version"] == version
    assert f"\n## {version}, {citation['date-released']}\n" in changelog
    assert citation["license"] == SETUP["metadata"]["license"]


def test_workflows_test_each_supported_python_and_publish_without_a_password():
    (test,) = read_yaml(".github/workflows/test.yml")["jobs"].values()
    matrix = test["strategy"]["matrix"]
    assert matrix["python"] == VERSIONS
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos"}
    assert test["steps"][-1]["run"].startswith("make test")
    release = read_yaml(".github/workflows/release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(release["jobs"])
    runs = [step.get("run", "") for step in release["jobs"]["build"]["steps"]]
    check = next(run for run in runs if "_version.py" in run)
    for name, status in ((f"v{knobwise.__version__}", 0), ("v9.9.9", 1)):
        environment = {"GITHUB_REF_NAME": name, "PATH": "/usr/bin:/bin"}
        assert subprocess.run(["sh", "-c", check], cwd=ROOT, env=environment).returncode == status


def name_of(requirement):
    return re.split(r"[><=\[]", requirement)[0].lower()


def test_every_tool_that_a_project_file_runs_is_installed_with_the_tests():
    extras = SETUP["options.extras_require"]
    tested = set(map(name_of, extras["test"].split()))
    assert set(extras["docs"].split()) <= set(extras["test"].split())
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
