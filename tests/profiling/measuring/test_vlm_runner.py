"""Profiles of a model whose knobs are set: measured once, whatever happens, and read back as they
were written."""

import itertools
import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error
from PIL import Image

from knobwise.envs.readers.exp_files import read_exp5_exp6
from knobwise.envs.readers.feature_files import read_features
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
)
from knobwise.profiling.measuring.measuring import LOG, appended, missing, read_measurements
from knobwise.profiling.measuring.outputs import knob_lines, knob_report
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import metric_of, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig


class Blurred(KeepsConfiguration):
    """A model with two knobs that sees the image at `max_crops` pixels a side and says its
    colour."""

    name = "blurred"
    knobs = (
        KnobSupport("max_crops", 8, 1, 8, "pixels of a side"),
        KnobSupport("top_k", 0, note="it has no experts"),
        KnobSupport("num_active_blocks", 3, 1, 3, "rounds", "every round costs a fixed time"),
    )
    configuration = {}

    def __init__(self, fail_at=None, reuse=True):
        self.fail_at, self.reuse = fail_at, reuse
        self.asked = []
        self.first = 0

    def first_stage(self, request, features=True):
        self.first += 1
        mean = np.asarray(request.image, dtype=np.float32).mean((0, 1))
        blocks = {"image_features": mean, "language_features": np.float32([len(request.question)])}
        return FirstStage(
            request, blocks, mean if self.reuse else None, 2.0, 2.0 * (not self.reuse)
        )

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self._answer(stage) for stage in stages]

    def _answer(self, stage):
        side, _, rounds = self.configuration.values()
        self.asked.append((stage.request.question, side, rounds))
        if self.fail_at == (stage.request.question, side):
            raise RuntimeError("out of\nmemory")
        small = np.asarray(stage.request.image.resize((side, side)))
        text = ("red", "#0f0", "blue")[int(small[0, 0].argmax())]
        seen = stage.total_ms + rounds + len(self.asked) / 1e3
        return Answer(text, 2 * seen, seen, seen, side * side, 2, 1, {"cpu_ms": 2 * seen})


def corner(colour):
    """One pixel of a colour on another: seen at full resolution only."""
    image = Image.new("RGB", (8, 8), "blue")
    image.paste(colour, (0, 0, 1, 1))
    return image


ITEMS = tuple(
    VQAItem(f"id{n}", corner(name), f"Which colour {n}?", (name,), f"image{n // 2}")
    for n, name in enumerate(("red", "#0f0") * 3)
)
IDS = tuple(item.id for item in ITEMS)
CONFIG = VLMProfileConfig(name="colours", max_crops=(1, 8), num_active_blocks=(1, 3), repeats=2)
TWICE = replace(CONFIG, warm_up=0)
ONCE = replace(TWICE, repeats=1)
CELLS = 6 * 4


def measured(out, config=TWICE, model=None, items=ITEMS, **identity):
    """Profile; return the model, which knows what it was asked."""
    model = model or Blurred()
    profile_vlm(out, model, items, config, identity)
    return model


def table_of(out):
    return pl.read_parquet(out / "table.parquet")


def facts_of(out):
    return json.loads((out / "profile.json").read_text())


def features_of(out):
    return read_features(out / "features.safetensors")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return profile_vlm(tmp_path_factory.mktemp("profile"), Blurred(), ITEMS, CONFIG, {"weights": 1})


