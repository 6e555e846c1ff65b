"""What really arrives: runs through the command line, offline, read back record by record; online,
and by `wandb sync`, at a small W&B server on this machine."""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import patch

import polars as pl
import pytest
from commands import TABLE, launch, read_json, words_of, write_table
from helpers import small_beams
from omegaconf import OmegaConf
from wandb_stub import WandbStub, forget_wandb, offline_runs

from knobwise.agents.training.state import TrainingState
from knobwise.experiments.command_line.registry import question_of_experiment
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results, wandb_run
from knobwise.experiments.tracking.tracker import Tracker, git_commit

TRAIN = words_of(
    "train",
    TABLE,
    "policy=utility policy.hidden=8 seeds=[0,3] baselines=false",
    "optimiser.teacher_iterations=2 optimiser.pretrain_iterations=2",
    "optimiser.iterations=4 optimiser.contexts=16 optimiser.evaluate_every=2",
    "tracking.tags=[nightly] name=tiny",
)
SELECT = words_of(
    "train experiment=selector_replay beams.path=b.safetensors beams.train=0.6",
    "beams.validation=0.2 selector.width=16 selector.heads=2 sft.epochs=1",
    "rce.epochs=1 variants.grpo_recorded.epochs=1",
    "variants.shuffled_recorded.epochs=1 seeds=[0,3] jobs=1 name=tiny",
)


DRAWN = "Val/Advantages"


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
        write_table(90)
        small_beams(60)[0].save("b.safetensors")
        yield folder


@pytest.fixture
def online(stub):
    with stub.connected():
        yield


@pytest.fixture(scope="module")
def offline(place):
    """A run of each system, logged offline."""
    for words in (TRAIN, SELECT):
        launch(words, "tracking=offline")
    return {
        "controller": place / "runs/controller/tiny",
        "selector": place / "runs/selector_replay/tiny",
    }


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


def curves(run, seed, name="metrics"):
    """The rows of a seed in a file of the journal."""
    frame = pl.read_csv(run / f"{name}.csv", infer_schema_length=None)
    return [whole_of(row) for row in frame.filter(seed=seed).drop("seed").to_dicts()]


def tables(found):
    """Name → content."""
    by_name = {}
    for path, body in found.files.items():
        if path.endswith(".table.json"):
            table = json.loads(body)
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            by_name[path.removeprefix("media/table/").rsplit("_", 2)[0]] = rows
    return by_name


def flat(row):
    ends = {}
    for name, value in row.items():
        if name.endswith("ci95"):
            ends |= {f"{name}_low": value[0], f"{name}_high": value[1]}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | ends


def whole_of(row):
    return {name: value for name, value in row.items() if value is not None}


def same(shown, rows):
    """A table of W&B and rows of a file, number by number; a column that a row does not have is
    empty there."""
    assert list(map(whole_of, shown)) == list(map(whole_of, rows))


def of_stage(rows, stage):
    """What a stage logged, from its own first step on."""
    middle = f"/{stage}/" if stage else "/"
    parts = []
    for row in rows:
        values = {name.replace(middle, "/"): row[name] for name in row if middle in name}
        if values:
            parts.append({"step": row["step"]} | values)
    return [part | {"step": part["step"] - parts[0]["step"]} for part in parts]


def holds(found, run):
    """Every row of metrics.csv is in the run of its seed and stage, and what each says of itself;
    gives that of the results."""
    named = {each.about["displayName"]: each for each in found}
    assert len(named) == len(found)
    settings = OmegaConf.load(run / "config.yaml")
    results = read_json(run / "results.json")
    trained = {}
    for stage, seed in itertools.product(results.get("validation", [""]), (0, 3)):
        trained[" ".join(["tiny", *stage.split(), f"s{seed}"])] = stage, seed
    assert set(named) == {"tiny", *trained}
    for name, each in named.items():
        stage, seed = trained.get(name, ("", None))
        job_type = "evaluate" if seed is None else "train"
        assert each.exit_code == 0
        assert not (run / "tensorboard" / "evaluate").exists()  # a single step is no curve
        assert (each.about["groupName"], each.about["jobType"]) == (run.parent.name, job_type)
        assert (each.config.get("stage", ""), each.config.get("seed")) == (stage, seed)
        assert each.config["run"] == f"{run.parent.name}/tiny"
        assert each.config["profile_digest"] == results["profile"]["digest"]
        assert each.config["git_commit"] == git_commit()
        assert each.config["loss"] == OmegaConf.to_container(settings.loss)
    for name, (stage, seed) in trained.items():
        rows = together(of_stage(curves(run, seed), stage))
        history = named[name].history
        drawn = [(row["step"], row.pop(DRAWN)) for row in history if DRAWN in row]
        held = [row["step"] for row in rows if "Val/Advantage_Mean" in row]
        assert [step for step, _ in drawn] == held
        assert all(sum(histogram["values"]) > 0 for _, histogram in drawn)
        speeds = of_stage(curves(run, seed, "speed"), stage)
        assert len(speeds) == len([row for row in rows if "Train/Reward_Mean" in row])
        by_step = {speed["step"]: speed for speed in speeds}
        assert history == [row | by_step.get(row["step"], {}) for row in rows]
        assert len({key for row in rows for key in row}) < 40
    return named["tiny"]


