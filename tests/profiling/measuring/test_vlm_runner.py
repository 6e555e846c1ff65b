"""Profiles of a model whose knobs are set: measured once, whatever happens, and read back as they
were written."""

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from commands import read_json
from helpers import identical, input_error
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
from knobwise.profiling.measuring.machine import claim_machine
from knobwise.profiling.measuring.measuring import LOG, missing, open_log, read_measurements
from knobwise.profiling.measuring.outputs import knob_lines, knob_report
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import question_text
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

    def __init__(self, **changed):
        self.changed = changed  # of every answer
        self.asked = []
        self.first = 0

    def first_stage(self, request, features=True):
        self.first += 1
        mean = np.asarray(request.image, dtype=np.float32).mean((0, 1))
        blocks = {"image_features": mean, "language_features": np.float32([len(request.question)])}
        return FirstStage(request, blocks, mean, 2.0, 0.0)

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self._answer(stage.request, stage.total_ms) for stage in stages]

    def _answer(self, request, seen_ms):
        side, _, rounds = self.configuration.values()
        self.asked.append(request.question)
        small = np.asarray(request.image.resize((side, side)))
        text = ("red", "#0f0", "blue")[small[0, 0].argmax()]
        seen_ms += rounds + len(self.asked) / 1e3
        times = 2 * seen_ms, seen_ms, seen_ms
        answer = Answer(text, *times, side * side, 2, 1, {"cpu_ms": 2 * seen_ms})
        return replace(answer, **self.changed)


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
    assert set(table.select("dataset", "top_k").rows()) == {("colours", 0)}
    answers = table.select("max_crops", "pred", "accuracy")
    assert set(answers.rows()) == {(8, "red", 1), (8, "#0f0", 1), (1, "blue", 0)}
    log, rows = (frame.sort(keys) for frame in (read_measurements(out / "state" / LOG), table))
    for column, wanted in {
        "latency_ms": pl.col("total_ms"),
        "vision_ms": pl.col("vision_ms"),
        "cpu_ms": pl.col("extra.cpu_ms"),
        "decode_ms": pl.col("total_ms") - pl.col("prefill_ms"),
    }.items():
        np.testing.assert_allclose(rows[column], log.select(wanted).to_series(), atol=2e-4)


def test_part_of_the_cells_is_measured_and_test_samples_whole(tmp_path, capsys):
    items = tuple(replace(ITEMS[n % 6], id=f"id{n:02}", image_id="") for n in range(20))
    sparse = replace(ONCE, per_sample=1)
    measured(tmp_path, sparse, items=items)
    table = read_long_table(tmp_path / "table.parquet")
    counts = table.mask.sum(1)
    test = table.split().test
    assert counts[test].tolist() == [4] * len(test)
    wanted = 4 * len(test) + 20 - len(test)
    assert counts.sum() == wanted
    # progress is that of the cells that are wanted
    assert f"measuring: {wanted}/{wanted}" in capsys.readouterr().err
    assert set(table.parts) == {"train", "validation", "test"}
    facts = read_json(tmp_path / "profile.json")
    assert facts["measured"] == {"per_sample": 1, "probability": 0.25, "whole": "test"}
    assert {"saves", "saves_error"} < set(facts["knobs"][0])
    # more cells include those that were measured
    model = measured(tmp_path, replace(sparse, per_sample=2), items=items)
    assert len(model.asked) == 20 - len(test)
    counts = read_long_table(tmp_path / "table.parquet").mask.sum(1)
    assert sorted(counts.tolist()) == [2] * (20 - len(test)) + [4] * len(test)
    for wrong in (-1, 5):
        with input_error("knobs.per_sample"):
            measured(tmp_path / "other", replace(sparse, per_sample=wrong), items=items)
    with input_error("knobs.per_sample"):
        measured(tmp_path / "few", sparse, items=items[:4])


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
        identical(read.accuracy, table.accuracy)
        identical(read.repeats_ms, table.repeats_ms)
    (path,) = (out / "exp6").rglob("*crops8_topk0_blocks3.json")
    row = read_json(path)["per_sample_latencies"][0]
    names = ("question_id", "num_vision_tokens", "num_total_tokens")
    assert [row[name] for name in names] == ["id0", 64, 67]


