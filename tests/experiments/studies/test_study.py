"""Reference results: what is run, what is kept, what stops it; tables and sentences follow from the
numbers."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import SIMULATED
from helpers import small_beams

from knobwise.common.errors import InputError
from knobwise.experiments.command_line.compose import question_of, read_settings
from knobwise.experiments.command_line.sweep_jobs import train as train_controller
from knobwise.experiments.results.decisions import SCHEMA
from knobwise.experiments.results.selectors import selector_results
from knobwise.experiments.studies.page import Section, Study, StudyRun, results_page
from knobwise.experiments.studies.study import (
    ReferenceConfig,
    check,
    main,
    plan,
    read_study,
    train,
    train_or_note,
)
from knobwise.experiments.studies.study import training_settings as settings_of

TINY = [*SIMULATED, "policy.members=2", "policy.hidden=8"]
TINY += [
    "optimiser.warmup_iterations=2",
    "optimiser.iterations=1",
    "optimiser.contexts=16",
    "optimiser.minibatch=16",
]

OTHER_HEADS = ["heads/reference-builtin-policy-independent"]


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A study of two experiments that share a variant, on a small table, without selectors."""
    path = tmp_path / "few.yaml"
    sections = {name: {"title": name, "profiles": ["builtin"]} for name in ("lean", "heads")}
    profiles = {name: {"name": "built-in", "words": TINY} for name in ("builtin", "calibrated")}
    path.write_text(json.dumps({"profiles": profiles, "controllers": sections, "selectors": {}}))
    return str(path)


@pytest.mark.campaign
def test_a_small_study_from_the_command_line(
    few: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "page.md"
    words = ["seeds=[0,1]", f"study={few}", f"runs={runs}", f"out={out}", "jobs=1"]
    runs.mkdir()
    (runs / "heads").write_text("in the way")
    # a run that fails does not stop the others
    assert main(words) == 1
    failed = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("reference: ")
    ]
    assert [line.split(": ")[1] for line in failed] == [
        f"{runs}/{folder}" for folder in OTHER_HEADS
    ]
    assert [path.parent.name for path in runs.glob("*/*/results.json")] == ["reference-builtin"]
    assert "**Not complete: 1 runs are not finished.**" in out.read_text()

    first = runs / "lean" / "reference-builtin" / "results.json"
    before = first.stat().st_mtime_ns
    (runs / "heads").unlink()
    assert main([*words, "experiments=[heads]"]) == 0
    page = out.read_text()
    assert "Not complete" not in page
    # the shared variant is run once, and stands in both sections
    folders = sorted(str(path.parent.relative_to(runs)) for path in runs.glob("*/*/results.json"))
    assert folders == [*OTHER_HEADS, "lean/reference-builtin"]
    assert first.stat().st_mtime_ns == before
    results = json.loads(first.read_text())
    assert {row["policy"] for row in results["rows"]} == {
        "controller",
        "teacher",
        "budget_aware_static",
        "oracle",
    }
    (utility,) = (
        r["utility"]
        for r in results["rows"]
        if r["policy"] == "controller" and r["budget_ms"] is None
    )
    lines = page.splitlines()
    assert any(line.startswith(f"| built-in | `lean` | {utility:.3f}") for line in lines)
    assert any(line.startswith(f"| built-in | `policy=utility` | {utility:.3f}") for line in lines)
    assert any(line.startswith("- Built-in: against `policy=utility`: ") for line in lines)
    assert (
        "validation" not in capsys.readouterr().err
    )  # the study tells how far it is, not each training
    # what was made with other settings is not passed off as this
    assert main(["seeds=[0,2]", *words[1:]]) == 2
    assert "seeds" in capsys.readouterr().err
    assert out.read_text() == page