def holds_test_scores(found, run):
    """The runs that trained hold the scores of their seed: what `results.json` has, seed by
    seed."""
    results = read_json(run / "results.json")
    for stage in results.get("validation", [""]):
        place = {"shots": 2} if stage else {"budget_ms": None}
        wanted = {"policy": stage or "controller"} | place
        rows = [*results["rows"], *results.get("controls", [])]
        (row,) = (row for row in rows if row.items() >= wanted.items())
        name = "accuracy" if stage else "utility"
        trained = [each for each in found if each.config.get("stage", "") == stage]
        scores = {each.config.get("seed"): each.summary for each in trained}
        by_seed = [scores[seed][f"Test/{name.title()}"] for seed in (0, 3)]
        assert by_seed == pytest.approx(row[f"{name}_per_seed"], abs=1e-12)


def holds_results(evaluated, run, pictures=True):
    """What is in results.json is in its summary and in its tables, over budgets or shots in one of
    them."""
    results = read_json(run / "results.json")
    selector = results.get("system") == "selector"
    place, middle, score = ("shots", 2, "accuracy") if selector else ("budget_ms", None, "utility")
    rows = [flat(row) for row in [*results["rows"], *results.get("controls", [])]]
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

    usage = results.get("knob_usage", [])
    by_condition = [row for row in rows if row[place] is not None]
    wanted = {
        "Test/policies": at_middle,
        f"Test/by_{place.removesuffix('_ms')}_table": by_condition,
    }
    if selector:
        wanted["Test/differences"] = [flat(row) for row in results["differences"]]
    for knob in {use["knob"] for use in usage}:
        uses = [use for use in usage if (use["policy"], use["knob"]) == ("controller", knob)]
        wanted[f"Knobs/{knob}_table"] = [use | {"value": str(use["value"])} for use in uses]
    judged = ["sft", "rce", "grpo_recorded", "controller", "teacher", "oracle"]
    judged += [] if selector else ["budget_aware_static"]
    kept = read_decisions(run).filter(pl.col("policy").is_in(judged))
    wanted["Test/decisions"] = kept.to_dicts()
    shown = tables(evaluated)
    assert shown.keys() == wanted.keys()
    for name, content in wanted.items():
        same(shown[name], content)
    assert len({key.split(".")[0] for row in evaluated.history for key in row}) <= 40
    pages = [body for path, body in evaluated.files.items() if path.startswith("media/html/report")]
    assert pages == [(run / "report.html").read_bytes()]
    assert pictures == any(path.startswith("media/images/Charts/") for path in evaluated.files)


def holds_artifacts(stub, found, run, lineage):
    """The profile leads to the run that trained, this one to the model, and the model to the
    results."""
    results = read_json(run / "results.json")
    by_name = {each.name: each for each in found}
    logged = [artifact for artifact in stub.artifacts.values() if artifact.run in by_name]
    assert all(artifact.committed for artifact in stub.artifacts.values())
    (model,) = [artifact for artifact in logged if artifact.kind == "model"]
    trained = by_name[model.run].config
    kept = results.get("best_policy", ""), results["best_seed"]
    assert (trained.get("stage", ""), trained["seed"]) == kept
    assert model.name == f"{run.parent.name}-tiny"
    assert {"best", "latest"} <= set(model.aliases)
    paths = (run / "checkpoints" / "best.pt", run / "config.yaml", run / "results.json")
    assert model.files == {path.name: path.read_bytes() for path in paths}
    used = [[stub.artifacts[identity] for identity in each.used] for each in found]
    if lineage:
        for each, artifacts in zip(found, used, strict=True):
            models = [model] if each.about["jobType"] == "evaluate" else []
            assert artifacts[1:] == models
    else:  # offline wandb cannot note what a run has used
        assert not any(used)
    data = [artifact for artifact in sum(used, logged) if artifact.kind == "dataset"]
    assert len({artifact.digest for artifact in data}) == 1
    for artifact in data:
        assert artifact.metadata == results["profile"]
        assert json.loads(artifact.files["profile.json"]) == results["profile"]


