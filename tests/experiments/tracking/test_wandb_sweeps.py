"""The sweep files for W&B: their schema, what an agent makes of them, and which run of a job a sweep then sees."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import wandb
import yaml
from commands import OPTIMISER, TABLE, write_table
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict
from wandb_stub import forget_wandb, offline_runs

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.command_line.compose import read_settings, schema_of
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.tracking.wandb_run import VARIABLES, SweepJob, sweep_job

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "experiments" / "tracking" / "wandb_sweeps").glob("*.yaml"))
OF_GROUP = {"policy": "policy.structure", "loss": "loss.objective", "reward": "reward.kind"}
"""Where the name of a group's option stands among the settings."""
NUMBER = {"type": "number"}
VALUES = {"values": {"type": "array", "minItems": 1, "uniqueItems": True}}
RANGE = {"min": NUMBER, "max": NUMBER}
LOGARITHMIC = {"distribution": {"const": "log_uniform_values"}, "min": NUMBER | {"exclusiveMinimum": 0}, "max": NUMBER}


def exactly(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# of what W&B takes (https://docs.wandb.ai/models/sweeps/sweep-config-keys) that which our files use; the package that
# knows it all runs on the server
SCHEMA = exactly(
    {
        "program": {"type": "string"},
        "name": {"type": "string"},
        "method": {"enum": ["grid", "random", "bayes"]},
        "run_cap": {"type": "integer", "minimum": 1},
        "metric": exactly({"name": {"type": "string"}, "goal": {"enum": ["minimize", "maximize"]}}),
        "parameters": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": r"^[A-Za-z_][A-Za-z0-9_.-]*$"},
            "additionalProperties": {"oneOf": [exactly(VALUES), exactly(RANGE), exactly(LOGARITHMIC)]},
        },
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    optional=("run_cap",),
)


def sweep(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def candidates(parameter: dict[str, Any]) -> list[Any]:
    """Every value, or the ends of a range."""
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def words_of(path: Path, chosen: dict[str, Any]) -> list[str]:
    """The command that W&B's agent makes for these values, by the agent's own code."""
    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    macros["env"] = ["/usr/bin/env"]
    words: list[str] = []
    for chunk in create_sweep_command(list(sweep(path)["command"])):
        macro = re.fullmatch(r"\$\{(\w+)\}", chunk)
        words += macros[macro[1]] if macro else [chunk]
    return words


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_there_is_a_file_for_each_main_experiment() -> None:
    assert [path.stem for path in FILES] == ["controller", "grpo", "heads", "selector"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema(path: Path) -> None:
    config = sweep(path)
    jsonschema.validate(config, SCHEMA)
    assert config["name"] == path.stem
    assert config["method"] == "grid" or "run_cap" in config, "such a sweep never ends"
    if config["method"] == "grid":
        assert all("values" in parameter for parameter in config["parameters"].values())
    for parameter in config["parameters"].values():
        assert "values" in parameter or parameter["min"] < parameter["max"]
    assert path.read_text().startswith("# ")
    assert f"wandb sweep experiments/tracking/wandb_sweeps/{path.name}" in path.read_text()


@pytest.mark.parametrize(
    "broken",
    [{"method": "genetic"}, {"parameters": {}}, {"parameters": {"a": {"min": 1}}}, {"metric": {"name": "x"}}, {"x": 1}],
)
def test_the_schema_refuses(broken: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sweep(FILES[0]) | broken, SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_is_understood_as_the_agent_passes_it(path: Path) -> None:
    parameters = sweep(path)["parameters"]
    for number in range(max(len(candidates(parameter)) for parameter in parameters.values())):
        chosen = {key: candidates(one)[number % len(candidates(one))] for key, one in parameters.items()}
        words = words_of(path, chosen)
        assert words[:3] == ["/usr/bin/env", "knobwise", "train"]
        config = read_settings(schema_of("train", words[3:]), words[3:])
        assert {key: value_at(config, OF_GROUP.get(key, key)) for key in chosen} == chosen
    wrong = words_of(path, {"no.such.key": 1})[3:]
    with pytest.raises(InputError, match=r"no\.such\.key"):
        read_settings(schema_of("train", wrong), wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_maximised_is_a_validation_score_that_the_metrics_page_explains(path: Path) -> None:
    """tests/test_metrics_page.py holds that page against what runs log, and where."""
    metric = sweep(path)["metric"]
    assert metric["goal"] == "maximize"
    stage = re.fullmatch(r"Val/(\w+)/Accuracy_Mean", metric["name"])
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert ("`Val/<stage>/Accuracy_Mean`" if stage else f"`{metric['name']}`") in page
    config = read_settings(schema_of("train", words := words_of(path, {})[3:]), words)
    assert stage is None or set(config.variants) == {stage[1]}, "this one is trained, and it alone"


# -- which run of a job the sweep sees ---------------------------------------------------------------------------------


def test_no_job_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in itertools.product([None, "x"], repeat=2):
        for name, value in zip(VARIABLES, (*given, None), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert sweep_job() == (SweepJob("x", "x", {}) if all(given) else None)


def test_no_setting_is_lost_where_a_group_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid looks for the word; whoever compares runs looks for the settings."""
    chosen = {"policy": "joint", "optimiser.lr": 0.5}
    asked = tmp_path / "config.yaml"
    save_config_file_from_dict(str(asked), {key: {"value": value} for key, value in chosen.items()})
    for name, value in zip(VARIABLES, ("r1", "s1", str(asked)), strict=True):
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {"policy": {"structure": "joint", "hidden": 8}, "optimiser": {"lr": 0.5}, "seeds": [0]}
    arguments = {"name": "job", "experiment": "e", "config": settings, "settings": TrackingSettings(mode="offline")}
    config = Tracker(tmp_path, job_type="evaluate", **arguments).about["config"]
    assert {key: value for key, value in config.items() if key.split(".")[0] in settings} == {
        **{"policy": "joint", "policy.structure": "joint", "policy.hidden": 8},
        **{"optimiser": {"lr": 0.5}, "optimiser.lr": 0.5, "seeds": [0]},
    }
    config = Tracker(tmp_path, job_type="train", seed=0, **arguments).about["config"]
    assert settings.items() <= config.items()
    assert "optimiser.lr" not in config


def test_the_sweep_sees_the_run_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of an agent, logged offline: the results have its id, sweep and parameters; the seeds are separate runs."""
    monkeypatch.chdir(tmp_path)
    write_table(80)
    chosen = {"optimiser.lr": 3e-05, "loss.group_size": 5, "loss.advantage": "rank"}
    parameters = tmp_path / "wandb" / "sweep-s1" / "config-r1.yaml"
    save_config_file_from_dict(str(parameters), {key: {"value": value} for key, value in chosen.items()})
    words = [word for word in words_of(FILES[1], chosen)[3:] if word != "seeds=[0,1,2]"]
    words += [*TABLE, *OPTIMISER, "optimiser.warmup_iterations=2", "optimiser.iterations=2", "policy.members=2"]
    words += ["seeds=[0,1]", "name=job", "tracking=offline"]
    forget_wandb(monkeypatch, tmp_path)
    for name, value in zip((*VARIABLES, "WANDB_PROJECT"), ("r1", "s1", str(parameters), "of-the-agent"), strict=True):
        monkeypatch.setenv(name, value)
    wandb.teardown()  # wandb reads the environment once in the life of a process
    assert main(["train", *words]) == 0
    wandb.teardown()
    run = tmp_path / "runs" / "lean" / "job"
    found = {received.about["displayName"]: received for received in offline_runs(run)}
    assert set(found) == {"job", "job-seed0", "job-seed1"}
    assert {received.about["project"] for received in found.values()} == {"of-the-agent"}
    results = found["job"]
    assert (results.name, results.about["sweep_id"]) == ("r1", "s1")
    assert chosen.items() <= results.config.items()
    scores = json.loads((run / "results.json").read_text())["validation_utility"]
    assert results.summary["Val/Utility"] == pytest.approx(sum(scores) / 2)
    for seed in (0, 1):
        training = found[f"job-seed{seed}"]
        assert training.name != "r1"
        assert not training.about["sweep_id"]
        assert not chosen.keys() & training.config.keys()