def test_the_description_says_what_was_measured_where_and_what_knobs_do(out, capsys):
    facts = read_json(out / "profile.json")
    wanted = {"samples": 6, "configurations": 4, "metrics": {"exact": 6}, "model": "blurred"}
    assert facts.items() >= (wanted | {"weights": 1}).items()
    assert facts["machine"]["torch"] == torch.__version__
    assert [knob["measured"] for knob in facts["knobs"]] == [[1, 8], [0], [1, 3]]
    assert [knob["available"] for knob in facts["knobs"]] == [True, False, True]
    assert not [*out.rglob(".*")]
    # a finished profile is not measured again
    before = (out / "table.parquet").read_bytes()
    model = measured(out, CONFIG, weights=1)
    assert (model.asked, model.first) == ([], 0)
    assert (out / "table.parquet").read_bytes() == before
    assert "lacks it (it has no experts)" in capsys.readouterr().out
    # and another in its folder is refused
    with input_error("dataset"):
        measured(out, replace(CONFIG, name="others"), weights=1)
    with input_error("weights"):
        measured(out, CONFIG, weights=2)


def test_what_each_knob_saves_is_reported_with_its_error():
    rng = np.random.default_rng(0)
    settings = np.array([*itertools.product((2, 4), (1, 2, 3), (5, 9))])
    base = (4 + settings[:, 0]) * (settings[:, 2] - 1)
    latency = base * np.exp(rng.normal(0, 0.01, (200, 12)))
    knobs = [replace(Blurred.knobs[0], name=name) for name in KNOBS]

    for some, within in ((range(12), 0.003), ([0, 3, 5, 6, 8, 11, 10], 0.01)):
        report = knob_report(knobs, settings[some], latency[:, some])
        assert [row["saves"] for row in report] == pytest.approx([0.25, 0, 0.5], abs=within)
        if len(some) == 12:
            error = 0.75 * 0.01 * np.sqrt(2 / 6) / np.sqrt(200)
            assert report[0]["saves_error"] == pytest.approx(error, rel=0.25)
    assert [row["saves_nothing"] for row in report] == [False, True, False]
    shown = knob_lines({"knobs": report})
    assert "from 4 down to 2" in shown[0]
    assert "SAVES NO TIME" in shown[1]
    # nothing is made up where there are too few combinations
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


def test_a_sample_whose_question_or_image_changed_is_measured_again_and_no_other(tmp_path):
    measured(tmp_path)
    assert measured(tmp_path, items=ITEMS[::-1]).asked == []  # another order is no change
    changed = (
        replace(ITEMS[0], question="Another?"),
        replace(ITEMS[1], answers=("blue",)),
        replace(ITEMS[2], image=corner("#0f0")),
    )
    model = measured(tmp_path, items=(*changed, *ITEMS[3:]))
    assert sorted(model.asked) == ["Another?"] * 4 * 2 + ["Which colour 2?"] * 4 * 2
    assert model.first == len(model.asked)
    table = table_of(tmp_path)
    assert len(table) == 2 * CELLS
    # judged by the answer as it now is
    assert set(table.filter(sample_id="id1", max_crops=1)["accuracy"]) == {1}


def test_after_an_interruption_it_goes_on_and_measures_nothing_twice(tmp_path):
    class Stopped(Blurred):
        def _answer(self, *asked):
            if len(self.asked) == 15:
                raise KeyboardInterrupt
            return super()._answer(*asked)

    log = tmp_path / "state" / LOG
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, model=Stopped())
    before = log.read_bytes()
    assert before.count(b"\n") == 15
    log.write_bytes(before + b'{"sample_id": "id0", "con')  # as if killed in a line
    assert len(measured(tmp_path).asked) == 2 * CELLS - 15
    assert log.read_bytes().startswith(before)
    lines = pl.read_ndjson(log).select("sample_id", "repeat", *KNOBS)
    assert len(lines) == lines.n_unique() == 2 * CELLS
    assert features_of(tmp_path).sample_ids == IDS


def test_the_first_stage_runs_once_for_the_features_and_for_all_that_is_answered_at_once(tmp_path):
    class AtOnce(Blurred):
        def answer_all(self, stage, configurations):
            return [self.answer([stage], configuration)[0] for configuration in configurations]

    model = measured(tmp_path, replace(TWICE, samples=2, max_crops=(8,)), AtOnce())
    assert (model.first, len(model.asked)) == (2 * 2, 2 * 2 * 2)
    model = measured(tmp_path, replace(TWICE, samples=3), AtOnce())
    # of two samples one value of max_crops is missing, of the third everything
    assert (model.first, len(model.asked)) == (3 * 2, 2 * (2 * 2 + 4))
    assert len(table_of(tmp_path)) == 2 * 3 * 4


def test_features_are_kept_unless_force_asks_for_new_ones(tmp_path):
    measured(tmp_path)
    assert measured(tmp_path).first == 0
    assert measured(tmp_path, replace(TWICE, force=True)).first == len(ITEMS)


