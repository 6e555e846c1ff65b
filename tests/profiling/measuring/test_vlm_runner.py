"""Profiles of a model whose knobs are set: measured once, whatever happens, and read back as they
were written."""

import json
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from knobwise.common.errors import InputError
from knobwise.envs.readers.exp_files import read_exp5_exp6
from knobwise.envs.readers.feature_files import read_features
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    Answer,
    FirstStage,
    KnobSupport,
    check_configuration,
)
from knobwise.profiling.measuring.machine import rendered
from knobwise.profiling.measuring.measuring import appended, measuring_order, read_logs
from knobwise.profiling.measuring.outputs import knob_report
from knobwise.profiling.measuring.profiler import command, profile_vlm
from knobwise.profiling.measuring.questions import VQAData, VQAItem
from knobwise.profiling.measuring.requests import metric_of, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig


class Blurred:
    """A model with two knobs that sees the image at `max_crops` pixels a side and says its colour:
    really computed."""

    name = "blurred"
    knobs = (
        KnobSupport("max_crops", 8, 1, 8, "pixels of a side"),
        KnobSupport("top_k", 0, note="it has no experts"),
        KnobSupport("num_active_blocks", 3, 1, 3, "rounds", "every round costs a fixed time"),
    )

    def __init__(self, fail_at=None, reuse=True):
        self.fail_at, self.reuse = fail_at, reuse
        self.asked: list[tuple[str, int, int]] = []
        self.first = 0
        self.configuration: dict[str, int] = {}

    @contextmanager
    def set_knobs(self, configuration):
        before, self.configuration = (
            self.configuration,
            check_configuration(self.knobs, configuration),
        )
        yield
        self.configuration = before

    def first_stage(self, request, features=True):
        self.first += 1
        start = time.perf_counter()
        mean = np.asarray(request.image, dtype=np.float32).mean((0, 1))
        words = np.array([len(request.question), request.question.count(" ")], np.float32)
        ms = (time.perf_counter() - start) * 1e3
        features = {"image_features": mean, "language_features": words}
        return FirstStage(
            request, features, mean if self.reuse else None, ms, 0.0 if self.reuse else ms
        )

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self._answer(stage) for stage in stages]

    def _answer(self, stage):
        side, rounds = self.configuration["max_crops"], self.configuration["num_active_blocks"]
        self.asked.append((stage.request.question, side, rounds))
        if self.fail_at == (stage.request.question, side):
            raise RuntimeError("out of\nmemory")
        start = time.perf_counter()
        for _ in range(rounds):
            small = np.asarray(stage.request.image.resize((side, side)), dtype=np.float32)
        seen = (time.perf_counter() - start) * 1e3 + stage.total_ms
        text = ("red", "green", "blue")[int(small[0, 0].argmax())]
        total = seen + (time.perf_counter() - start) * 1e3
        return Answer(
            text, total, seen, seen, side * side, 2, 1, {"cpu_ms": total, "rounds": float(rounds)}
        )


def corner(colour, size=8):
    """One pixel of a colour on another: seen at full resolution only."""
    image = Image.new("RGB", (size, size), "blue")
    image.putpixel((0, 0), {"red": (255, 0, 0), "green": (0, 255, 0)}[colour])
    return image


COLOURS = ("red", "green") * 3
ITEMS = tuple(
    VQAItem(f"id{n}", corner(colour), f"Which colour {n}?", (colour,), f"image{n // 2}")
    for n, colour in enumerate(COLOURS)
)
DATA = VQAData(ITEMS, ITEMS)
CONFIG = VLMProfileConfig(name="colours", max_crops=(1, 8), num_active_blocks=(1, 3), repeats=2)
ONCE = replace(CONFIG, repeats=1, warm_up=0)
CELLS = 6 * 4


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return profile_vlm(
        tmp_path_factory.mktemp("profile"), Blurred(), DATA, CONFIG, {"weights": "none"}
    )