def test_a_wrong_word_is_named_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in (
        "experiments=[other]",
        "profiles=[other]",
        "seeds=[]",
        "jobs=0",
        "sections=1",
        "study=x.yaml",
    ):
        assert main([word, f"runs={tmp_path}", f"out={tmp_path / 'page.md'}"]) == 2
        message = capsys.readouterr().err
        assert word.split("=")[0] in message
        assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_default_variant_is_what_the_file_sets(few: str, tmp_path: Path) -> None:
    runs = list(plan(ReferenceConfig(runs=str(tmp_path)), read_study(few)))
    assert [(run.experiment, run.variant, run.default) for run in runs] == [
        ("lean", "", True),
        ("heads", "policy=utility", True),
        ("heads", "policy=independent", False),
    ]
    assert runs[1].folder == runs[0].folder
    work, planned = pickle.loads(pickle.dumps((train_or_note, runs[2])))  # for other processes
    assert (work, planned[:-1]) == (train_or_note, runs[2][:-1])
    assert {run.profile for run in runs} == {"builtin"}


def test_a_finished_run_is_checked_by_its_settings(tmp_path: Path) -> None:
    words = ["experiment=mean_budget", "policy=utility", *TINY, "seeds=[0]"]
    where = ["name=one", f"runs={tmp_path}", "tracking=disabled", "baselines=false"]
    folder = train_controller(read_settings("train", [*words, *where]), words)
    made = StudyRun("mean_budget", "builtin", "", True, folder, words, settings_of("train", words))
    check(made)  # the run has put its own reward into config.yaml
    other = made._replace(settings=settings_of("train", [*words, "optimiser.lr=0.5"]))
    with pytest.raises(InputError, match=r"optimiser\.lr="):
        check(other)


def test_a_finished_selector_that_chose_its_reward_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("reward: {mode: hard_plus_soft_v2}\ngrpo: {epochs: 4}\n")
    made = StudyRun(
        "selector", "beams", "", True, tmp_path, [], {"reward.mode": "auto", "grpo.epochs": 4}
    )
    check(made)
    with pytest.raises(InputError, match=r"made with grpo\.epochs=4, now it is 5"):
        check(made._replace(settings={"reward.mode": "auto", "grpo.epochs": 5}))


def test_a_selector_that_others_are_training_is_left_to_them(tmp_path: Path) -> None:
    folder, words = tmp_path / "selector_kl" / "reference", ["experiment=selector_kl", "seeds=[0]"]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("jobs: 2\n")
    with pytest.raises(InputError, match="was begun with jobs=2"):
        train(StudyRun("selector_kl", "beams", "", True, folder, words, {}))
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


# -- the page --------------------------------------------------------------------------------------


STUDY = read_study()
STUDY.controllers["miss"] = Section(
    "The cost of a missed budget"
)  # three variants, of which the file sets one
STUDY.selectors = read_study(
    str(Path(ReferenceConfig.study).with_name("demonstrations.yaml"))
).selectors


def decisions(utilities: dict[str, float], samples: int = 50) -> pl.DataFrame:
    """Of each policy the first so many samples are right, under every budget and with every
    seed."""
    rows = [
        {"policy": policy, "seed": seed, "dataset": None, "sample_id": str(sample), "place": budget}
        | {
            "score": float(sample < share * 50),
            "accuracy": float(sample < share * 50),
            "latency_ms": budget / 2,
        }
        for policy, share in utilities.items()
        for seed in ([0, 1] if policy == "controller" else [None])
        for sample in range(samples)
        for budget in (1.0, 2.0)
    ]
    return pl.DataFrame(rows, schema=SCHEMA)


def run(
    experiment: str, utility: float, variant: str = "", default: bool = True, **more: float
) -> StudyRun:
    """A finished run; by default static gets .4 and the oracle .9."""
    utilities = {"controller": utility, "budget_aware_static": 0.4, **more, "oracle": 0.9}
    rows = [
        {
            "policy": policy,
            "budget_ms": None,
            "utility": value,
            "utility_ci95": [value - 0.1, value + 0.1],
        }
        | {
            "gap_closed": (value - 0.4) / 0.5,
            "gap_closed_ci95": [0.0, 1.0],
            "satisfaction_feasible": 0.75,
        }
        for policy, value in utilities.items()
    ]
    results: dict[str, Any] = {"rows": rows, "test_samples": 50, "seeds": [0, 1]}
    results["profile"] = {"name": "x", "samples": 100, "configurations": 8}
    return StudyRun(
        experiment,
        "builtin",
        variant,
        default,
        Path(),
        [],
        {},
        False,
        results,
        decisions(utilities),
    )