def test_the_table_holds_what_the_model_answered_how_right_it_was_and_every_time(out):
    table = table_of(out)
    keys = ["sample_id", *KNOBS, "repeat"]
    assert len(table) == table.select(keys).n_unique() == 2 * CELLS
    assert table.select(keys[:-1]).n_unique() == CELLS
    assert set(table["sample_id"]) == set(IDS)
    assert set(table.select("dataset", "top_k").rows()) == {("colours", 0)}
    assert set(table.select("max_crops", "accuracy").rows()) == {(8, 1), (1, 0)}
    assert set(table.filter(max_crops=1)["pred"]) == {"blue"}
    log, rows = (frame.sort(keys) for frame in (read_measurements(out / "state" / LOG), table))
    for column, wanted in {
        "latency_ms": pl.col("total_ms"),
        "vision_ms": pl.col("vision_ms"),
        "cpu_ms": pl.col("extra.cpu_ms"),
        "decode_ms": pl.col("total_ms") - pl.col("prefill_ms"),
    }.items():
        np.testing.assert_allclose(rows[column], log.select(wanted).to_series(), atol=2e-4)


def test_exp_files_and_long_table_are_the_same_profile_with_features(out):
    features = out / "features.safetensors"
    again = read_exp5_exp6(out / "exp5", out / "exp6", "colours", features=features)
    table = read_long_table(out / "table.parquet", features=features)
    mean = np.asarray(ITEMS[1].image, dtype=np.float32).mean((0, 1))
    for read in (table, again):
        assert tuple(knob.name for knob in read.knobs) == KNOBS
        assert read.sample_ids == IDS
        assert read.image_ids == tuple(item.image_id for item in ITEMS)
        assert (read.num_repeats, read.notes) == (2, ())
        assert np.array_equal(read.features["image_features"][1], mean)
    assert torch.equal(table.accuracy, again.accuracy)
    assert torch.equal(table.repeats_ms, again.repeats_ms)
    path = next((out / "exp6").rglob("*crops8_topk0_blocks3.json"))
    row = json.loads(path.read_text())["per_sample_latencies"][0]
    names = ("question_id", "num_vision_tokens", "num_total_tokens")
    assert [row[name] for name in names] == ["id0", 64, 67]


def test_the_description_says_what_was_measured_where_and_what_knobs_do(out, capsys):
    facts = facts_of(out)
    wanted = {"samples": 6, "configurations": 4, "metrics": {"exact": 6}, "model": "blurred"}
    assert facts.items() >= (wanted | {"weights": 1}).items()
    assert facts["machine"]["torch"] == torch.__version__
    knobs = [(knob["measured"], knob["available"]) for knob in facts["knobs"]]
    assert knobs == [([1, 8], True), ([0], False), ([1, 3], True)]
    assert not [*out.rglob(".*")]
    # a finished profile is not measured again
    before = (out / "table.parquet").read_bytes()
    model = measured(out, CONFIG, weights=1)
    assert (model.asked, model.first) == ([], 0)
    assert (out / "table.parquet").read_bytes() == before
    assert "lacks it (it has no experts)" in capsys.readouterr().out
    # and another in its folder is refused
    for fault, other, weights in (("dataset", "others", 1), ("weights", "colours", 2)):
        with input_error(fault):
            measured(out, replace(CONFIG, name=other), weights=weights)


def test_what_each_knob_saves_is_reported_with_its_error():
    rng = np.random.default_rng(0)
    settings = np.array([*itertools.product((2, 4), (1, 2, 3), (5, 9))])
    base = (4 + settings[:, 0]) * (settings[:, 2] - 1) / 4
    latency = base * np.exp(rng.normal(0, 0.01, (200, 12)))
    knobs = [replace(Blurred.knobs[0], name=name) for name in KNOBS]

    report = knob_report(knobs, settings, latency)
    assert [row["saves"] for row in report] == pytest.approx([0.25, 0, 0.5], abs=0.003)
    error = 0.75 * 0.01 * np.sqrt(2 / 6) / np.sqrt(200)
    assert report[0]["saves_error"] == pytest.approx(error, rel=0.25)
    assert [row["saves_nothing"] for row in report] == [False, True, False]
    shown = knob_lines({"knobs": report})
    assert "SAVES NO TIME" in shown[1]
    assert ["from 4 down to 2" in shown[0], "50.0%" in shown[2]] == [True, True]
    # not on all combinations either; nor is anything made up where there are too few of them
    some = [0, 3, 5, 6, 8, 11, 10]
    report = knob_report(knobs, settings[some], latency[:, some])
    assert [row["saves"] for row in report] == pytest.approx([0.25, 0, 0.5], abs=0.01)
    assert "saves" not in knob_report(knobs, settings[[0, 11]], latency[:, [0, 11]])[0]