def test_the_table_holds_what_the_model_answered_how_right_it_was_and_every_time(out):
    table = pl.read_parquet(out / "table.parquet")
    assert table.height == table.select("sample_id", *KNOBS, "repeat").unique().height == 2 * CELLS
    assert table.select("sample_id", *KNOBS).unique().height == CELLS
    assert set(table["sample_id"]) == {item.id for item in ITEMS}
    assert set(table.select("dataset", "top_k").rows()) == {("colours", 0)}
    assert set(table.select("max_crops", "accuracy").rows()) == {(8, 1), (1, 0)}
    assert (table.filter(pl.col("max_crops") == 1)["pred"] == "blue").all()
    assert (table["latency_ms"] >= table["prefill_ms"]).all()
    assert (table["prefill_ms"] >= table["vision_ms"]).all()
    cell = {"sample_id": "id3", "max_crops": 8, "num_active_blocks": 3}
    log, rows = (frame.filter(**cell).sort("repeat") for frame in (read_logs(out / "state"), table))
    assert rows["repeat"].to_list() == [0, 1]
    for written, measured in {
        "latency_ms": "total_ms",
        "vision_ms": "vision_ms",
        "cpu_ms": "extra.cpu_ms",
    }.items():
        assert rows[written].to_list() == pytest.approx(log[measured].to_list(), abs=1e-4)
    decoding = rows["latency_ms"] - rows["prefill_ms"]
    assert rows["decode_ms"].to_list() == pytest.approx(decoding.to_list(), abs=1e-4)


def test_exp_files_and_long_table_are_the_same_profile_with_features(out):
    again = read_exp5_exp6(
        out / "exp5", out / "exp6", "colours", features=out / "features.safetensors"
    )
    table = read_long_table(out / "table.parquet", features=out / "features.safetensors")
    assert [knob.name for knob in table.knobs] == [knob.name for knob in again.knobs] == list(KNOBS)
    assert table.sample_ids == again.sample_ids == tuple(item.id for item in ITEMS)
    assert table.image_ids == again.image_ids == tuple(item.image_id for item in ITEMS)
    assert torch.equal(table.accuracy, again.accuracy)
    assert torch.equal(table.repeats_ms, again.repeats_ms)
    assert (table.num_repeats, table.notes, again.notes) == (2, (), ())
    assert torch.equal(table.features["image_features"], again.features["image_features"])
    mean = torch.from_numpy(np.asarray(ITEMS[1].image, dtype=np.float32).mean((0, 1)))
    assert torch.equal(table.features["image_features"][1], mean)
    row = json.loads(next((out / "exp6").rglob("*crops8_topk0_blocks3.json")).read_text())[
        "per_sample_latencies"
    ][0]
    assert (row["question_id"], row["num_vision_tokens"], row["num_total_tokens"]) == (
        "id0",
        64,
        67,
    )


def test_the_description_says_what_was_measured_where_and_what_knobs_do(out):
    about = json.loads((out / "profile.json").read_text())
    assert (about["samples"], about["configurations"], about["metrics"]) == (6, 4, {"exact": 6})
    assert (about["model"], about["weights"], about["machine"]["torch"]) == (
        "blurred",
        "none",
        torch.__version__,
    )
    assert about["clock"]["repeats_that_changed_an_answer"] == 0
    knobs = {k["name"]: (k["available"], k["measured"]) for k in about["knobs"]}
    assert knobs == {
        "max_crops": (True, [1, 8]),
        "top_k": (False, [0]),
        "num_active_blocks": (True, [1, 3]),
    }
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]


def test_a_knob_that_is_lacking_or_saves_nothing_is_reported(out, tmp_path, capsys):
    profile_vlm(out, Blurred(), DATA, CONFIG, {"weights": "none"})
    printed = capsys.readouterr().out
    assert "top_k: this model lacks it (it has no experts)" in printed
    assert "num_active_blocks: rounds; " in printed
    rng, settings = (
        np.random.default_rng(0),
        np.array([[c, k, b] for c in (2, 4) for k in (1, 2, 3) for b in (5, 9)]),
    )
    base = np.where(settings[:, 0] == 4, 8.0, 6.0) * np.where(settings[:, 2] == 9, 2.0, 1.0)
    latency = base * np.exp(rng.normal(0, 0.01, (200, len(settings))))
    knobs = [replace(Blurred.knobs[0], name=name) for name in KNOBS]
    report = knob_report(knobs, settings, latency)
    assert [row["saves"] for row in report] == pytest.approx([0.25, 0, 0.5], abs=0.003)
    assert [row["saves_nothing"] for row in report] == [False, True, False]
    assert ["SAVES NO TIME" in line for line in rendered("knobs", knobs=report).split("\n")] == [
        False,
        True,
        False,
    ]
    # two samples, of which one is faster with top_k=3 and the other slower: nothing can be said
    two = np.stack([np.where(settings[:, 1] == 3, factor, 1.0) * base for factor in (1.1, 0.95)])
    lines = rendered("knobs", knobs=knob_report(knobs, settings, two)).split("\n")
    assert ["no saving shown" in line for line in lines] == [False, True, False]
    assert "saves 50.0 % ± 0.0 of the time, from 9 down to 5" in lines[2]
    assert report[0]["saves_error"] == pytest.approx(
        0.75 * 0.01 * np.sqrt(2 / 6) / np.sqrt(200), rel=0.25
    )
    # not on all combinations either; nor is anything made up where there are too few of them
    some = [0, 3, 5, 6, 8, 11, 10]
    report = knob_report(knobs, settings[some], latency[:, some])
    assert [row["saves"] for row in report] == pytest.approx([0.25, 0, 0.5], abs=0.01)
    assert "saves" not in knob_report(knobs, settings[[0, 11]], latency[:, [0, 11]])[0]