def lines_of(*finished: StudyRun) -> list[str]:
    return results_page(STUDY, finished, [0, 1]).splitlines()


def only(lines: list[str], start: str) -> str:
    """The only line that starts with these words."""
    (line,) = (line for line in lines if line.startswith(start))
    return line


def test_variants_are_held_against_what_the_file_sets() -> None:
    lines = lines_of(
        run("miss", 0.8, "reward.miss=0", default=False),
        run("miss", 0.6, "reward.miss=0.2"),
        run("miss", 0.4, "reward.miss=0.5", default=False),
    )
    assert f"### {STUDY.controllers['miss'].title}" in lines
    assert any(
        line.startswith(f"*{question_of('miss')}* `knobwise train -m experiment=miss")
        for line in lines
    )
    assert "| 0.800 [0.700, 0.900] | – | 80% [0%, 100%] | 75.0% | +20.00 [" in only(
        lines, "| built-in | `reward.miss=0` "
    )
    assert only(lines, "| built-in | `reward.miss=0.2` ").endswith("| – |")
    sentence = only(lines, "- ")
    assert sentence.startswith(
        "- Built-in: against `reward.miss=0.2`: better: `reward.miss=0` (+20.00 ["
    )
    assert "; worse: `reward.miss=0.5` (-20.00 [" in sentence
    assert only(lines, f"| [{STUDY.controllers['miss'].title}]").endswith(
        "(against `reward.miss=0.2`) |"
    )


def test_nothing_is_claimed_that_the_interval_does_not_show() -> None:
    # of 50 samples one differs: a draw without it shows nothing
    lines = lines_of(run("lean", 0.6), run("seeds", 0.62), run("warm_up_only", 0.6))
    assert "- Built-in: against `lean`: no difference shown: `seeds` (+2.00 [0.00, 6.00])." in lines
    assert "- Built-in: against `lean`: the same on every sample: `warm_up_only`." in lines
    assert any(
        line.endswith("built-in: the same on every sample (against `lean`) |") for line in lines
    )
    assert any(
        "no difference shown, the interval is [0.00, 6.00] (against `lean`) |" in line
        for line in lines
    )
    assert not any(
        "better" in line or "worse" in line for line in lines[8 : lines.index("## Measured before")]
    )
    chance = only(lines, "The tables on controllers hold 2 differences.")
    assert "put 0.1 of their intervals entirely above or below 0; 0 are." in chance
    assert chance.endswith(
        "0 differences pass; by chance alone, at most 0.1 of the 2 questions would show any."
    )


def test_what_only_uncorrected_intervals_show_is_not_claimed() -> None:
    # 7 of 50 samples: p is 1/64, which is enough for one difference, and not for the first of four
    variants = [
        run("miss", 0.54 if k else 0.4, f"reward.miss={k}", default=not k) for k in range(2)
    ]
    assert "better: `reward.miss=1` (+14.00 [" in only(lines_of(*variants), "- ")
    others = [run("miss", 0.4, f"reward.miss={k}", default=False) for k in range(2, 5)]
    lines = lines_of(*variants, *others)
    assert "no difference shown: `reward.miss=1` (+14.00 [" in only(lines, "- ")
    assert any(
        "entirely above or below 0; 1 are." in line and "0 differences pass;" in line
        for line in lines
    )


