"""The selector's experiment end to end, through the command line."""

import json
import shlex
from collections import defaultdict
from contextlib import chdir
from pathlib import Path

import commands
import polars as pl
import pytest
from commands import launch, read_json, refused, words_of
from helpers import few_demonstrations, small_beams
from omegaconf import OmegaConf
from page_parts import said
from polars.testing import assert_frame_equal
from safetensors.torch import save_file

from knobwise.__main__ import main
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.experiments.report.verdict import shown_by_run
from knobwise.experiments.settings.beams import read_data
from knobwise.experiments.settings.selector_options import BuiltinBeams

EPOCHS = "sft.epochs=2 grpo.epochs=2"
REPLAY = words_of(
    commands.REPLAY,
    EPOCHS,
    "variants.grpo_recorded.epochs=2 variants.shuffled_recorded.epochs=2",
)
FILES = words_of("train experiment=selector beams=files", commands.BEAMS, EPOCHS)
EMBEDDINGS = words_of("beams.embeddings=c.safetensors beams.query_embeddings=q.safetensors")
ALONE = "variants.grpo_recorded=null variants.shuffled_recorded=null"
MODEL = words_of(ALONE, "variants={mine:{reward_model:{width:8},epochs:2}}")
RUN = Path("runs/selector_replay")
STAGES = ("sft", "rce", "grpo_recorded", "shuffled_recorded")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the same small beams as a table (b), in legacy JSON (e) and as RL data
    (f)."""
    monkeypatch.chdir(tmp_path)
    table, _ = small_beams(60)
    table.save("b.safetensors")
    write_rl_data(table, "f.json")
    legacy = {}
    for row, query in enumerate(table.query_ids):
        ids = table.pool[row][table.sequences[row]].tolist()
        legacy[query] = {"id_list": ids, "score_list": table.fields["beam_score"][row].tolist()}
    Path("e.json").write_text(json.dumps(legacy))
    save_file({"embeddings": table.candidates}, "c.safetensors")
    save_file({"embeddings": table.queries}, "q.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of `REPLAY` that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with chdir(folder):
        small_beams(60)[0].save("b.safetensors")
        launch(REPLAY, "name=x")
    return folder / RUN / "x"


def results_of(run="runs/latest"):
    return read_json(Path(run, "results.json"))


def numbers(results):
    """What is the same for the same settings: all but times, the words of the command line, and
    checksums of both."""
    for row in (*results["rows"], *results["controls"]):
        row["decision_us_p50"] = None
    return {**results, "command": "", "run": {}, "sha256": []}


def named(rows):
    return {(row["policy"], row["shots"]): row for row in rows}


def compared(results):
    return {(row["policy"], row["against"]) for row in results["differences"]}


def policies(rows):
    return [row["policy"] for row in rows]


# -- what a run leaves -----------------------------------------------------------------------------


def test_recorded_beams_leave_what_the_contract_says(folder, whole, capsys):
    words = words_of(REPLAY, EMBEDDINGS, "beams.path=f.json tracking=offline name=first")
    launch(words)
    run = Path("runs/latest")
    assert run.resolve() == (RUN / "first").resolve()
    for name in ("report.html", "checkpoints/last.pt", "checkpoints/best.pt"):
        assert (run / name).stat().st_size > 0
    assert not (run / ".unfinished").exists()
    assert [*run.glob("tensorboard/**/events.*")]
    # a session for each of the four stages, with its test scores, and one for the results
    assert len([*run.glob("wandb/**/*.wandb")]) == 4 + 1
    metrics = pl.read_csv(run / "metrics.csv")
    assert metrics["step"].is_sorted()
    # 36 training queries, 8 in a step
    for stage, steps in zip(STAGES, (11, 6, 11, 11), strict=True):
        kept = {path.stem for path in (run / "checkpoints" / "seed0" / stage).iterdir()}
        epochs = ("epoch0", "epoch1", "epoch2")[: 2 if stage == "rce" else 3]
        assert kept == {"best", "last", "previous", *epochs}
        logged = metrics.drop_nulls(f"Val/{stage}/Accuracy_Mean")["step"]
        assert logged.max() - logged.min() == steps - 1
        assert metrics[f"Train/{stage}/Loss"].is_not_null().any()

    results = results_of()
    assert OmegaConf.load(run / "config.yaml").reward.mode == "hard_plus_soft_v2"
    facts = {
        "reward_mode": "hard_plus_soft_v2",
        "split": "test",
        "seeds": [0],
        "judged_by": "recorded",
        "shots": [2],
        "trained_shots": 2,
        "test_queries": 12,
    }
    assert facts.items() <= results.items()
    # RL data and a saved table are the same beams
    assert numbers(results) == numbers(results_of(whole))
    rows = named(results["rows"])
    wanted = {"random", "image_similarity", "similarity", "sft", "rce", "grpo_recorded", "oracle"}
    assert wanted <= {policy for policy, _ in rows}
    assert "reward.mode" not in capsys.readouterr().err
    beams = "beams=files beams.path=f.json beams.train=0.6 beams.validation=0.2"
    launch("evaluate json=again.json", beams, EMBEDDINGS)
    again = named(read_json("again.json")["rows"])
    assert ("grpo_recorded", 2) in again
    assert all(row["accuracy"] == rows[key]["accuracy"] for key, row in again.items())
    # the beams are those of the run, with the options that are given
    launch("evaluate json=own.json")
    assert named(read_json("own.json")["rows"]) == again
    # what `knobwise profile` leaves
    Path("recorded").mkdir()
    Path("b.safetensors").rename("recorded/beams.safetensors")
    launch("evaluate beams.path=recorded json=moved.json")
    assert named(read_json("moved.json")["rows"]).keys() == again.keys()


SMALL = words_of("selector.width=16 selector.heads=2 tracking=disabled seeds=[0] name=x")


def short(queries):
    """Return words for a single epoch of each stage."""
    epochs = words_of("sft.epochs=1 rce.epochs=1 grpo.epochs=1")
    return [*epochs, *(f"{stage}.queries={queries}" for stage in ("sft", "rce", "grpo"))]


def test_the_builtin_beams_are_judged_by_their_scorer_at_every_number_of_shots(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    few_demonstrations(monkeypatch)
    left_out = (
        "variants={grpo_rounds:null,shuffled_live:null,hidden_live:null,grpo_live:{epochs:1}}"
    )
    launch("train experiment=selector", SMALL, short(1024), left_out)
    results = results_of()
    learned = {"sft", "rce", "grpo_recorded", "grpo_live"}
    wanted = learned | {"random", "image_similarity", "similarity", "part_similarity"}
    for shots in (1, 2, 3, 4):
        judged = {row["policy"] for row in results["rows"] if row["shots"] == shots}
        assert wanted | {"vote", "oracle"} <= judged
    assert {*policies(results["controls"])} == {"shuffled_recorded"}
    assert (results["shots"], results["judged_by"]) == ([1, 2, 3, 4], "scorer")
    assert results["test_queries"] == 200
    trained = learned | {"shuffled_recorded"}
    rows = named([*results["rows"], *results["controls"]])
    for (policy, _), row in rows.items():
        low, high = row["accuracy_ci95"]
        assert 0 <= low - 1e-9 <= row["accuracy"] <= high + 1e-9
        assert (row["decision_us_p50"] is not None) == (policy in trained)
    wanted = {("grpo_live", "rce"), ("grpo_recorded", "rce"), ("shuffled_recorded", "sft")}
    assert wanted | {("rce", "sft")} <= compared(results)
    assert {path.name for path in Path("runs/latest/checkpoints/seed0").iterdir()} == trained


def test_a_learned_reward_through_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few_demonstrations(monkeypatch)
    words = """
        train experiment=selector_reward_model judged_shots=[2] jobs=1
        reward_model.width=8 reward_model.epochs=1
        variants.learned_1k=null variants.learned_10k.reward_model.calls=90
        variants.shuffled_learned.reward_model.calls=90 variants.shuffled_learned.epochs=1
    """
    launch(words, SMALL, short(256))
    results = results_of()
    spent = {row["policy"]: (*row["calls"], row["recorded"]) for row in results["true_calls"]}
    live, recorded = spent.pop("live"), spent["learned_0"][1]
    assert 0 < live[0] <= 3 * 256 * 8
    assert live[1] == 0
    data = read_data(BuiltinBeams())
    assert recorded == int((data.table.found_by[data.split.train] > METHODS.index("beam")).sum())
    counts = {"learned_0": 0, "learned_10k": 90, "shuffled_learned": 90}
    assert spent == {name: (calls, recorded) for name, calls in counts.items()}
    assert policies(results["controls"]) == ["shuffled_learned"]
    assert results["best_policy"] in ("live", "learned_0", "learned_10k")
    bins = defaultdict(list)
    for row in results["calibration"]:
        bins[row["policy"], row["drawn_by"]].append(row)
    assert set(bins) == {(name, by) for name in counts for by in ("rce", name)}
    for rows in bins.values():
        assert 1 < len(rows) <= 10
        expected = [row["expected"] for row in rows]
        assert expected == sorted(expected)
        assert all(0 <= row["right"] <= 1 for row in rows)
    page = Path("runs/latest/report.html").read_text()
    assert "model calls" in page
    assert "Calibration of the learned reward" in page


def test_replay_trains_on_a_learned_reward_without_true_calls(folder):
    launch(REPLAY, MODEL)
    results = results_of()
    assert results["true_calls"] == [{"policy": "mine", "calls": [0], "recorded": 36 * 4}]
    assert "calibration" not in results


def test_legacy_beams_train_on_their_scores_and_are_judged_by_them(folder):
    """Format E knows neither right answers nor sequences that were found without looking at the
    answer. A folder with such a file picks the reward by itself and says so."""
    groups = "variants.grpo_recorded.groups=all variants.shuffled_recorded.groups=all"
    Path("recorded").mkdir()
    Path("e.json").rename("recorded/e.json")
    words = words_of(REPLAY, EMBEDDINGS, "beams.path=recorded", groups)
    launch(words)
    results = results_of()
    assert (results["judged_by"], results["reward_mode"]) == ("best_beam", "legacy")
    told = said(shown_by_run(results))
    assert {"ranks_first", "judged_by_best_beam"} <= {*told}
    assert "answers" not in told
    launch(words, "reward.mode=legacy")
    assert numbers(results_of()) == numbers(results)
    assert named(results["rows"])["best_recorded", 2]["accuracy"] == 1
    for gap in results["differences"]:
        gap |= {"difference": 0.0, "ci95": [0.0, 0.0]}
    results["epochs"] = {}
    assert "hardly_moved" in said(shown_by_run(results))


def test_the_command_in_the_results_gives_the_same_numbers(folder):
    launch(REPLAY, "reward.mode=legacy", ["runs=some runs"])
    first = results_of("some runs/latest")
    knobwise, *words = shlex.split(first["command"])
    assert knobwise == "knobwise"
    launch(words)
    assert len(list(Path("some runs/selector_replay").iterdir())) == 2
    assert numbers(results_of("some runs/latest")) == numbers(first)


# -- mistakes --------------------------------------------------------------------------------------

GROUPS = {
    "FILES": FILES,
    "REPLAY": REPLAY,
    "JSON": [*REPLAY, *EMBEDDINGS],
    "LEARNED": [*REPLAY, *MODEL],
    "TRAIN": ["train"],
}
MISTAKES = {
    "FILES": "experiment=selector_replay",
    "FILES variants.grpo_rounds=null": "variants.grpo_live=null",
    "FILES variants.grpo_rounds.rounds=many": "variants.grpo_rounds",
    "REPLAY variants.sft={}": "variants.sft",
    "REPLAY variants={mine:{hiden:[liar]}}": "variants.mine",
    "REPLAY variants={mine:{hidden:[annotator]}}": "image, liar",
    "REPLAY variants={mine:{hidden:[liar]},yours:{hidden:[image]}}": "same blocks",
    "REPLAY variants={mine:{reward:{mode:best}}}": "variants.mine.reward",
    "REPLAY variants={mine:{loss:{advantage:best}}}": "variants.mine.loss",
    "LEARNED variants.mine.reward_model.calls=-1": "variants.mine.reward_model",
    "LEARNED variants.mine.live=true": "live=true",
    "REPLAY variants.grpo_recorded=3": "variants.grpo_recorded",
    "REPLAY variants.grpo_recorded.epochs=-1": "variants.grpo_recorded",
    "REPLAY variants.grpo_recorded.groups=own": "groups.methods=own",
    "REPLAY variants.grpo_recorded.groups=some": "without_beams",
    "REPLAY seeds=[1,1]": "seeds=[1, 1]",
    "REPLAY judged_shots=[2,2]": "judged_shots=[2, 2]",
    "REPLAY judged_shots=[3,4]": "[2] shots",
    "REPLAY shots=3": "[2] demonstrations",
    "REPLAY jobs=0": "jobs",
    "REPLAY grpo.keep=kl": "keep='kl'",
    "REPLAY loss.kl_band=[0.2,0.1]": "loss.kl_band=[0.2, 0.1]",
    "REPLAY loss.clip_epsilon=[0.2]": "loss.clip_epsilon=[0.2]",
    "REPLAY beams.train=0.9": "beams",
    "REPLAY beams.path=f.json": "beams.embeddings",
    "JSON beams.path=e.json": "groups=all",
    "JSON beams.path=e.json reward.mode=hard_plus_soft_v2": "vqa_correct",
    "TRAIN experiment=selector_replay": "beams.path",
}
"""Commands, and what the message about each names."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(words, folder, capsys):
    first, *others = words.split()
    assert MISTAKES[words] in refused([*GROUPS[first], *others], capsys)