def test_two_processes_do_not_measure_into_one_file(tmp_path):
    with open_log(tmp_path / "state" / LOG), input_error(LOG):
        measured(tmp_path)


def test_a_model_that_fails_is_named_and_the_rest_can_be_had_without(tmp_path):
    class Failing(Blurred):
        def _answer(self, request, seen_ms):
            if (request.question, self.configuration["max_crops"]) == ("Which colour 4?", 8):
                raise RuntimeError("out of\nmemory")
            return super()._answer(request, seen_ms)

    model = Failing()
    with input_error(r"'id4' .*max_crops.* 8.*RuntimeError: out of memory"):
        measured(tmp_path, ONCE, model)
    assert len(read_measurements(tmp_path / "state" / LOG)) == len(model.asked)
    assert not (tmp_path / "table.parquet").exists()
    measured(tmp_path, ONCE, items=(*ITEMS[:4], ITEMS[5]))
    assert set(table_of(tmp_path)["sample_id"]) == {*IDS} - {"id4"}


def test_features_are_kept_and_those_that_are_damaged_are_computed_again(tmp_path):
    class Other(Blurred):
        def first_stage(self, request, features=True):
            stage = super().first_stage(request)
            stage.features["image_features"] += 1
            return stage

    measured(tmp_path, ONCE)
    old = features_of(tmp_path).blocks["image_features"].clone()
    file = min((tmp_path / "state").rglob("*.safetensors"))
    # a kill leaves a file half written beside it
    file.with_name(f".{file.stem}-x1y2.safetensors").write_bytes(b"half")
    measured(tmp_path, TWICE, Other())
    identical(features_of(tmp_path).blocks["image_features"], old)
    file.write_bytes(file.read_bytes()[:-1])
    model = measured(tmp_path, TWICE, Other())
    assert (model.asked, model.first) == ([], 1)
    changed = features_of(tmp_path).blocks["image_features"] - old
    assert sorted(changed.sum(1).tolist()) == [0.0] * 5 + [3.0]


def test_every_pair_comes_once_in_random_order():
    order = [(repeat, i, j) for repeat, i, (j,) in missing(np.zeros((2, 7, 5), bool), False)]
    assert sorted(order) == [*np.ndindex(2, 7, 5)]
    first, second = np.reshape(order, (2, 35, 3))[:, :, 1:]
    assert (np.diff(first[:, 1]) != 0).sum() > 19
    assert len(set(first[:7, 0])) > 1  # no sample at a time either
    assert not np.array_equal(first, second)


def test_options_are_shown_with_their_letters_and_metrics_are_chosen(tmp_path):
    choice = VQAItem("1", ITEMS[0].image, "Which {choices}?", ("red",), choices=("red", "green"))
    assert question_text(choice) == "Which {choices}?\nA. red\nB. green"
    assert question_text(choice, "{question} Briefly.") == "Which {choices}? Briefly."
    three = replace(ITEMS[0], answers=("red", "red", "dark red"))
    measured(tmp_path, replace(CONFIG, name="both"), items=(choice, replace(three, id="2")))
    assert read_json(tmp_path / "profile.json")["metrics"] == {"choice": 1, "vqa": 1}
    accuracy = table_of(tmp_path).filter(max_crops=8)["accuracy"]
    assert sorted({*accuracy}) == pytest.approx([(0.5 + 0.5 + 1) / 3, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeats", 0),
        ("samples", 0),
        ("metric", "bleu"),
        ("count", 5),
        ("count", -1),
        ("prompt", "Answer!"),
        ("max_crops", (1, 9)),
        ("top_k", (2,)),
        ("max_crops", (1, 1)),
        ("samples", 7),
        ("metric", "choice"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, name, value):
    with input_error(name):
        measured(tmp_path / "out", replace(CONFIG, **{name: value}))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[1]", '{"a": 1, "a": 2}', "[" * 100_000, "7"])
def test_a_damaged_note_of_what_is_measured_is_refused_in_a_line(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with input_error(r"run\.json: is damaged .*; choose another out folder") as refused:
        claim_machine(tmp_path / "run.json", {"a": 1})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", '{\n "a', '{\n "a": 1\0\0\0', "\0\0"])
def test_a_note_that_a_power_cut_left_half_is_written_again(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    claim_machine(tmp_path / "run.json", {"a": 1})
    assert read_json(tmp_path / "run.json") == {"a": 1}


@pytest.mark.parametrize("changed", [{"prefill_ms": 1e9}, {"extra": {"pred": 1.0}}])
def test_answers_that_cannot_be_are_refused_at_once(tmp_path, changed):
    with input_error("times|pred"):
        measured(tmp_path, model=Blurred(**changed))