def test_what_grpo_did_not_change_is_said() -> None:
    finished = run("lean", 0.6)
    trained = {"training": {"warmup_iterations": 150, "iterations": 300}}
    results = {**finished.results, **trained, "chosen": [{"iteration": 150}, {"iteration": 160}]}
    lines = lines_of(finished._replace(results=results))
    assert "- Built-in: `lean`: in 1 of 2 seeds the best checkpoint is from before GRPO." in lines
    assert not any("GRPO changes" in line for line in lines)


def test_what_grpo_added_to_the_deployed_policy_is_said() -> None:
    finished = run("lean", 0.6)
    gain = {
        "test": 0.0123,
        "test_ci95": [-0.004, 0.03],
        "held_out": 0.02,
        "held_out_ci95": [0.01, 0.03],
    }
    lines = lines_of(finished._replace(results={**finished.results, "grpo_gain": gain}))
    said = "by +1.23 points (95% interval -0.40 to 3.00) on test samples"
    assert [line for line in lines if "GRPO changes" in line] == [
        f"- Built-in: `lean`: GRPO changes the utility of the deployed policy {said}."
    ]


def test_the_default_controller_stands_beside_every_simple_way() -> None:
    lines = lines_of(run("controller", 0.7, ridge=0.7, knn=0.88))
    sentence = only(lines, "- ")
    assert sentence.startswith(
        "- Built-in: `controller` is better than budget-aware static (+30.00 ["
    )
    assert "; worse than nearest neighbours (-18.00 [" in sentence
    assert sentence.endswith("; the same on every sample: ridge regression.")
    of_study = lines[
        : lines.index("## Measured before")
    ]  # below are tables that were measured before
    ranks = [line.split(" | ")[0] for line in of_study if line.startswith("| ") and " [0." in line]
    order = (
        "oracle (upper bound)",
        "nearest neighbours",
        "**learned controller**",
        "ridge regression",
    )
    assert ranks == [f"| {name}" for name in (*order, "budget-aware static")]
    answer = only(lines, "| [The controller against")
    assert "better than budget-aware static (+30.00 [" in answer
    assert "and worse than nearest neighbours (-18.00 [" in answer


def test_mean_budgets_are_compared_at_equal_latency() -> None:
    finished = run("mean_budget", 0.8, static_mix=0.6)
    row = next(row for row in finished.results["rows"] if row["policy"] == "controller")
    row |= {"latency_ms_mean": 1.5, "accuracy": 0.8, "accuracy_ci95": [0.7, 0.9]}
    hull = [{"latency_ms": 0.0, "accuracy": 0.2}, {"latency_ms": 2.0, "accuracy": 1.0}]
    lines = lines_of(
        finished._replace(results={**finished.results, "sense": "mean", "static_hull": hull})
    )
    assert any(
        line.startswith("- Built-in: against static mix: better: `mean_budget` (+20.00 [")
        for line in lines
    )
    assert any(
        "| 0.800 [0.700, 0.900] | – | 80% [0%, 100%] | 1.50 ms | +20.00 [" in line for line in lines
    )


def test_fewer_common_samples_are_said() -> None:
    part = run("seeds", 0.5)._replace(decisions=decisions({"controller": 0.5}, samples=20))
    lines = lines_of(run("lean", 0.6), part)
    assert any("(20 common samples) |" in line for line in lines)


def test_a_policy_of_the_same_run_may_be_the_reference() -> None:
    lines = lines_of(run("leave_one_out", 0.7, "split.leave_out=a")._replace(profile="calibrated"))
    assert only(lines, "- Calibrated: against budget-aware static: better: `split.leave_out=a`")


