"""What people expect around a project says the same as the project itself."""

import json
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
    released = dict(
        re.findall(r"^## (\d+\.\d+\.\d+), (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    )
    assert citation["version"] == knobwise.__version__
    assert str(citation["date-released"]) == released[knobwise.__version__]
    assert citation["license"] == SETUP["metadata"]["license"]


def test_workflows_test_each_supported_python_and_publish_without_a_password():
    (test,) = read_yaml(".github/workflows/test.yml")["jobs"].values()
    assert test["strategy"]["matrix"]["python"] == VERSIONS
    assert {system.split("-")[0] for system in test["strategy"]["matrix"]["os"]} == {
        "ubuntu",
        "macos",
    }
    assert test["steps"][-1]["run"].startswith("make test")
    release = read_yaml(".github/workflows/release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(release["jobs"])
    checks = [
        step["run"]
        for step in release["jobs"]["build"]["steps"]
        if "_version.py" in step.get("run", "")
    ]
    tag = {"GITHUB_REF_NAME": f"v{knobwise.__version__}", "PATH": "/usr/bin:/bin"}
    for name, status in ((tag["GITHUB_REF_NAME"], 0), ("v9.9.9", 1)):
        done = subprocess.run(
            ["sh", "-c", checks[0]], cwd=ROOT, env=tag | {"GITHUB_REF_NAME": name}
        )
        assert done.returncode == status


def test_every_tool_that_a_project_file_runs_is_installed_with_the_tests():
    extras = SETUP["options.extras_require"]
    tested = set(extras["test"].split())
    assert set(extras["docs"].split()) <= tested
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert {re.split(r"[><=\[]", name)[0].lower() for name in tested} <= pinned
    hooks = read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    tools = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert tools == {"ruff", "mypy"}
    assert tools <= {re.split("[><=]", name)[0] for name in tested}
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (
        f"{container['postCreateCommand'].removeprefix('make ')}:"
        in (ROOT / "Makefile").read_text()
    )


def test_templates_ask_for_what_helps():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            names = [part["id"] for part in form["body"]]
            assert len(names) == len(set(names)) > 1
