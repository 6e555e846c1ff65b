"""What really arrives: runs through the command line, offline, read back record by record; online,
and by `wandb sync`, at a small W&B server on this machine."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys

import polars as pl
import pytest
from commands import TABLE, launch, read_json, words_of, write_table
from helpers import small_beams
from omegaconf import OmegaConf
from wandb_stub import WandbStub, forget_wandb, offline_runs

from knobwise.experiments.command_line.compose import question_of
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results, wandb_run
from knobwise.experiments.tracking.tracker import Tracker, git_commit

TRAIN = words_of(
    "train",
    TABLE,
    "policy=utility policy.hidden=8 seeds=[0,3] baselines=false",
    "optimiser.teacher_iterations=2 optimiser.warmup_iterations=2",
    "optimiser.iterations=4 optimiser.contexts=16 optimiser.evaluate_every=2",
    "tracking.tags=[nightly] name=tiny",
)
SELECT = words_of(
    "train experiment=selector_replay beams.path=b.safetensors beams.train=0.6",
    "beams.validation=0.2 selector.width=16 selector.heads=2 sft.epochs=1",
    "rce.epochs=1 variants.grpo_recorded.epochs=1",
    "variants.shuffled_recorded.epochs=1 seeds=[0,3] jobs=1 name=tiny",
)


@pytest.fixture(scope="module")
def stub():
    with WandbStub() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory):
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
def online(stub):
    with stub.connected():
        yield


@pytest.fixture(scope="module")
def offline(place):
    """Runs of each system, logged offline."""
    for words in (TRAIN, SELECT):
        launch(words, "tracking=offline")
    return place / "runs"


def sync(stub, run, *flags):
    """What `wandb sync` brings to the server: `wandb sync runs/latest/wandb/offline-run-*`."""
    known = set(stub.runs)
    sessions = sorted(map(str, (run / "wandb").glob("offline-run-*")))
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *flags, *sessions]
    environment = os.environ | stub.environment
    subprocess.run(command, env=environment, cwd=run.parent, capture_output=True, check=True)
    return news(stub, known)


def news(stub, known):
    """The runs of the server that were not known before."""
    return [run for name, run in stub.runs.items() if name not in known]


def curves(run, seed, stage=""):
    """metrics.csv of a seed, or of one of its stages, everything of one step together, from its own
    first step on."""
    middle = f"/{stage}/" if stage else "/"
    frame = pl.read_csv(run / "metrics.csv", infer_schema_length=None).filter(seed=seed)
    names = {name: name.replace(middle, "/") for name in frame.columns if middle in name}
    steps = frame.select("step", *names).rename(names).group_by("step", maintain_order=True)
    rows = map(whole_of, steps.agg(pl.all().drop_nulls().last()).to_dicts())
    rows = [row for row in rows if len(row) > 1]
    return [row | {"step": row["step"] - rows[0]["step"]} for row in rows]


def tables(run):
    """Name → the rows of every table, without their empty cells."""
    by_name = {}
    for path, body in run.files.items():
        if path.endswith(".table.json"):
            table = json.loads(body)
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            name = path.removeprefix("media/table/").rsplit("_", 2)[0]
            by_name[name] = list(map(whole_of, rows))
    return by_name


def flat(row):
    """A row of results.json as W&B gets it: each end of an interval by itself, no other lists."""
    values = {name: value for name, value in row.items() if not isinstance(value, list)}
    for name in row:
        if name.endswith("ci95"):
            values[f"{name}_low"], values[f"{name}_high"] = row[name]
    return values


def whole_of(row):
    return {name: value for name, value in row.items() if value is not None}


def holds(found, run):
    """Check that every row of metrics.csv is in the run of its seed and stage, that this run has
    the scores of its seed, and what each says of itself; give the run of the results."""
    named = {each.about["displayName"]: each for each in found}
    results = read_json(run / "results.json")
    config = {
        "run": f"{run.parent.name}/tiny",
        "profile_digest": results["profile"]["digest"],
        "git_commit": git_commit(),
        "loss": OmegaConf.to_container(OmegaConf.load(run / "config.yaml").loss),
    }
    for each in found:
        assert each.exit_code == 0
        assert each.about["groupName"] == run.parent.name
        assert each.config.items() >= config.items()
    assert not (run / "tensorboard/evaluate").exists()  # a single step is no curve
    evaluated = named.pop("tiny")
    assert evaluated.about["jobType"] == "evaluate"
    assert not evaluated.config.get("stage")
    assert evaluated.config.get("seed") is None
    stages = results.get("validation", [""])
    assert len(named) == len(found) - 1 == 2 * len(stages)
    for stage, (number, seed) in itertools.product(stages, enumerate((0, 3))):
        each = named[" ".join(["tiny", *stage.split(), f"s{seed}"])]
        assert each.about["jobType"] == "train"
        assert each.config.get("stage", "") == stage
        assert each.config["seed"] == seed
        assert each.history == curves(run, seed, stage)
        assert len(set().union(*each.history)) < 40
        steps = [row["step"] for row in each.history]
        assert steps == sorted(set(steps))
        score, place = ("accuracy", {"shots": 2}) if stage else ("utility", {"budget_ms": None})
        wanted = {"policy": stage or "controller"} | place
        (row,) = (row for row in rows_of(results) if row.items() >= wanted.items())
        of_seed = row[f"{score}_per_seed"][number]
        assert each.summary[f"Test/{score.title()}"] == pytest.approx(of_seed, abs=1e-6)
    return evaluated


def rows_of(results):
    return [*results["rows"], *results.get("controls", [])]


def holds_results(evaluated, run):
    """Check that what is in results.json is in its summary and in its tables, over budgets or shots
    in one of them."""
    results = read_json(run / "results.json")
    selector = results.get("system") == "selector"
    place, middle, score = ("shots", 2, "accuracy") if selector else ("budget_ms", None, "utility")
    rows = list(map(flat, rows_of(results)))
    at_middle = [row for row in rows if row[place] == middle]
    summary = evaluated.summary
    main = results.get("best_policy", "controller")
    for row in at_middle:
        keys = [score]
        if row["policy"] == main:
            keys += [f"{score}_ci95_low", f"{score}_ci95_high", "decision_us_p50"]
        for key in keys:
            assert summary.get(f"Test/{row['policy']}/{key}") == row[key]
    validated = {f"Val/{k}/Accuracy_Mean": v for k, v in results.get("validation", {}).items()}
    for name, by_seed in (validated or {"Val/Utility": results["validation_utility"]}).items():
        assert summary[name] == pytest.approx(sum(by_seed) / 2)
    gained = {name[5:]: value for name, value in summary.items() if name.startswith("GRPO/")}
    assert gained == flat(results.get("grpo_gain", {}))

    by_place = [row for row in rows if row[place] is not None]
    judged = ["sft", "rce", "grpo_recorded", "controller", "teacher", "oracle"]
    judged += [] if selector else ["budget_aware_static"]
    decisions = read_decisions(run).filter(pl.col("policy").is_in(judged)).to_dicts()
    wanted = {"Test/policies": at_middle, "Test/decisions": decisions}
    wanted[f"Test/by_{place.removesuffix('_ms')}_table"] = by_place
    if selector:
        wanted["Test/differences"] = list(map(flat, results["differences"]))
    for use in results.get("knob_usage", []):
        if use["policy"] == "controller":
            shares = wanted.setdefault(f"Knobs/{use['knob']}_table", [])
            shares.append(use | {"value": str(use["value"])})
    shown = tables(evaluated)
    assert shown == {name: list(map(whole_of, content)) for name, content in wanted.items()}
    assert len({key.split(".")[0] for key in set().union(*evaluated.history)}) <= 40
    files = evaluated.files
    pages = [body for path, body in files.items() if path.startswith("media/html/report")]
    assert pages == [(run / "report.html").read_bytes()]
    assert any(path.startswith("media/images/Charts/") for path in files)


def holds_artifacts(stub, found, run, lineage):
    """Check that the profile leads to the run that trained, this one to the model, and the model to
    the results."""
    results = read_json(run / "results.json")
    by_name = {each.name: each for each in found}
    assert all(artifact.committed for artifact in stub.artifacts.values())
    logged = [artifact for artifact in stub.artifacts.values() if artifact.run in by_name]
    (model,) = [artifact for artifact in logged if artifact.kind == "model"]
    trained = by_name[model.run].config
    kept = results.get("best_policy", ""), results["best_seed"]
    assert (trained.get("stage", ""), trained["seed"]) == kept
    assert model.name == f"{run.parent.name}-tiny"
    assert {"best", "latest"} <= set(model.aliases)
    paths = (run / "checkpoints/best.pt", run / "config.yaml", run / "results.json")
    assert model.files == {path.name: path.read_bytes() for path in paths}
    data = [artifact for artifact in logged if artifact.kind == "dataset"]
    for each in found:
        used = [stub.artifacts[identity] for identity in each.used]
        data += used[:1]
        # offline wandb cannot note what a run has used
        assert bool(used) == lineage
        judged = lineage and each.about["jobType"] == "evaluate"
        assert used[1:] == ([model] if judged else [])
    for artifact in data:
        assert artifact.digest == data[0].digest
        assert artifact.metadata == results["profile"]
        assert json.loads(artifact.files["profile.json"]) == results["profile"]


@pytest.mark.usefixtures("online")
def test_an_online_run_sends_every_row_table_and_artifact(place, stub):
    known = set(stub.runs)
    launch(TRAIN, "tracking=online runs=online")
    found = news(stub, known)
    run = place / "online/controller/tiny"
    evaluated = holds(found, run)
    holds_results(evaluated, run)
    holds_artifacts(stub, found, run, lineage=True)
    tags = words_of("nightly taught sampled reward-utility advantage-centred")
    assert sorted(evaluated.about["tags"]) == sorted(tags)
    assert {each.about["notes"] for each in found} == {question_of("controller")}
    assert stub.unknown == []


@pytest.mark.parametrize("kind", ["controller", "selector_replay"])
def test_sync_brings_every_row_table_and_artifact(offline, stub, kind):
    run = offline / kind / "tiny"
    found = sync(stub, run)
    holds_results(holds(found, run), run)
    holds_artifacts(stub, found, run, lineage=False)
    assert stub.unknown == []


# -- going on --------------------------------------------------------------------------------------

ROWS = [
    (s, {"Train/Loss": 1 / (s + 1)} | ({"Val/Utility": 0.5 - s / 10} if s % 3 == 0 else {}))
    for s in range(7)
]
"""Steps, and what is logged at each."""


def tracker(folder, mode, **more):
    settings = TrackingSettings(mode=mode, tensorboard=False)
    arguments = {"name": "again", "experiment": "e", "job_type": "train", "config": {}, "seed": 0}
    return Tracker(folder, settings=settings, **arguments | more)


def log_rows(log, rows, stop_in=None):
    """As trainers do: validation first, then the iteration. Interrupted between the two of one
    step, if any."""
    for step, row in rows:
        for part in ("Val/", "Train/"):
            if values := {name: value for name, value in row.items() if name.startswith(part)}:
                log.log(values, step)
            if part == "Val/" and step == stop_in:
                raise KeyboardInterrupt


def stop(folder, mode):
    with pytest.raises(KeyboardInterrupt), tracker(folder, mode) as log:
        log_rows(log, ROWS, stop_in=3)


def go_on(folder, mode, saved=2):
    """Go on from the last checkpoint, which is some steps back."""
    with tracker(folder, mode, known=ROWS[:saved]) as log:
        log_rows(log, ROWS[saved:])


def arrived(run):
    steps = {}
    for row in run.history:
        number = row.pop("step")
        step = steps.setdefault(number, {})
        assert number == max(steps)
        assert step.keys().isdisjoint(row)
        step |= row
    assert list(steps.items()) == ROWS
    assert run.summary["Val/Utility"] == ROWS[6][1]["Val/Utility"]
    assert run.summary["Train/Loss"] == 1 / 7
    assert run.exit_code == 0


@pytest.mark.usefixtures("online")
def test_a_resumed_online_run_is_one_run_in_which_every_step_is_once(tmp_path, stub, monkeypatch):
    monkeypatch.setenv("WANDB_RESUME", "must")  # meant for the one run of another program
    known = set(stub.runs)
    stop(tmp_path, "online")
    go_on(tmp_path, "online")
    (run,) = news(stub, known)
    arrived(run)


def test_a_resumed_offline_run_is_one_folder(tmp_path, place, stub):
    stop(tmp_path, "offline")
    go_on(tmp_path, "offline")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    (run,) = sync(stub, tmp_path)
    arrived(run)


def test_what_was_synced_before_a_resumed_run_is_not_sent_again(tmp_path, place, stub):
    stop(tmp_path, "offline")
    (run,) = sync(stub, tmp_path)
    go_on(tmp_path, "offline")
    assert not sync(stub, tmp_path, "--skip-synced")
    arrived(run)


def killed(folder):
    """A process that dies in the middle of a training, before W&B has written anything."""
    with tracker(folder, "offline") as log:
        log_rows(log, ROWS[:6])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_offline_run_loses_no_row_and_is_one_folder(tmp_path, place):
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # as if another had begun in the same second
    (begun,) = tmp_path.glob("wandb/offline-run-*")
    begun.rename(f"{begun}-1")
    go_on(tmp_path, "offline", saved=5)
    with tracker(tmp_path, "offline", finished=True) as log:
        log.log_scores({"Test/Utility": 0.5}, kept=False)
    (run,) = offline_runs(tmp_path)
    arrived(run)
    assert run.summary["Test/Utility"] == 0.5


@pytest.mark.usefixtures("online")
def test_results_that_w_and_b_refuses_leave_the_run_whole(place, stub, monkeypatch, capfd):
    """After training nothing that W&B does may cost the run: here the server goes away before the
    results."""
    monkeypatch.setattr(wandb_run, "PATIENCE_S", 3)
    known = len(stub.runs)
    refuses = lambda what: what == "UpsertBucket" and len(stub.runs) > known  # noqa: E731
    monkeypatch.setattr(stub, "refuse", refuses)
    launch(TRAIN, "seeds=[0] tracking=online name=last")
    run = place / "runs/controller/last"
    assert not (run / ".unfinished").exists()
    assert (run / "results.json").exists()
    assert "logged offline" in capfd.readouterr().err
    (one,) = [found for found in offline_runs(run) if found.about["jobType"] == "evaluate"]
    assert one.summary["Test/controller/utility"] >= 0


def test_training_goes_on_without_a_server(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(wandb_run, "UPLOAD_S", 1)
    gone = WandbStub()
    with gone.connected():
        with gone:
            log = tracker(tmp_path, "online").__enter__()
            log_rows(log, ROWS[:3])
        log_rows(log, ROWS[3:])
        log.__exit__(None, None, None)
    assert curves(tmp_path, 0) == [{"step": step} | row for step, row in ROWS]
    capfd.readouterr()


def test_of_many_decisions_whole_samples_are_kept_and_curves_have_their_axes(
    offline, tmp_path, monkeypatch, capfd
):
    run = offline / "controller/tiny"
    for name in ("decisions.parquet", "report.html"):
        shutil.copy(run / name, tmp_path)
    monkeypatch.setattr(wandb_results, "CELLS", 1000)
    with tracker(tmp_path, "offline", job_type="evaluate", seed=None) as log:
        log.log_results(read_results(run), {}, None)
    (logged,) = offline_runs(tmp_path)
    shown = pl.DataFrame(tables(logged)["Test/decisions"])
    assert "Test/decisions" in capfd.readouterr().err
    assert 500 < len(shown) * len(shown.columns) <= 1000
    whole = read_decisions(run).filter(pl.col("policy").is_in(shown["policy"].unique()))
    samples = sorted(shown["sample_id"].unique())
    assert samples == sorted(whole["sample_id"].unique())[: len(samples)]
    assert len(whole.filter(pl.col("sample_id").is_in(samples))) == len(shown)
    config = {}
    for record in logged.records:
        config |= record.get("config", {}).get("update", {})
    chart = config["_wandb.visualize.Test/by_budget"]["panel_config"]
    assert chart["fieldSettings"] == {"x": "budget_ms", "y": "utility", "stroke": "policy"}
