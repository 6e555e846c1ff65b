"""Of a large profile experts and the judges use a sample, which a message and the results name."""

from contextlib import chdir

import pytest
from commands import OPTIMISER, TABLE, launch, read_json, words_of, write_table

from knobwise.agents.evaluation import problems
from knobwise.agents.teacher import experts
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.report.verdict import shown_by_run

TRAIN = words_of(
    "train",
    TABLE,
    OPTIMISER,
    "policy=auto policy.experts=[ridge] policy.fold_networks=2 policy.drift=0 seeds=[0]",
    "baselines=false own_cost=false tracking.tensorboard=false",
)
RUNS = "runs/controller"
NAMES = ("large", "small")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Work in a folder with a run on a profile that counts as small, and one that counts as large;
    what the latter and its evaluation said."""
    with chdir(tmp_path_factory.mktemp("large")), pytest.MonkeyPatch.context() as patch:
        write_table(90)
        launch(TRAIN, "name=small")
        patch.setattr(experts, "MAX_SAMPLES", 40)
        patch.setattr(problems, "MAX_JUDGED", 10)
        lines = []
        patch.setattr(problems, "say", lines.append)
        patch.setattr(experts, "say", lines.append)
        launch(TRAIN, "name=large")
        launch("evaluate", [f"checkpoint={RUNS}/large"], "baselines=false json=again.json")
        yield lines


def test_what_was_sampled_is_said_and_in_the_results(said):
    assert [line.split(":")[1] for line in said] == [
        " 9 of 18 test samples",
        " 36 of 72 samples",
    ]
    large, small = (read_json(f"{RUNS}/{name}/results.json") for name in ("large", "small"))
    assert large["sampled"] == {"test": [9, 18], "experts": [36, 72]}
    assert "sampled" not in small
    (sampled,) = [each for each in shown_by_run(large) if each.name == "sampled"]
    parts = Sentence("judged_on", used=9, total=18), Sentence("fitted_on", used=36, total=72)
    assert sampled.fields["parts"] == ", ".join(map(str, parts))
    assert "sampled" not in {each.name for each in shown_by_run(small)}


def test_the_judged_samples_are_every_other_one_also_when_it_is_judged_again(said):
    judged = {name: read_decisions(f"{RUNS}/{name}")["sample"].unique() for name in NAMES}
    assert (len(judged["large"]), len(judged["small"])) == (9, 18)
    assert {*judged["large"]} < {*judged["small"]}
    rows = load_checkpoint(f"{RUNS}/large/checkpoints/best.pt").extra["test_rows"]
    assert {*map(str, rows.tolist())} == {*judged["large"]}
    assert read_json("again.json")["test_samples"] == 9
