"""`knobwise profile`, `train` and `evaluate live=true` with models that are not built in."""

import json
from pathlib import Path

import polars as pl
import pytest
from commands import OPTIMISER, launch, read_json, refused, words_of
from safetensors.torch import load_file
from tiny_models import picture, tiny_language_model, tiny_model

LEAN = words_of(
    OPTIMISER,
    "optimiser.iterations=4 policy=utility policy.fold_networks=2 baselines=false",
    "seeds=[0]",
)
STREAM = words_of("evaluate live=true stream.requests=12 json=live.json")
MODELS = '''
from contextlib import nullcontext

import numpy as np

from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, clock_ms
from knobwise.profiling.measuring.questions import VQAItem


class Echo:
    """Answers a question with its first letters; a look of 2 ms that only the mode "short" continues from."""

    name = "echo"
    knobs = (KnobSupport("mode", default="long", values=("short", "long"), sets="letters that are read"),)
    questions = [VQAItem(str(n), np.zeros(1), "ab" if n % 2 else "a", ("ab" if n % 2 else "a",)) for n in range(40)]

    def set_knobs(self, configuration):
        return nullcontext()

    def first_stage(self, request, features=True):
        blocks = {"letters": np.array([len(request.question)], np.float32)}
        if not features:
            return FirstStage(request, {}, None, 0.0, 0.0)
        return FirstStage(request, blocks, None, 2.0, 0.0, lambda configuration: configuration["mode"] == "short")

    def answer(self, stages, configuration):
        short = configuration["mode"] == "short"
        ms = 3.0 if short else 5.0
        return [Answer(stage.request.question[: 1 if short else 9], ms, ms, 0.0, 1, 1, 1) for stage in stages]


class Mute(Echo):
    answer = property()


class Broken(Echo):
    def __init__(self):
        raise OSError("no weights")


class Silent(Echo):
    questions = []


a_number = 3


def raises(answer, right):
    raise KeyError(answer)


def twice(answer, right):
    return 2.0


def half(answer, right):
    return 0.5 if answer not in right else 1.0


def of_ticket(answer, right, item, strict=False):
    return float(answer == item.question and not strict)
'''


@pytest.fixture
def folder(home):
    Path("models_of_a_test.py").write_text(MODELS)


def served(model, profile, words):
    """Profile, train, serve; gives what the live run writes."""
    launch("profile", model, "out=out", profile)
    table = "profile=table profile.path=out/table.parquet profile.features=out/features.safetensors"
    launch("train", LEAN, table, "name=t")
    launch(STREAM, table, model, words)
    return read_json("live.json")


def test_a_first_look_goes_from_the_profile_into_what_is_served(folder):
    values = "knobs.values={mode:[short,long]} knobs.metric=exact"
    results = served(ECHO, values, "budgets_ms=[5.5]")
    rows = {row["policy"]: row for row in results["rows"]}
    # with the look "long" is late, without it is not; the answers to half of the questions are
    # short
    assert rows["most_accurate"]["accuracy"] == 1
    assert rows["most_accurate"]["latency_ms_mean"] == pytest.approx(5.0)
    assert rows["most_accurate"]["satisfaction"] == 1
    assert results["live"]["model"] == "echo"
    assert all(row["agrees"] for row in results["live"]["agreement"] if row["what"] == "accuracy")
    assert read_json("out/profile.json")["class"] == "models_of_a_test:Echo"


def test_code_that_changed_while_measuring_is_said(home, capsys):
    # no other test has imported it, from another folder
    source = Path("models_that_change.py")
    source.write_text(MODELS)
    measured = "knobs.values={mode:[short,long]} knobs.metric=exact out=out"

    def said(samples):
        launch("profile", "model=models_that_change:Echo", measured, f"knobs.samples={samples}")
        return [line for line in capsys.readouterr().err.splitlines() if "has changed" in line]

    assert said(10) == said(11) == []
    with source.open("a") as file:
        file.write("# no change of what it does, as far as anybody knows\n")
    (line,) = said(12)
    assert "models_that_change.py: has changed since the first of 66 measurements in out" in line
    assert len(said(12)) == 1
    # a folder of an earlier version does not tell
    note = read_json("out/state/run.json")
    del note["source_sha256"]
    Path("out/state/run.json").write_text(json.dumps(note))
    assert not said(13)