def test_more_of_it_is_measured_beside_what_is_there(tmp_path):
    assert len(measured(tmp_path, replace(ONCE, samples=3)).asked) == 3 * 4
    first = set(table_of(tmp_path)["sample_id"])
    few = replace(ONCE, samples=5)
    assert len(measured(tmp_path, few).asked) == 2 * 4
    assert first < set(table_of(tmp_path)["sample_id"])
    more = replace(few, repeats=2, max_crops=(1, 4, 8))
    assert len(measured(tmp_path, more).asked) == 5 * 2 + 5 * 6
    assert measured(tmp_path, replace(few, max_crops=(8,), metric="vqa")).asked == []
    # none of what is not asked for any more
    assert len(list((tmp_path / "exp5").rglob("*.json"))) == 2


def test_a_sample_whose_question_changed_is_measured_again_and_no_other(tmp_path):
    measured(tmp_path)
    changed = (replace(ITEMS[0], question="Another?"), replace(ITEMS[1], answers=("blue",)))
    model = measured(tmp_path, items=(*changed, *ITEMS[2:]))
    assert len(model.asked) == 4 * 2
    assert {question for question, *_ in model.asked} == {"Another?"}
    table = table_of(tmp_path)
    assert len(table) == 2 * CELLS
    # judged by the answer as it now is
    assert set(table.filter(sample_id="id1", max_crops=1)["accuracy"]) == {1}


def test_after_an_interruption_it_goes_on_and_measures_nothing_twice(tmp_path):
    class Stopped(Blurred):
        def _answer(self, stage):
            if len(self.asked) == 15:
                raise KeyboardInterrupt
            return super()._answer(stage)

    log = tmp_path / "state" / LOG
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, model=Stopped())
    before = log.read_bytes()
    assert before.count(b"\n") == 15
    log.write_bytes(before + b'{"sample_id": "id0", "con')  # as if killed in a line
    assert len(measured(tmp_path).asked) == 2 * CELLS - 15
    assert log.read_bytes().startswith(before)
    lines = pl.read_ndjson(log)
    assert len(lines) == lines.select("sample_id", "repeat", *KNOBS).n_unique() == 2 * CELLS
    assert features_of(tmp_path).sample_ids == IDS


def test_the_first_stage_runs_once_for_the_features_and_for_all_that_is_answered_at_once(tmp_path):
    class AtOnce(Blurred):
        def answer_all(self, stage, configurations):
            return [self.answer([stage], configuration)[0] for configuration in configurations]

    model = measured(tmp_path, replace(TWICE, samples=2, max_crops=(8,)), AtOnce())
    assert (model.first, len(model.asked)) == (2 + 2 * 2, 2 * 2 * 2)
    model = measured(tmp_path, replace(TWICE, samples=3), AtOnce())
    # of two samples one value of max_crops is missing, of the third everything
    assert (model.first, len(model.asked)) == (1 + 3 * 2, 2 * (2 * 2 + 4))
    assert len(table_of(tmp_path)) == 2 * 3 * 4
    assert features_of(tmp_path).sample_ids == tuple(sorted(set(table_of(tmp_path)["sample_id"])))


def test_features_are_kept_unless_force_asks_for_new_ones(tmp_path):
    measured(tmp_path)
    assert measured(tmp_path).first == 0
    assert measured(tmp_path, replace(TWICE, force=True)).first == len(ITEMS)


def test_two_processes_do_not_measure_into_one_file(tmp_path):
    refused = input_error("another process")
    with appended(tmp_path / "state" / LOG), refused:
        measured(tmp_path)