def test_a_finished_profile_is_not_measured_again_and_another_in_its_folder_is_refused(out):
    before, model = (out / "table.parquet").read_bytes(), Blurred()
    profile_vlm(out, model, DATA, CONFIG, {"weights": "none"})
    assert (model.asked, model.first) == ([], 0)
    assert (out / "table.parquet").read_bytes() == before
    with pytest.raises(InputError, match="dataset: colours → others"):
        profile_vlm(out, model, DATA, replace(CONFIG, name="others"), {"weights": "none"})
    with pytest.raises(InputError, match="weights: none → new"):
        profile_vlm(out, model, DATA, CONFIG, {"weights": "new"})


def test_more_of_it_is_measured_beside_what_is_there(tmp_path):
    small = replace(ONCE, samples=3)
    profile_vlm(tmp_path, model := Blurred(), DATA, small)
    assert len(model.asked) == 3 * 4
    first = set(pl.read_parquet(tmp_path / "table.parquet")["sample_id"])
    profile_vlm(tmp_path, model := Blurred(), DATA, replace(small, samples=5))
    assert len(model.asked) == 2 * 4
    assert first < set(pl.read_parquet(tmp_path / "table.parquet")["sample_id"])
    profile_vlm(
        tmp_path,
        model := Blurred(),
        DATA,
        replace(small, samples=5, repeats=2, max_crops=(1, 4, 8)),
    )
    assert len(model.asked) == 5 * 2 + 5 * 6
    profile_vlm(
        tmp_path, model := Blurred(), DATA, replace(small, samples=5, max_crops=(8,), metric="vqa")
    )
    assert model.asked == []
    assert (
        len(list((tmp_path / "exp5").rglob("*.json"))) == 2
    )  # none of what is not asked for any more


def test_a_sample_whose_question_changed_is_measured_again_and_no_other(tmp_path):
    twice = replace(ONCE, repeats=2)
    profile_vlm(tmp_path, Blurred(), DATA, twice)
    items = (
        replace(ITEMS[0], question="Another?"),
        replace(ITEMS[1], answers=("blue",)),
        *ITEMS[2:],
    )
    profile_vlm(tmp_path, model := Blurred(), VQAData(items, items), twice)
    assert len(model.asked) == 4 * 2
    assert {question for question, *_ in model.asked} == {"Another?"}
    table = pl.read_parquet(tmp_path / "table.parquet")
    assert table.height == 2 * CELLS
    changed = table.filter((pl.col("sample_id") == "id1") & (pl.col("max_crops") == 1))
    assert (changed["accuracy"] == 1).all()  # judged by the answer as it now is


def test_after_an_interruption_it_goes_on_and_measures_nothing_twice(tmp_path):
    class Stopped(Blurred):
        def _answer(self, stage):
            if len(self.asked) == 15:
                raise KeyboardInterrupt
            return super()._answer(stage)

    log, once = tmp_path / "state" / "measured-0.jsonl", replace(CONFIG, warm_up=0)
    with pytest.raises(KeyboardInterrupt):
        profile_vlm(tmp_path, Stopped(), DATA, once)
    measured = log.read_bytes()
    assert measured.count(b"\n") == 15
    log.write_bytes(measured + b'{"sample_id": "id0", "con')  # as if killed in a line
    profile_vlm(tmp_path, model := Blurred(), DATA, once)
    assert len(model.asked) == 2 * CELLS - 15
    assert log.read_bytes().startswith(measured)
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    keys = [(line["sample_id"], line["repeat"], *(line[knob] for knob in KNOBS)) for line in lines]
    assert len(keys) == len(set(keys)) == 2 * CELLS
    assert read_features(tmp_path / "features.safetensors").sample_ids == tuple(
        item.id for item in ITEMS
    )