def test_sentences_open_a_complete_page_and_long_tables_fold() -> None:
    shorter = Study(
        STUDY.profiles, {name: STUDY.controllers[name] for name in ("lean", "miss")}, {}
    )
    runs = [
        run("lean", 0.6),
        *(run("miss", k / 10, f"reward.miss={k}", default=k == 2) for k in range(7)),
    ]
    complete, partial = (
        results_page(shorter, runs, [0, 1]),
        results_page(shorter, runs, [0, 1], unfinished=1),
    )
    assert complete.splitlines()[2].startswith("1. ")
    assert "](results.svg)" in complete
    assert "](results.svg)" not in partial
    assert "](results.svg)" not in results_page(shorter, runs[:1], [0, 1])
    for page in (complete, partial):
        folds = r"\n\n<details markdown.*?, (\d) rows</summary>\n\n(\|.*?)\n\n</details>\n\n- "
        (folded,) = re.findall(folds, page, re.DOTALL)
        assert (folded[0], len(folded[1].splitlines())) == ("7", 9)


def test_every_experiment_of_the_page_asks_something() -> None:
    assert all("?" in question_of(name) for name in (*STUDY.controllers, *STUDY.selectors))


# -- selectors -------------------------------------------------------------------------------------


def selector(experiment: str, accuracies: dict[str, float], variants: list[str]) -> StudyRun:
    """With made-up answers: for both seeds the first of 400 queries are right, as many as the
    accuracy says."""
    rows = [
        {"policy": policy, "seed": seed, "sample_id": str(query), "place": shots}
        | {"accuracy": float(shots == 4 or query < 400 * share)}
        for policy, share in accuracies.items()
        for seed in range(2)
        for query in range(400)
        for shots in (2.0, 4.0)
    ]
    decisions = pl.DataFrame(rows, schema=SCHEMA).with_columns(score="accuracy")
    results = selector_results(decisions, small_beams(20)[0], seeds=[0, 1], trained_shots=2)
    results |= {"experiment": experiment, "variants": variants}
    return StudyRun(experiment, "beams", "", True, Path(), [], {}, False, results, decisions)


def test_what_a_learned_reward_cost_and_expects() -> None:
    run = selector(
        "selector_reward_model",
        {"sft": 0.6, "rce": 0.6, "live": 0.9, "mine": 0.8},
        ["live", "mine"],
    )
    calls = [{"policy": "live", "calls": [5000, 6000]}, {"policy": "mine", "calls": [10, 10]}]
    bins = [("rce", 0.2, 0.4), ("rce", 0.4, 0.5), ("mine", 0.8, 0.75), ("mine", 0.9, 0.85)]
    calibration = [
        {"policy": "mine", "drawn_by": by, "expected": share, "right": right}
        for by, share, right in bins
    ]
    lines = lines_of(
        run._replace(results={**run.results, "true_calls": calls, "calibration": calibration})
    )
    assert only(lines, "- True calls of").endswith(
        "a mean over seeds: 5,500 for live, 10 for mine."
    )
    assert only(lines, "- Mine, share").endswith(
        ": 0.300 for draws of RCE, where it is 0.450; 0.850 for draws of its own policy, where "
        "it is 0.800."
    )


def test_selectors_by_hand() -> None:
    simple = {"sft": 0.6, "rce": 0.6}
    lines = lines_of(
        selector("selector", {**simple, "grpo_live": 0.9, "part_similarity": 0.3}, ["grpo_live"]),
        selector("selector_rewards", {**simple, "a": 0.8, "b": 0.7, "c": 0.8}, ["a", "b", "c"]),
    )
    assert f"### {STUDY.selectors['selector'].title}" in lines
    assert any(question_of("selector_rewards") in line for line in lines)
    ranks = [
        line.split("|")[1].strip() for line in lines if line.startswith("| ") and " | 0." in line
    ]
    assert ranks[0] == "GRPO on live draws"
    assert any(line.startswith("| b | 0.700 [") for line in lines)
    assert any(
        line.startswith("- Against RCE: better: GRPO on live draws (+30.0 [") for line in lines
    )
    assert only(lines, "- Against a: worse: b (-10.0 [").endswith("; the same on every sample: c.")
    assert "- Against SFT: the same on every sample: RCE." in lines
    answer = only(lines, f"| [{STUDY.selectors['selector_rewards'].title}]")
    assert "| b -10.0 [" in answer
    assert answer.endswith("; the same on every sample for c (against a) |")