def test_beams_without_any_found_by_looking_at_the_answer(folder, capsys):
    table = BeamTable.load("b.safetensors")
    table.found_by[:] = METHODS.index("random")
    table.save("random.safetensors")
    assert "found by random" in refused([*REPLAY, "beams.path=random.safetensors"], capsys)


def test_where_all_variants_are_blind_what_sees_is_trained_to_compare_with(folder):
    launch(REPLAY, ALONE, "variants={blind:{epochs:1,groups:all,hidden:[liar]}}")
    results = results_of()
    assert results["best_policy"] == "rce"  # the one that sees
    seed = Path("runs/latest/checkpoints/seed0")
    assert (seed / "../best.pt").read_bytes() == (seed / "rce/best.pt").read_bytes()
    assert ("hidden_rce", "hidden_sft") in compared(results)
    # what is hidden is hidden from all that start there
    sees = {"sft": True, "rce": True, "hidden_sft": False, "hidden_rce": False, "blind": False}
    assert {path.name for path in seed.iterdir()} == sees.keys()
    for name, liar in sees.items():
        seen = load_checkpoint(seed / name / "best.pt").selector.scale.isfinite().tolist()
        assert seen == [True, True, True, liar]


# -- stopping and going on -------------------------------------------------------------------------


def metrics_of(run):
    """Rows of `metrics.csv`, seed by seed, each in the order of writing; columns by name."""
    frame = pl.read_csv(Path(run) / "metrics.csv", infer_schema_length=None)
    return frame.select(sorted(frame.columns)).sort("seed", maintain_order=True)


