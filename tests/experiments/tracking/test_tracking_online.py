"""What really arrives: runs through the command line, offline, read back record by record; online, and by `wandb sync`,
at a small W&B server on this machine."""

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
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results, wandb_run
from knobwise.experiments.tracking.tracker import Tracker, git_commit

TRAIN = ["train", *TABLE, "policy=utility", "name=tiny", "optimiser.warmup_iterations=2", "optimiser.iterations=4"]
TRAIN += ["optimiser.contexts=16", "optimiser.evaluate_every=2", "policy.hidden=8", "seeds=[0,3]"]
TRAIN += ["tracking.tags=[nightly]", "baselines=false"]
SELECT = ["train", "experiment=selector_replay", "beams.path=b.safetensors", "beams.train=0.6", "beams.validation=0.2"]
SELECT += ["selector.width=16", "selector.heads=2", "sft.epochs=1", "rce.epochs=1", "variants.grpo_recorded.epochs=1"]
SELECT += ["variants.shuffled_recorded.epochs=1", "seeds=[0,3]", "jobs=1", "name=tiny"]


@pytest.fixture(scope="module")
def stub() -> Iterator[WandbStub]:
    with WandbStub() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a profile and beams, as the current one; no key, none of the developer's own W&B variables."""
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
    return {"controller": place / "runs/controller/tiny", "selector": place / "runs/selector_replay/tiny"}


