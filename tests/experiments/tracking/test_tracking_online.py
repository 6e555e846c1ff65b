"""What really arrives: runs through the command line, offline, read back record by record; online,
and by `wandb sync`, at a small W&B server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import TABLE, write_table
from helpers import small_beams
from omegaconf import OmegaConf
from wandb_stub import ReceivedRun, WandbStub, forget_wandb, offline_runs

from knobwise.__main__ import main
from knobwise.experiments.command_line.compose import question_of
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results, wandb_run
from knobwise.experiments.tracking.tracker import Tracker, git_commit

TRAIN = [
    "train",
    *TABLE,
    "policy=utility",
    "name=tiny",
    "optimiser.warmup_iterations=2",
    "optimiser.iterations=4",
]
TRAIN += ["optimiser.teacher_iterations=2", "optimiser.contexts=16", "optimiser.evaluate_every=2"]
TRAIN += ["policy.hidden=8", "seeds=[0,3]"]
TRAIN += ["tracking.tags=[nightly]", "baselines=false"]
SELECT = [
    "train",
    "experiment=selector_replay",
    "beams.path=b.safetensors",
    "beams.train=0.6",
    "beams.validation=0.2",
]
SELECT += [
    "selector.width=16",
    "selector.heads=2",
    "sft.epochs=1",
    "rce.epochs=1",
    "variants.grpo_recorded.epochs=1",
]
SELECT += ["variants.shuffled_recorded.epochs=1", "seeds=[0,3]", "jobs=1", "name=tiny"]


BOUNDS = ("_ci95_low", "_ci95_high")


@pytest.fixture(scope="module")
def stub() -> Iterator[WandbStub]:
    with WandbStub() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a profile and beams, as the current one; no key, none of the developer's own
    W&B variables."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        forget_wandb(patch, folder)
        patch.chdir(folder)
        write_table(90, holes=0.2)
        small_beams(60)[0].save("b.safetensors")
        yield folder


@pytest.fixture
def online(stub: WandbStub) -> Iterator[None]:
    with stub.connected():
        yield


@pytest.fixture(scope="module")
def offline(place: Path) -> dict[str, Path]:
    """A run of each system, logged offline."""
    for words in (TRAIN, SELECT):
        assert main([*words, "tracking=offline"]) == 0
    return {
        "controller": place / "runs/controller/tiny",
        "selector": place / "runs/selector_replay/tiny",
    }


def sync(stub: WandbStub, run: Path) -> list[ReceivedRun]:
    """What `wandb sync` brings to the server: `wandb sync runs/latest/wandb/offline-run-*`."""
    known = set(stub.runs)
    sessions = sorted(map(str, (run / "wandb").glob("offline-run-*")))
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *sessions]
    done = subprocess.run(
        command,
        env=os.environ | stub.environment,
        cwd=run.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [found for name, found in stub.runs.items() if name not in known]


def curves(run: Path, seed: int) -> list[dict[str, float]]:
    """metrics.csv of a seed, everything of one step together."""
    frame = (
        pl.read_csv(run / "metrics.csv", infer_schema_length=None)
        .filter(pl.col("seed") == seed)
        .drop("seed")
    )
    steps = frame.group_by("step", maintain_order=True).agg(pl.all().drop_nulls().last())
    return [
        {name: value for name, value in row.items() if value is not None}
        for row in steps.to_dicts()
    ]


def tables(found: ReceivedRun) -> dict[str, pl.DataFrame]:
    """Name → content."""
    content_of = {}
    for path, body in found.files.items():
        if path.endswith(".table.json"):
            content, name = json.loads(body), path.removeprefix("media/table/").rsplit("_", 2)[0]
            content_of[name] = pl.DataFrame(
                content["data"], content["columns"], orient="row", infer_schema_length=None
            )
    return content_of


def flat(row: dict[str, Any]) -> dict[str, Any]:
    ends = {
        f"{k}_{e}": v[i]
        for k, v in row.items()
        if k.endswith("_ci95")
        for i, e in enumerate(("low", "high"))
    }
    ends |= {"ci95_low": row["ci95"][0], "ci95_high": row["ci95"][1]} if "ci95" in row else {}
    return {k: v for k, v in row.items() if not isinstance(v, list)} | ends


def same(shown: pl.DataFrame, rows: list[dict[str, Any]]) -> None:
    """A table of W&B and rows of a file, number by number; a column that a row does not have is
    empty there."""
    assert len(shown) == len(rows)
    for one, row in zip(shown.iter_rows(named=True), rows, strict=True):
        assert {k: v for k, v in one.items() if v is not None} == {
            k: v for k, v in row.items() if v is not None
        }


def filled(settings: Any) -> Any:
    """Without empty groups, which W&B does not send."""
    if not isinstance(settings, dict):
        return settings
    return {key: filled(value) for key, value in settings.items() if value != {}}


def of_stage(rows: list[dict[str, float]], stage: str) -> list[dict[str, float]]:
    """What a stage logged, from its own first step on."""
    if not stage:
        return rows
    parts = [
        {
            k.replace(f"/{stage}/", "/"): v
            for k, v in row.items()
            if f"/{stage}/" in k or k == "step"
        }
        for row in rows
    ]
    parts = [part for part in parts if len(part) > 1]
    return [part | {"step": part["step"] - parts[0]["step"]} for part in parts]


def holds(found: list[ReceivedRun], run: Path, seeds: tuple[int, ...] = (0, 3)) -> ReceivedRun:
    """Every row of metrics.csv is in the run of its seed and stage, and what each says of itself;
    gives that of the results."""
    named = {each.about["displayName"]: each for each in found}
    assert len(named) == len(found)
    settings = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert isinstance(settings, dict)
    results = json.loads((run / "results.json").read_text())
    trained = {
        f"tiny {f'{stage} s{seed}'.strip()}": (stage, seed)
        for stage in results.get("validation", [""])
        for seed in seeds
    }
    assert set(named) == {"tiny", *trained}
    for name, each in named.items():
        assert each.exit_code == 0
        assert each.about["groupName"] == run.parent.name
        assert each.about["jobType"] == ("evaluate" if name == "tiny" else "train")
        assert {key: filled(each.config[key]) for key in settings} == filled(settings)
        stage, seed = trained.get(name, ("", None))
        assert (each.config.get("stage", ""), each.config.get("seed")) == (stage, seed)
        assert each.config["run"] == f"{run.parent.name}/tiny"
        assert each.config["profile_digest"] == results["profile"]["digest"]
        assert each.config["git_commit"] == git_commit()
    for name, (stage, seed) in trained.items():
        rows, each = of_stage(curves(run, seed), stage), named[name]
        history = each.history
        speeds = [row.pop(wandb_run.THROUGHPUT) for row in history if wandb_run.THROUGHPUT in row]
        assert history == rows
        assert len(speeds) == len([row for row in rows if "Train/Reward_Mean" in row])
        assert min(speeds) > 0
        assert len({key for row in each.history for key in row}) <= 40
        assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
        for metric in rows[0].keys() - {"step"}:
            values = [row[metric] for row in rows if metric in row]
            best = (
                {"min": min(values)}
                if "Loss" in metric
                else {"max": max(values)}
                if "Accuracy_M" in metric
                else {}
            )
            assert {k: each.summary[metric][k] for k in [*best, "last"]} == best | {
                "last": values[-1]
            }
    return named["tiny"]


def holds_test_scores(found: list[ReceivedRun], run: Path, seeds: tuple[int, ...] = (0, 3)) -> None:
    """The runs that trained hold the scores of their seed: what `results.json` has, seed by seed or
    as its mean."""
    results = json.loads((run / "results.json").read_text())
    scores = {
        (each.config.get("stage", ""), each.config["seed"]): {
            name.removeprefix("Test/"): value
            for name, value in each.summary.items()
            if name.startswith("Test/")
        }
        for each in found
        if each.about["jobType"] == "train"
    }
    for stage in results.get("validation", [""]):
        place = {"shots": 2} if stage else {"budget_ms": None}
        rows = [*results["rows"], *results.get("controls", [])]
        (row,) = (
            row
            for row in rows
            if row.items() >= ({"policy": stage or "controller"} | place).items()
        )
        by_seed = [scores[stage, seed] for seed in seeds]
        name = "accuracy" if stage else "utility"
        assert [each[name.title()] for each in by_seed] == pytest.approx(
            row[f"{name}_per_seed"], abs=1e-6
        )
        means = (
            {"Oracle_Gap_Closed": "gap_closed", "On_Time_Feasible": "satisfaction_feasible"}
            if not stage
            else {}
        )
        for name, key in means.items():
            assert sum(each[name] for each in by_seed) / 2 == pytest.approx(row[key], abs=1e-5)


def holds_results(evaluated: ReceivedRun, run: Path) -> None:
    """What is in results.json is in its summary and in its tables, over budgets or shots in one of
    them."""
    results = json.loads((run / "results.json").read_text())
    selector = results.get("system") == "selector"
    place, middle, score = ("shots", 2, "accuracy") if selector else ("budget_ms", None, "utility")
    rows = [flat(row) for row in [*results["rows"], *results.get("controls", [])]]
    means = {f"Test/{row['policy']}/{score}": row[score] for row in rows if row[place] == middle}
    summary = {
        name: value
        for name, value in evaluated.summary.items()
        if name.startswith("Test/") and "/" in name[5:]
    }
    assert {name: value for name, value in summary.items() if name.endswith(f"/{score}")} == means
    main = results.get("best_policy", "controller")
    (row,) = (row for row in rows if (row["policy"], row[place]) == (main, middle))
    others = {name for name in summary if name not in means}
    assert others == {f"Test/{main}/{key}" for key in others_of(selector) if row[key] is not None}
    assert {name: summary[name] for name in others} == {
        name: row[name.rpartition("/")[2]] for name in others
    }
    scores = {
        f"Val/{stage}/Accuracy_Mean": each for stage, each in results.get("validation", {}).items()
    }
    for name, each in (
        scores if selector else {"Val/Utility": results["validation_utility"]}
    ).items():
        assert evaluated.summary[name] == pytest.approx(sum(each) / 2)
    assert evaluated.summary.get("best_seed") == results.get("best_seed")
    gained = {
        name.removeprefix("GRPO/"): v
        for name, v in evaluated.summary.items()
        if name.startswith("GRPO/")
    }
    assert gained == flat(results.get("grpo_gain", {}))
    assert selector or gained.keys() == {
        f"{p}{end}" for p in ("test", "held_out") for end in ("", *BOUNDS)
    }

    tables_in, by_place = tables(evaluated), f"Test/by_{place.removesuffix('_ms')}_table"
    knobs = list(dict.fromkeys(use["knob"] for use in results.get("knob_usage", [])))
    wanted = {
        "Test/policies",
        by_place,
        "Test/decisions",
        *(f"Knobs/{knob}_table" for knob in knobs),
    }
    assert set(tables_in) == wanted | ({"Test/differences"} if selector else set())
    keys = {key.split(".")[0] for row in evaluated.history for key in row}
    assert set(tables_in) <= keys
    assert len(keys) <= 40
    same(tables_in["Test/policies"], [row for row in rows if row[place] == middle])
    same(tables_in[by_place], [row for row in rows if row[place] is not None])
    if selector:
        same(tables_in["Test/differences"], [flat(row) for row in results["differences"]])
    for knob in knobs:
        uses = [
            use
            for use in results["knob_usage"]
            if (use["policy"], use["knob"]) == ("controller", knob)
        ]
        same(tables_in[f"Knobs/{knob}_table"], [use | {"value": str(use["value"])} for use in uses])
    judged = (
        ["sft", "rce", "grpo_recorded"]
        if selector
        else ["controller", "teacher", "budget_aware_static"]
    )
    kept = read_decisions(run).filter(pl.col("policy").is_in([*judged, "oracle"]))
    same(tables_in["Test/decisions"], kept.to_dicts())
    assert selector or len(kept) == 6 * results["test_samples"] * 5
    pages = [body for path, body in evaluated.files.items() if path.startswith("media/html/report")]
    assert pages == [(run / "report.html").read_bytes()]
    assert any(path.startswith("media/images/Charts/") for path in evaluated.files)


def others_of(selector: bool) -> tuple[str, ...]:
    """The further numbers of the main policy in the summary."""
    if selector:
        return "accuracy_ci95_low", "accuracy_ci95_high", "decision_us_p50"
    numbers = (
        "utility_free",
        "gap_closed",
        "accuracy",
        "latency_ms_mean",
        "satisfaction",
        "satisfaction_feasible",
    )
    return "utility_ci95_low", "utility_ci95_high", *numbers, "decision_us_p50"


def holds_artifacts(stub: WandbStub, found: list[ReceivedRun], run: Path, lineage: bool) -> None:
    """The profile leads to the run that trained, this one to the model, and the model to the
    results."""
    results = json.loads((run / "results.json").read_text())
    (evaluated,) = [r for r in found if r.about["jobType"] == "evaluate"]
    kept = (results.get("best_policy", ""), results["best_seed"])
    (trained,) = [r for r in found if (r.config.get("stage", ""), r.config.get("seed")) == kept]
    logged = [
        artifact for artifact in stub.artifacts.values() if artifact.run in {r.name for r in found}
    ]
    assert all(artifact.committed for artifact in logged)
    for artifact in logged:  # W&B names an upload by its path in the artifact's manifest
        listed = {Path(path).name for path in artifact.manifest["contents"]}
        assert {Path(path).name for path in artifact.files} == listed
    (model,) = [artifact for artifact in logged if artifact.kind == "model"]
    assert (model.run, model.name) == (trained.name, f"{run.parent.name}-tiny")
    assert {"best", "latest"} <= set(model.aliases)
    paths = (run / "checkpoints" / "best.pt", run / "config.yaml", run / "results.json")
    assert model.files == {path.name: path.read_bytes() for path in paths}
    used = {r.name: [stub.artifacts[identity] for identity in r.used] for r in found}
    if not lineage:  # offline wandb cannot note what a run has used
        assert not any(used.values())
    else:
        assert [artifact.kind for artifact in used[evaluated.name]] == ["dataset", "model"]
        assert used[evaluated.name][1] is model
        assert all(
            [a.kind for a in used[r.name]] == ["dataset"] for r in found if r is not evaluated
        )
    data = [
        artifact
        for artifacts in (logged, *used.values())
        for artifact in artifacts
        if artifact.kind == "dataset"
    ]
    assert data
    assert len({artifact.digest for artifact in data}) == 1
    for artifact in data:
        assert (artifact.kind, artifact.committed) == ("dataset", True)
        assert artifact.metadata == results["profile"]
        assert json.loads(artifact.files["profile.json"]) == results["profile"]
    tables_sent = {artifact.name for artifact in logged if artifact.kind == "run_table"}
    assert len(tables_sent) == len(tables(evaluated))


@pytest.mark.usefixtures("online")
def test_an_online_run_sends_every_row_table_and_artifact(place: Path, stub: WandbStub) -> None:
    known, words = set(stub.runs), [word for word in TRAIN if not word.startswith("name=")]
    assert main([*words, "tracking=online", "runs=online", "name=tiny"]) == 0
    found = [run for name, run in stub.runs.items() if name not in known]
    run = place / "online" / "controller" / "tiny"
    evaluated = holds(found, run)
    holds_test_scores(found, run)
    holds_results(evaluated, run)
    holds_artifacts(stub, found, run, lineage=True)
    assert set(evaluated.about["tags"]) == {
        "nightly",
        "taught",
        "sampled",
        "reward-utility",
        "advantage-centred",
    }
    assert all(each.about["notes"] == question_of("controller") for each in found)
    (view,) = stub.views.values()
    assert view["projectName"] == "knobwise"
    knobs = {use["knob"] for use in json.loads((run / "results.json").read_text())["knob_usage"]}
    assert all(f'"Knobs/{knob}_table"' in view["spec"] for knob in knobs)
    assert stub.unknown == []


@pytest.mark.parametrize("kind", ["controller", "selector"])
def test_sync_brings_every_row_table_and_artifact(
    offline: dict[str, Path], stub: WandbStub, kind: str
) -> None:
    run = offline[kind]
    found = sync(stub, run)
    holds_results(holds(found, run), run)
    holds_test_scores(found, run)
    holds_artifacts(stub, found, run, lineage=False)
    assert stub.unknown == []


# -- going on --------------------------------------------------------------------------------------

ROWS = [
    {"step": s, "Train/Loss": 1 / (s + 1)} | ({"Val/Utility": 0.5 - s / 10} if s % 3 == 0 else {})
    for s in range(7)
]


def tracker(folder: Path, mode: str, **more: Any) -> Tracker:
    settings = TrackingSettings(mode=mode, tensorboard=False)
    arguments: dict[str, Any] = {
        "name": "again",
        "experiment": "e",
        "job_type": "train",
        "config": {},
        "seed": 0,
    }
    return Tracker(folder, settings=settings, **arguments | more)


def log_rows(log: Tracker, rows: list[dict[str, float]], stop_in: int | None = None) -> None:
    """As trainers do: validation first, then the iteration. Interrupted between the two of one
    step, if any."""
    for row in rows:
        for part in ("Val/", "Train/"):
            if values := {name: value for name, value in row.items() if name.startswith(part)}:
                log.log(values, int(row["step"]))
            if part == "Val/" and row["step"] == stop_in:
                raise KeyboardInterrupt


def stopped_and_gone_on(folder: Path, modes: tuple[str, str]) -> None:
    with pytest.raises(KeyboardInterrupt), tracker(folder, modes[0]) as log:
        log_rows(log, ROWS, stop_in=3)
    with tracker(folder, modes[1], resume_step=1) as log:  # the last checkpoint is some steps back
        log_rows(log, ROWS[2:])


def arrived(run: ReceivedRun) -> None:
    joined: dict[float, dict[str, float]] = {}
    steps = [row["step"] for row in run.history]
    assert steps == sorted(steps)
    for row in run.history:
        assert not (joined.setdefault(row["step"], {}).keys() & row.keys()) - {"step"}
        joined[row["step"]] |= row
    assert list(joined.values()) == ROWS
    assert run.summary["Val/Utility"] == {"max": 0.5, "last": ROWS[6]["Val/Utility"]}
    assert run.summary["Train/Loss"] == {"min": 1 / 7, "last": 1 / 7}
    assert run.exit_code == 0


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("modes", [("online", "online"), ("offline", "online")])
def test_a_resumed_online_run_is_one_run_in_which_every_step_is_once(
    tmp_path: Path, stub: WandbStub, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, str]
) -> None:
    monkeypatch.setenv("WANDB_RESUME", "must")  # meant for the one run of another program
    known = set(stub.runs)
    stopped_and_gone_on(tmp_path, modes)
    (run,) = [run for name, run in stub.runs.items() if name not in known]
    arrived(run)


def test_synced_sessions_of_a_resumed_run_are_one_run(
    tmp_path: Path, place: Path, stub: WandbStub
) -> None:
    stopped_and_gone_on(tmp_path, ("offline", "offline"))
    (run,) = sync(stub, tmp_path)
    arrived(run)


@pytest.mark.usefixtures("online")
def test_results_that_w_and_b_refuses_leave_the_run_whole(
    place: Path, stub: WandbStub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After training nothing that W&B does may cost the run: here the server goes away before the
    results."""
    monkeypatch.setattr(wandb_run, "PATIENCE_S", 3)
    words = [word for word in TRAIN if not word.startswith(("name=", "seeds="))]
    known = len(stub.runs)
    with monkeypatch.context() as patch:
        patch.setattr(
            stub, "refuse", lambda what: what == "UpsertBucket" and len(stub.runs) > known
        )
        assert main([*words, "seeds=[0]", "tracking=online", "name=last"]) == 0
    run = place / "runs" / "controller" / "last"
    assert not (run / ".unfinished").exists()
    assert (run / "results.json").exists()
    assert "logged offline" in capfd.readouterr().err
    (one,) = [found for found in offline_runs(run) if found.about["jobType"] == "evaluate"]
    assert one.summary["Test/controller/utility"] >= 0