@pytest.mark.parametrize(
    ("images", "data", "knobs"),
    [
        (True, "questions.jsonl", "knobs.max_crops=[1,4]"),
        (False, "questions.csv", "knobs.top_k=[1,2]"),
    ],
)
def test_a_tiny_hugging_face_model_from_a_folder(images, data, knobs, folder, capsys):
    """A language model takes no images: neither its questions nor its features have any. A random
    model is never right, which is said, since a wrong metric looks the same."""
    for part in tiny_model("llava_next") if images else tiny_language_model():
        part.save_pretrained("model")
    names = [f"q{n}" for n in range(10)]
    rows = pl.DataFrame({"id": names, "question": names})
    if images:
        # questions about one picture would stay in one part of the split
        for name in names:
            picture(int(name[1:]), 64, 96).save(f"{name}.png")
        rows = rows.with_columns(image=pl.col("id") + ".png", answers=pl.lit(["a"]))
        rows.write_ndjson(data)
    else:
        rows.with_columns(answer=pl.lit("a")).write_csv(data)
    model = f"model=model data={data} device=cpu knobs.max_new_tokens=2"
    values = [knobs, "knobs.num_active_blocks=[2,4]", "knobs.repeats=1"]
    results = served(model, values, "stream.requests=4")
    assert {row["policy"] for row in results["rows"]} >= {"controller", "budget_aware_static"}
    features = {"language_features"} | ({"image_features"} if images else set())
    assert set(load_file("out/features.safetensors")) == features
    printed = capsys.readouterr().out
    assert "knobs.metric" in printed
    # what follows is a command
    (following,) = [line for line in printed.splitlines() if line.startswith("next:    knobwise t")]
    assert "profile.features=out/features.safetensors" in following


PROFILE = "profile out=out knobs.values={mode:[short,long]}"
ECHO = "model=models_of_a_test:Echo"
MISTAKES = {
    "model=nowhere:Echo": "nowhere",
    "model=models_of_a_test:Gone": "Gone",
    "model=models_of_a_test:a_number": "a_number",
    "model=models_of_a_test:": "module:name",
    "model=models_of_a_test:Broken": "OSError: no weights",
    "model=models_of_a_test:Mute": "answer",
    "model=models_of_a_test:Silent": "data=FILE",
    f"{ECHO} knobs.metric=models_of_a_test:raises": "KeyError: 'a'",
    f"{ECHO} knobs.metric=models_of_a_test:twice": "2.0",
    f"{ECHO} knobs.metric=models_of_a_test:gone": "gone",
    f"{ECHO} knobs.metric=sun": "knobs.metric='sun'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(words, folder, capsys):
    assert MISTAKES[words] in refused(words_of(PROFILE, words), capsys)


def test_a_metric_of_your_own(folder):
    launch(PROFILE, ECHO, "knobs.metric=models_of_a_test:half knobs.repeats=1")
    assert read_json("out/profile.json")["metrics"] == {"models_of_a_test:half": 40}


def test_a_metric_is_tried_with_right_answers_which_its_failure_says(folder, capsys):
    line = refused(words_of(PROFILE, ECHO, "knobs.metric=models_of_a_test:raises"), capsys)
    assert "trial" in line.partition("KeyError")[2]


def test_a_metric_that_needs_a_third_argument_gets_the_question(folder):
    launch(PROFILE, ECHO, "knobs.metric=models_of_a_test:of_ticket knobs.repeats=1")
    table = pl.read_parquet("out/table.parquet")
    means = dict(table.group_by("mode").agg(pl.mean("accuracy")).iter_rows())
    # the answers to half of the questions are too short
    assert means == {"short": 0.5, "long": 1.0}