def test_two_processes_do_not_measure_into_one_file(tmp_path):
    refused = pytest.raises(InputError, match="another process is measuring")
    with appended(tmp_path / "state" / "measured-0.jsonl"), refused:
        profile_vlm(tmp_path, Blurred(), DATA, CONFIG)


def test_a_model_that_fails_is_named_and_the_rest_can_be_had_without(tmp_path):
    message = (
        r"'id4' with max_crops=8 top_k=0 .*\(RuntimeError: out of memory\).*measured is on disk"
    )
    with pytest.raises(InputError, match=message):
        profile_vlm(tmp_path, model := Blurred(("Which colour 4?", 8)), DATA, ONCE)
    done = read_logs(tmp_path / "state")
    assert len(done) == len(model.asked) - 1
    assert not (tmp_path / "table.parquet").exists()
    left = VQAData(tuple(item for item in ITEMS if item.id != "id4"), ())
    profile_vlm(tmp_path, model := Blurred(), left, ONCE)
    assert len(model.asked) == 5 * 4 - (done["sample_id"] != "id4").sum()
    assert read_long_table(tmp_path / "table.parquet").sample_ids == tuple(
        item.id for item in left.queries
    )


def test_parts_measure_each_their_configurations_and_the_last_one_merges(tmp_path, capsys):
    models = [Blurred() for _ in range(3)]
    for shard in (2, 0, 1):
        assert not (tmp_path / "table.parquet").exists()
        profile_vlm(
            tmp_path, models[shard], DATA, replace(CONFIG, shard=shard, shards=3, warm_up=0)
        )
        printed = capsys.readouterr().out
        assert ("measurements of the others are missing" in printed) == (shard != 1)
    parts = [{asked[1:] for asked in model.asked} for model in models]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 4
    assert sum(len(model.asked) for model in models) == 2 * CELLS
    assert pl.read_parquet(tmp_path / "table.parquet").height == 2 * CELLS
    assert read_features(tmp_path / "features.safetensors").sample_ids == tuple(
        item.id for item in ITEMS
    )
    assert sum(model.first for model in models) == 2 * CELLS  # features came with the measurements
    # another number of parts goes on from the same state
    profile_vlm(tmp_path, model := Blurred(), DATA, CONFIG)
    assert model.asked == []


def test_features_of_a_part_at_work_are_left_to_it(tmp_path):
    done = replace(CONFIG, shards=2, warm_up=0)
    for shard in (0, 1):
        profile_vlm(tmp_path, Blurred(), DATA, replace(done, shard=shard))
    assert not list((tmp_path / "state").glob("features-*"))
    shared = tmp_path / "state" / "features-1"
    shared.mkdir()
    with appended(tmp_path / "state" / "measured-1.jsonl"):
        profile_vlm(tmp_path, Blurred(), DATA, done)
        assert shared.exists()
    profile_vlm(tmp_path, Blurred(), DATA, done)
    assert not shared.exists()


def test_a_part_of_another_model_is_refused_and_leaves_nothing(tmp_path):
    profile_vlm(tmp_path, Blurred(), DATA, replace(CONFIG, shards=2))
    with pytest.raises(InputError, match=r"weights: None → x.*another out folder"):
        profile_vlm(tmp_path, Blurred(), DATA, replace(CONFIG, shard=1, shards=2), {"weights": "x"})
    assert not (tmp_path / "state" / "run-1.json").exists()


def test_features_are_kept_when_nothing_changed_and_taken_anew_by_force(tmp_path):
    class Other(Blurred):
        def first_stage(self, request, features=True):
            stage = super().first_stage(request)
            return replace(stage, features={name: x + 1 for name, x in stage.features.items()})

    once = replace(CONFIG, repeats=1)
    out = profile_vlm(tmp_path, Blurred(), DATA, once)
    old = read_features(out / "features.safetensors").blocks
    profile_vlm(tmp_path, Other(), DATA, replace(once, repeats=2))
    assert torch.equal(
        read_features(out / "features.safetensors").blocks["image_features"], old["image_features"]
    )
    profile_vlm(tmp_path, model := Other(), DATA, replace(once, repeats=2, force=True))
    assert (model.asked, model.first) == ([], 6)
    new = read_features(out / "features.safetensors").blocks
    assert torch.equal(new["image_features"], old["image_features"] + 1)