def test_an_error_while_results_are_logged_is_said_in_a_line(
    offline: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = read_results(offline["controller"])
    with tracker(tmp_path, "offline", job_type="evaluate", seed=None) as log:
        log.log_results(results, images={"Utility": b"this is no picture"})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("W&B did not take the results of again (")
    (one,) = offline_runs(tmp_path)
    assert one.exit_code == 0
    assert one.summary["Test/controller/utility"] == results["rows"][0]["utility"]


def test_training_goes_on_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_run, "UPLOAD_S", 1)
    gone = WandbStub()
    with gone.connected():
        with gone:
            log = tracker(tmp_path, "online").__enter__()
            log_rows(log, ROWS[:3])
        log_rows(log, ROWS[3:])
        log.__exit__(None, None, None)
    assert curves(tmp_path, 0) == ROWS
    capfd.readouterr()


def test_of_many_decisions_whole_samples_are_kept(
    offline: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    results = read_results(offline["controller"])
    (tmp_path / "decisions.parquet").write_bytes(
        (offline["controller"] / "decisions.parquet").read_bytes()
    )
    monkeypatch.setattr(wandb_results, "CELLS", 1000)
    with tracker(tmp_path, "offline", job_type="evaluate", seed=None) as log:
        log.log_results(results)
    (one,) = offline_runs(tmp_path)
    shown = tables(one)["Test/decisions"]
    count = shown["sample_id"].n_unique()
    message = (
        f"W&B: Test/decisions has {count} of {results['test_samples']} "
        "samples; decisions.parquet has all\n"
    )
    assert capfd.readouterr().err == message
    whole = read_decisions(offline["controller"]).filter(
        pl.col("policy").is_in(shown["policy"].unique())
    )
    assert 500 < len(shown) * len(shown.columns) <= 1000
    kept = whole.filter(pl.col("sample_id").is_in(shown["sample_id"].unique()))
    assert len(kept) == len(shown)
    assert sorted(shown["sample_id"].unique()) == sorted(whole["sample_id"].unique())[:count]