@pytest.mark.usefixtures("online")
def test_an_online_run_sends_every_row_table_and_artifact(place, stub):
    known = set(stub.runs)
    launch(TRAIN, "tracking=online runs=online")
    found = news(stub, known)
    run = place / "online" / "controller" / "tiny"
    evaluated = holds(found, run)
    holds_test_scores(found, run)
    holds_results(evaluated, run)
    holds_artifacts(stub, found, run, lineage=True)
    tags = {"nightly", "taught", "sampled", "reward-utility", "advantage-centred"}
    assert set(evaluated.about["tags"]) == tags
    assert all(each.about["notes"] == question_of_experiment("controller") for each in found)
    (view,) = stub.views.values()
    assert view["projectName"] == "knobwise"
    assert '"Knobs/top_k_table"' in view["spec"]
    assert stub.unknown == []


@pytest.mark.parametrize(
    "kind", ["controller", pytest.param("selector", marks=pytest.mark.campaign)]
)
def test_sync_brings_every_row_table_and_artifact(offline, stub, kind):
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


def tracker(folder, mode, **more):
    settings = TrackingSettings(mode=mode, tensorboard=False)
    arguments = {"name": "again", "experiment": "e", "job_type": "train", "config": {}, "seed": 0}
    arguments["state"] = TrainingState("")
    return Tracker(folder, settings=settings, **arguments | more)


def log_rows(log, rows, stop_in=None):
    """As trainers do: validation first, then the iteration. Interrupted between the two of one
    step, if any."""
    for row in rows:
        for part in ("Val/", "Train/"):
            if values := {name: value for name, value in row.items() if name.startswith(part)}:
                log.log(values, int(row["step"]))
            if part == "Val/" and row["step"] == stop_in:
                raise KeyboardInterrupt