def test_a_run_interrupted_in_every_stage_and_in_its_report_ends_like_one_that_was_not(
    folder, whole, capsys
):
    words = [*REPLAY, "name=x"]
    stops = [commands.ctrl_c_at(*place) for place in (("sft", 3), ("rce", 2), ("grpo", 7))]
    for stop in (*stops, commands.ctrl_c_in_report()):
        with stop:
            assert main(words) == 130
        assert "repeat the command to resume" in capsys.readouterr().err
    launch(words)
    assert [path.name for path in RUN.iterdir()] == ["x"]
    assert Path("runs/latest/report.html").exists()
    assert numbers(results_of()) == numbers(results_of(whole))
    assert_frame_equal(metrics_of("runs/latest"), metrics_of(whole))


@pytest.mark.campaign
@commands.in_proc
def test_a_killed_run_of_two_processes_ends_like_one_of_one(folder):
    variants = "variants.shuffled_recorded=null variants.grpo_recorded.epochs=6"
    words = words_of(REPLAY, variants, "seeds=[0,1] name=x")
    killed = commands.Command(words)
    seeds = [RUN / "x" / "checkpoints" / seed for seed in ("seed0", "seed1")]
    children = []

    def begun():
        children[:] = commands.children_of(killed.pid)
        return all((seed / "rce" / "last.pt").exists() for seed in seeds)

    commands.stop_when(begun, killed)
    assert len(children) >= 2
    # or they would go on writing beside the run that goes on
    commands.wait_for(lambda: not any(map(commands.alive, children)))
    assert not all((seed / "grpo_recorded" / "epoch6.pt").exists() for seed in seeds)
    launch(words)
    launch(words, "runs=whole jobs=1")
    assert [path.name for path in RUN.iterdir()] == ["x"]
    assert numbers(results_of()) == numbers(results_of("whole/latest"))
    assert_frame_equal(metrics_of("runs/latest"), metrics_of("whole/latest"))