def test_a_profile_without_features(tmp_path):
    profile_vlm(tmp_path, Blurred(), DATA, replace(CONFIG, features=False))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_first_stage_that_nothing_goes_on_from_runs_once_for_each_sample(tmp_path):
    profile_vlm(tmp_path, model := Blurred(reuse=False), DATA, CONFIG)
    assert model.first == 6
    assert (
        pl.read_parquet(tmp_path / "table.parquet").filter(pl.col("max_crops") == 8)["accuracy"]
        == 1
    ).all()


def test_every_pair_comes_once_in_random_order():
    order = measuring_order(7, 5, 3)
    assert sorted(map(tuple, order.tolist())) == [(i, j) for i in range(7) for j in range(5)]
    assert (np.diff(order[:, 1]) != 0).sum() > 19
    assert len(set(order[:7, 0])) > 1  # no sample at a time either
    assert not np.array_equal(order, measuring_order(7, 5, 4))


def test_options_are_shown_with_their_letters_and_metrics_are_chosen(tmp_path):
    with_choices = VQAItem(
        "1", ITEMS[0].image, "Which {choices}?", ("red",), choices=("red", "green")
    )
    assert question_text(with_choices) == "Which {choices}?\nA. red\nB. green"
    assert question_text(with_choices, "{question} Briefly.") == "Which {choices}? Briefly."
    three = replace(ITEMS[0], answers=("red", "red", "dark red"))
    assert [metric_of(item) for item in (with_choices, three, ITEMS[0])] == [
        "choice",
        "vqa",
        "exact",
    ]
    assert metric_of(three, "anls") == "anls"
    data = VQAData((with_choices, replace(three, id="2")), ())
    profile_vlm(tmp_path, Blurred(), data, replace(CONFIG, name="both_kinds"))
    about = json.loads((tmp_path / "profile.json").read_text())
    assert (about["name"], about["metrics"]) == ("both_kinds", {"choice": 1, "vqa": 1})
    table = read_exp5_exp6(tmp_path / "exp5", tmp_path / "exp6", "both_kinds")
    full = table.accuracy[:, (table.configurations == 1)[:, 0]]
    assert full[0].eq(1).all()
    assert full[1].numpy() == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_the_command_names_what_was_changed():
    config = replace(CONFIG, prompt="{question} Say it.", shard=1, shards=2)
    assert command("m", config) == (
        "knobwise profile model=m data=FILE out=DIR knobs.name=colours "
        "'knobs.prompt=\"{question} Say it.\"' "
        "knobs.max_crops=[1,8] knobs.num_active_blocks=[1,3] knobs.repeats=2"
    )


def test_a_large_grid_is_sampled(tmp_path):
    grid = {"max_crops": tuple(range(1, 9)), "num_active_blocks": (1, 2, 3)}
    config = replace(CONFIG, **grid, count=6)
    profile_vlm(tmp_path, Blurred(), DATA, config)
    table = read_long_table(tmp_path / "table.parquet")
    assert table.num_configurations == 6
    assert set(table.configurations[:, 2].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repeats": 0}, "repeats=0: must be at least " "1"), ({"samples": 0}, "samples=0: must be at least " "1"),
        ({"shard": 2, "shards": 2}, "shard must be 0 to 1"), ({"metric": "bleu"}, "must be one of auto, " "vqa"),
        ({"count": 5}, "make 4 configurations"), ({"prompt": "Answer!"}, "must contain {question}"),
        ({"max_crops": (1, 9)}, "max_crops=9: this model takes 1 to 8"),
        ({"top_k": (2,)}, "lacks the knob .it has no experts."),
        ({"max_crops": (1, 1)}, "no value twice"), ({"samples": 7}, "the data hold only 6 samples"),
        ({"metric": "choice"}, "sample 'id0': metric choice: needs 1 to 26 choices"),
        ({"shards": 5}, "there are only 4 configurations"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_anything_is_written(tmp_path, wrong, message):
    with pytest.raises(InputError, match=message):
        profile_vlm(tmp_path / "out", Blurred(), DATA, replace(CONFIG, **wrong))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefill_ms": 1e9}, "its times are vision"),
        ({"extra": {"pred": 1.0}}, "its extra 'pred' is the name of a col"),
    ],
)
def test_answers_that_cannot_be_are_refused_at_once(tmp_path, changed, message):
    class Odd(Blurred):
        def _answer(self, stage):
            return replace(super()._answer(stage), **changed)

    with pytest.raises(InputError, match=message):
        profile_vlm(tmp_path, Odd(), DATA, CONFIG)