def sync(stub: WandbStub, run: Path) -> list[ReceivedRun]:
    """What `wandb sync` brings to the server: `wandb sync runs/latest/wandb/offline-run-*`."""
    known = set(stub.runs)
    sessions = sorted(map(str, (run / "wandb").glob("offline-run-*")))
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *sessions]
    done = subprocess.run(
        command, env=os.environ | stub.environment, cwd=run.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [found for name, found in stub.runs.items() if name not in known]


def curves(run: Path, seed: int) -> list[dict[str, float]]:
    """metrics.csv of a seed, everything of one step together."""
    frame = pl.read_csv(run / "metrics.csv", infer_schema_length=None).filter(pl.col("seed") == seed).drop("seed")
    steps = frame.group_by("step", maintain_order=True).agg(pl.all().drop_nulls().last())
    return [{name: value for name, value in row.items() if value is not None} for row in steps.to_dicts()]


def tables(found: ReceivedRun) -> dict[str, pl.DataFrame]:
    """Name → content."""
    content_of = {}
    for path, body in found.files.items():
        if path.endswith(".table.json"):
            content, name = json.loads(body), path.removeprefix("media/table/").rsplit("_", 2)[0]
            content_of[name] = pl.DataFrame(content["data"], content["columns"], orient="row", infer_schema_length=None)
    return content_of


def flat(row: dict[str, Any]) -> dict[str, Any]:
    ends = {f"{k}_{e}": v[i] for k, v in row.items() if k.endswith("_ci95") for i, e in enumerate(("low", "high"))}
    ends |= {"ci95_low": row["ci95"][0], "ci95_high": row["ci95"][1]} if "ci95" in row else {}
    return {k: v for k, v in row.items() if not isinstance(v, list)} | ends


def same(shown: pl.DataFrame, rows: list[dict[str, Any]]) -> None:
    """A table of W&B and rows of a file, number by number; a column that a row does not have is empty there."""
    assert len(shown) == len(rows)
    for one, row in zip(shown.iter_rows(named=True), rows, strict=True):
        assert {k: v for k, v in one.items() if v is not None} == {k: v for k, v in row.items() if v is not None}


def filled(settings: Any) -> Any:
    """Without empty groups, which W&B does not send."""
    if not isinstance(settings, dict):
        return settings
    return {key: filled(value) for key, value in settings.items() if value != {}}


def holds(found: list[ReceivedRun], run: Path, seeds: tuple[int, ...] = (0, 3)) -> ReceivedRun:
    """Every row of metrics.csv is in the run of its seed, and what each says of itself; gives that of the results."""
    named = {one.about["displayName"]: one for one in found}
    assert set(named) == {"tiny", *(f"tiny-seed{seed}" for seed in seeds)}
    assert len(named) == len(found)
    settings = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert isinstance(settings, dict)
    results = json.loads((run / "results.json").read_text())
    for name, one in named.items():
        assert one.exit_code == 0
        assert one.about["groupName"] == run.parent.name
        assert one.about["jobType"] == ("evaluate" if name == "tiny" else "train")
        assert {key: filled(one.config[key]) for key in settings} == filled(settings)
        assert one.config.get("seed") == (None if name == "tiny" else int(name[-1]))
        assert one.config["profile_digest"] == results["profile"]["digest"]
        assert (one.config["git_commit"], one.config["machine"]["cpus"]) == (git_commit(), os.cpu_count())
    for seed in seeds:
        rows = curves(run, seed)
        one = named[f"tiny-seed{seed}"]
        assert one.history == rows
        assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
        for metric in rows[0].keys() - {"step"}:
            values = [row[metric] for row in rows if metric in row]
            best = {"min": min(values)} if "Loss" in metric else {"max": max(values)} if "Accuracy_M" in metric else {}
            assert {k: one.summary[metric][k] for k in [*best, "last"]} == best | {"last": values[-1]}
    return named["tiny"]


def holds_results(one: ReceivedRun, run: Path) -> None:
    """What is in results.json is in its summary, in the history over budgets or shots and in the tables."""
    results = json.loads((run / "results.json").read_text())
    selector = results.get("system") == "selector"
    place, group, middle = ("shots", "Shots", 2) if selector else ("budget_ms", "Budget", None)
    rows = [flat(row) for row in [*results["rows"], *results.get("controls", [])]]
    cells = [(r["policy"], r[place], k, v) for r in rows for k, v in r.items() if k != place]
    numbers = {(policy, at, name): value for policy, at, name, value in cells if isinstance(value, int | float)}
    means = {f"Test/{policy}/{name}": value for (policy, at, name), value in numbers.items() if at == middle}
    assert {name: value for name, value in one.summary.items() if name.startswith("Test/") and "/" in name[5:]} == means
    scores = {f"Val/{stage}/Accuracy_Mean": each for stage, each in results.get("validation", {}).items()}
    for name, each in (scores if selector else {"Val/Utility": results["validation_utility"]}).items():
        assert one.summary[name] == pytest.approx(sum(each) / 2)
    assert one.summary.get("best_seed") == results.get("best_seed")
    over = [row for row in one.history if place in row]
    assert [row[place] for row in over] == results["shots" if selector else "budgets_ms"]
    for row in over:
        expected = {f"{group}/{policy}/{k}": v for (policy, at, k), v in numbers.items() if at == row[place]}
        used = [use for use in results.get("knob_usage", []) if use["budget_ms"] == row[place]]
        expected |= {f"Knobs/{u['policy']}/{u['knob']}={u['value']}": u["share"] for u in used}
        assert row == {place: row[place]} | expected

    shown, other = tables(one), "differences" if selector else "knob_usage"
    assert set(shown) == {"Test/policies", f"Test/{other}", "Test/decisions"}
    same(shown["Test/policies"], rows)
    lines = [flat(row) for row in results[other]]
    same(shown[f"Test/{other}"], [line | ({"value": str(line["value"])} if "value" in line else {}) for line in lines])
    judged = ["sft", "rce", "grpo_recorded"] if selector else ["controller", "budget_aware_static"]
    kept = read_decisions(run).filter(pl.col("policy").is_in([*judged, "oracle"]))
    same(shown["Test/decisions"], kept.to_dicts())
    assert selector or len(kept) == 4 * results["test_samples"] * 5
    pages = [body for path, body in one.files.items() if path.startswith("media/html/report")]
    assert pages == [(run / "report.html").read_bytes()]
    assert any(path.startswith("media/images/Charts/") for path in one.files)


def holds_artifacts(stub: WandbStub, found: list[ReceivedRun], run: Path, lineage: bool) -> None:
    results = json.loads((run / "results.json").read_text())
    (one,) = [r for r in found if r.about["jobType"] == "evaluate"]
    own = [artifact for artifact in stub.artifacts.values() if artifact.run in {r.name for r in found}]
    assert all(artifact.committed for artifact in own)
    for artifact in own:  # W&B names an upload by its path in the artifact's manifest
        listed = {Path(path).name for path in artifact.manifest["contents"]}
        assert {Path(path).name for path in artifact.files} == listed
    (model,) = [artifact for artifact in own if artifact.kind == "model"]
    assert (model.run, model.name) == (one.name, f"{run.parent.name}-tiny")
    assert {"best", "latest"} <= set(model.aliases)
    paths = (run / "checkpoints" / "best.pt", run / "config.yaml", run / "results.json")
    assert model.files == {path.name: path.read_bytes() for path in paths}
    used = [stub.artifacts[identity] for r in found for identity in r.used]
    assert len(used) == (len(found) if lineage else 0)  # offline wandb cannot note what a run has used
    data = used if lineage else [artifact for artifact in own if artifact.kind == "dataset"]
    assert data
    assert len({artifact.digest for artifact in data}) == 1
    for artifact in data:
        assert (artifact.kind, artifact.committed) == ("dataset", True)
        assert artifact.metadata == results["profile"]
        assert json.loads(artifact.files["profile.json"]) == results["profile"]
    tables_sent = {artifact.name for artifact in own if artifact.kind == "run_table"}
    assert len(tables_sent) == len(tables(one))


@pytest.mark.usefixtures("online")
def test_an_online_run_sends_every_row_table_and_artifact(place: Path, stub: WandbStub) -> None:
    known, words = set(stub.runs), [word for word in TRAIN if not word.startswith("name=")]
    assert main([*words, "tracking=online", "runs=online", "name=tiny"]) == 0
    found = [run for name, run in stub.runs.items() if name not in known]
    run = place / "online" / "controller" / "tiny"
    one = holds(found, run)
    holds_results(one, run)
    holds_artifacts(stub, found, run, lineage=True)
    assert set(one.about["tags"]) == {"nightly", "utility", "exact", "reward-utility"}
    best = one.summary["best_seed"]
    assert stub.runs[one.summary["best_seed_run"]].about["displayName"] == f"tiny-seed{best}"
    assert stub.unknown == []


@pytest.mark.parametrize("kind", ["controller", "selector"])
def test_sync_brings_every_row_table_and_artifact(offline: dict[str, Path], stub: WandbStub, kind: str) -> None:
    run = offline[kind]
    found = sync(stub, run)
    holds_results(holds(found, run), run)
    holds_artifacts(stub, found, run, lineage=False)
    assert stub.unknown == []


# -- going on ----------------------------------------------------------------------------------------------------------

ROWS = [
    {"step": s, "Train/Loss": 1 / (s + 1)} | ({"Val/Utility": 0.5 - s / 10} if s % 3 == 0 else {}) for s in range(7)
]


def tracker(folder: Path, mode: str, **more: Any) -> Tracker:
    settings = TrackingSettings(mode=mode, tensorboard=False)
    arguments: dict[str, Any] = {"name": "again", "experiment": "e", "job_type": "train", "config": {}, "seed": 0}
    return Tracker(folder, settings=settings, **arguments | more)


def log_rows(log: Tracker, rows: list[dict[str, float]], stop_in: int | None = None) -> None:
    """As trainers do: validation first, then the iteration. Interrupted between the two of one step, if any."""
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


def test_synced_sessions_of_a_resumed_run_are_one_run(tmp_path: Path, place: Path, stub: WandbStub) -> None:
    stopped_and_gone_on(tmp_path, ("offline", "offline"))
    (run,) = sync(stub, tmp_path)
    arrived(run)


@pytest.mark.usefixtures("online")
def test_results_that_w_and_b_refuses_leave_the_run_whole(
    place: Path, stub: WandbStub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After training nothing that W&B does may cost the run: here the server goes away before the results."""
    monkeypatch.setattr(wandb_run, "PATIENCE_S", 3)
    words = [word for word in TRAIN if not word.startswith(("name=", "seeds="))]
    known = len(stub.runs)
    with monkeypatch.context() as patch:
        patch.setattr(stub, "refuse", lambda what: what == "UpsertBucket" and len(stub.runs) > known)
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
    offline: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results = read_results(offline["controller"])
    (tmp_path / "decisions.parquet").write_bytes((offline["controller"] / "decisions.parquet").read_bytes())
    monkeypatch.setattr(wandb_results, "CELLS", 1000)
    with tracker(tmp_path, "offline", job_type="evaluate", seed=None) as log:
        log.log_results(results)
    (one,) = offline_runs(tmp_path)
    shown = tables(one)["Test/decisions"]
    count = shown["sample_id"].n_unique()
    message = f"W&B: Test/decisions has {count} of {results['test_samples']} samples, decisions.parquet all\n"
    assert capfd.readouterr().err == message
    whole = read_decisions(offline["controller"]).filter(pl.col("policy").is_in(shown["policy"].unique()))
    assert 500 < len(shown) * len(shown.columns) <= 1000
    kept = whole.filter(pl.col("sample_id").is_in(shown["sample_id"].unique()))
    assert len(kept) == len(shown)
    assert sorted(shown["sample_id"].unique()) == sorted(whole["sample_id"].unique())[:count]