def test_a_model_that_fails_is_named_and_the_rest_can_be_had_without(tmp_path):
    model = Blurred(("Which colour 4?", 8))
    with input_error(r"'id4' .*max_crops.* 8.*RuntimeError: out of memory"):
        measured(tmp_path, ONCE, model)
    done = read_measurements(tmp_path / "state" / LOG)
    assert len(done) == len(model.asked) - 1
    assert not (tmp_path / "table.parquet").exists()
    left = tuple(item for item in ITEMS if item.id != "id4")
    asked = measured(tmp_path, ONCE, items=left).asked
    assert len(asked) == 5 * 4 - (done["sample_id"] != "id4").sum()
    assert set(table_of(tmp_path)["sample_id"]) == {item.id for item in left}


def test_features_are_kept_and_those_that_are_damaged_are_computed_again(tmp_path):
    class Other(Blurred):
        def first_stage(self, request, features=True):
            stage = super().first_stage(request)
            return replace(stage, features={name: x + 1 for name, x in stage.features.items()})

    measured(tmp_path, ONCE)
    old = features_of(tmp_path).blocks["image_features"].clone()
    measured(tmp_path, TWICE, Other())
    assert torch.equal(features_of(tmp_path).blocks["image_features"], old)
    file = min((tmp_path / "state").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    model = measured(tmp_path, TWICE, Other())
    assert (model.asked, model.first) == ([], 1)
    changed = features_of(tmp_path).blocks["image_features"] - old
    assert sorted(changed.sum(1).tolist()) == [0.0] * 5 + [3.0]


def test_every_pair_comes_once_in_random_order():
    order = [(repeat, i, j) for repeat, i, (j,) in missing(np.zeros((2, 7, 5), bool), False)]
    assert sorted(order) == [*itertools.product(range(2), range(7), range(5))]
    first, second = np.array(order).reshape(2, 35, 3)[:, :, 1:]
    assert (np.diff(first[:, 1]) != 0).sum() > 19
    assert len(set(first[:7, 0])) > 1  # no sample at a time either
    assert not np.array_equal(first, second)


def test_options_are_shown_with_their_letters_and_metrics_are_chosen(tmp_path):
    choice = VQAItem("1", ITEMS[0].image, "Which {choices}?", ("red",), choices=("red", "green"))
    assert question_text(choice) == "Which {choices}?\nA. red\nB. green"
    assert question_text(choice, "{question} Briefly.") == "Which {choices}? Briefly."
    three = replace(ITEMS[0], answers=("red", "red", "dark red"))
    metrics = [metric_of(item) for item in (choice, three, ITEMS[0])]
    assert [*metrics, metric_of(three, "anls")] == ["choice", "vqa", "exact", "anls"]
    measured(tmp_path, replace(CONFIG, name="both"), items=(choice, replace(three, id="2")))
    assert facts_of(tmp_path)["metrics"] == {"choice": 1, "vqa": 1}
    accuracy = table_of(tmp_path).filter(max_crops=8)["accuracy"]
    assert sorted({*accuracy}) == pytest.approx([(0.5 + 0.5 + 1) / 3, 1])


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("repeats", 0, None),
        ("samples", 0, None),
        ("metric", "bleu", None),
        ("count", 5, None),
        ("prompt", "Answer!", None),
        ("max_crops", (1, 9), "max_crops=9"),
        ("top_k", (2,), "top_k=2"),
        ("max_crops", (1, 1), None),
        ("samples", 7, "samples=7"),
        ("metric", "choice", "id0"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, name, value, fault):
    with input_error(fault or name):
        measured(tmp_path / "out", replace(CONFIG, **{name: value}))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("changed", [{"prefill_ms": 1e9}, {"extra": {"pred": 1.0}}])
def test_answers_that_cannot_be_are_refused_at_once(tmp_path, changed):
    class Odd(Blurred):
        def _answer(self, stage):
            return replace(super()._answer(stage), **changed)

    with input_error("times|pred"):
        measured(tmp_path, model=Odd())