def saved(iteration):
    """Where the training stands in a checkpoint that was written when so many iterations were
    done."""
    return TrainingState("", iteration=iteration, rows=iteration + (iteration + 2) // 3)


def stopped_and_gone_on(folder, mode):
    with pytest.raises(KeyboardInterrupt), tracker(folder, mode) as log:
        log_rows(log, ROWS, stop_in=3)
    with tracker(folder, mode, state=saved(2)) as log:  # the last checkpoint is some steps back
        log_rows(log, ROWS[2:])


def together(rows):
    """The rows of the journal with everything of one step together; each number is there once."""
    joined = {}
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    for row in rows:
        assert not (joined.setdefault(row["step"], {}).keys() & row.keys()) - {"step"}
        joined[row["step"]] |= row
    return list(joined.values())


def arrived(run):
    assert run.history == ROWS
    assert run.summary["Val/Utility"] == {"max": 0.5, "last": ROWS[6]["Val/Utility"]}
    assert run.summary["Train/Loss"] == {"min": 1 / 7, "last": 1 / 7}
    assert run.exit_code == 0


@pytest.mark.usefixtures("online")
def test_a_resumed_online_run_is_one_run_in_which_every_step_is_once(tmp_path, stub, monkeypatch):
    monkeypatch.setenv("WANDB_RESUME", "must")  # meant for the one run of another program
    known = set(stub.runs)
    stopped_and_gone_on(tmp_path, "online")
    (run,) = news(stub, known)
    arrived(run)


def test_a_resumed_offline_run_is_one_folder(tmp_path, place, stub):
    stopped_and_gone_on(tmp_path, "offline")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    (run,) = sync(stub, tmp_path)
    arrived(run)


def test_what_was_synced_before_a_run_went_on_is_a_run_of_its_own(tmp_path, place, stub):
    """`wandb sync` appends to a run that the server has; so what goes on offline is a new run, and
    whole."""
    with pytest.raises(KeyboardInterrupt), tracker(tmp_path, "offline") as log:
        log_rows(log, ROWS, stop_in=3)
    (begun,) = sync(stub, tmp_path)
    before = begun.history
    with tracker(tmp_path, "offline", state=saved(2)) as log:
        log_rows(log, ROWS[2:])
    (run,) = sync(stub, tmp_path, "--skip-synced")
    arrived(run)
    assert begun.history == before


def dies(folder, mode, variables):
    """A process that dies in the middle of a training, before W&B has written anything.

    The server of forks may have begun under another test's environment variables.
    """
    os.environ.clear()
    os.environ.update(variables)
    with tracker(folder, mode) as log:
        log_rows(log, ROWS[:6])
        os.kill(os.getpid(), signal.SIGKILL)


def killed(folder, mode):
    arguments = (folder, mode, dict(os.environ))
    process = multiprocessing.get_context("forkserver").Process(target=dies, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("online")
def test_a_killed_online_run_loses_no_row(tmp_path, stub):
    already = set(stub.runs)
    killed(tmp_path, "online")
    with tracker(tmp_path, "online", state=saved(5)) as log:
        log_rows(log, ROWS[5:])
    (run,) = news(stub, already)
    arrived(run)


def test_a_killed_offline_run_loses_no_row_and_is_one_folder(tmp_path, place):
    killed(tmp_path, "offline")
    # as if another had begun in the same second
    (begun,) = tmp_path.glob("wandb/offline-run-*")
    begun.rename(f"{begun}-1")
    with tracker(tmp_path, "offline", state=saved(5)) as log:
        log_rows(log, ROWS[5:])
    with tracker(tmp_path, "offline", state=None) as log:
        log.log_scores({"Test/Utility": 0.5}, kept=False)
    (run,) = offline_runs(tmp_path)
    arrived(run)
    assert run.summary["Test/Utility"] == 0.5


@pytest.mark.usefixtures("online")
def test_results_that_w_and_b_refuses_leave_the_run_whole(place, stub, monkeypatch, capfd):
    """After training nothing that W&B does may cost the run: here the server goes away before the
    results."""
    monkeypatch.setattr(wandb_run, "PATIENCE_S", 3)
    words = [word for word in TRAIN if not word.startswith(("name=", "seeds="))]
    known = len(stub.runs)

    def refuse(what):
        return what == "UpsertBucket" and len(stub.runs) > known

    with patch.object(stub, "refuse", refuse):
        launch(words, "seeds=[0] tracking=online name=last")
    run = place / "runs" / "controller" / "last"
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
    assert together(curves(tmp_path, 0)) == ROWS
    capfd.readouterr()


def test_an_agents_job_is_one_run_with_its_results(offline, tmp_path, monkeypatch):
    """It was interrupted while they were logged, and done again; seeds have runs of their own."""
    for name in ("decisions.parquet", "report.html"):
        shutil.copy(offline["controller"] / name, tmp_path)
    OmegaConf.save({"optimiser.lr": {"value": 0.01}}, tmp_path / "parameters.yaml")
    monkeypatch.setenv("WANDB_RUN_ID", "job1")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(tmp_path / "parameters.yaml"))
    with tracker(tmp_path, "offline") as log:
        log_rows(log, ROWS)
    results = read_results(offline["controller"])
    for end in (KeyboardInterrupt, None):
        with (
            contextlib.suppress(KeyboardInterrupt),
            tracker(tmp_path, "offline", job_type="evaluate", seed=None, state=None) as log,
        ):
            log.log_results(results, {}, None)
            if end is not None:
                raise end
    trained, job = sorted(offline_runs(tmp_path), key=lambda run: run.name == "job1")
    arrived(trained)
    assert (job.name, job.exit_code, len(job.history)) == ("job1", 0, 1)
    holds_results(job, offline["controller"], pictures=False)


def test_of_many_decisions_whole_samples_are_kept_and_curves_have_their_axes(
    offline, tmp_path, monkeypatch, capfd
):
    whole = read_decisions(offline["controller"])
    for name in ("decisions.parquet", "report.html"):
        shutil.copy(offline["controller"] / name, tmp_path)
    monkeypatch.setattr(wandb_results, "CELLS", 1000)
    with tracker(tmp_path, "offline", job_type="evaluate", seed=None, state=None) as log:
        log.log_results(read_results(offline["controller"]), {}, None)
    (logged,) = offline_runs(tmp_path)
    shown = pl.DataFrame(tables(logged)["Test/decisions"])
    assert "Test/decisions" in capfd.readouterr().err
    assert 500 < len(shown) * len(shown.columns) <= 1000
    whole = whole.filter(pl.col("policy").is_in(shown["policy"].unique()))
    samples = sorted(shown["sample"].unique())
    assert samples == sorted(whole["sample"].unique())[: len(samples)]
    assert len(whole.filter(pl.col("sample").is_in(samples))) == len(shown)
    changes = [record["config"]["update"] for record in logged.records if "config" in record]
    config = {key: value for change in changes for key, value in change.items()}
    chart = config["_wandb.visualize.Test/by_budget"]["panel_config"]
    assert chart["fieldSettings"] == {"x": "budget_ms", "y": "utility", "stroke": "policy"}
