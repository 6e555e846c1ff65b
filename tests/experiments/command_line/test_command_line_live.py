"""`knobwise profile`, `train` and `evaluate live=true` with models that are not built in."""

from pathlib import Path

import polars as pl
import pytest
from commands import OPTIMISER, launch, read_json, refused, words_of
from safetensors.torch import load_file
from tiny_models import picture, tiny_language_model, tiny_model

from knobwise.__main__ import main
from knobwise.experiments.deploy import live

ROOT = Path(__file__).parents[3]
LEAN = words_of(
    OPTIMISER, "optimiser.iterations=4 policy=utility policy.members=2 baselines=false", "seeds=[0]"
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
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "WARM_UP", 1)
    Path("models_of_a_test.py").write_text(MODELS)
    Path("examples").symlink_to(ROOT / "examples")
    return tmp_path


def served(model, profile, words):
    """Profile, train, serve; gives what the live run writes."""
    launch("profile", model, "out=out", profile)
    table = words_of(
        "profile=table profile.path=out/table.parquet", "profile.features=out/features.safetensors"
    )
    launch("train", LEAN, table, "name=t")
    launch(STREAM, table, model, words)
    return read_json("live.json")


def test_the_example_of_a_model_of_your_own(folder):
    source = (ROOT / "examples" / "own_model.py").read_text()
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 60
    model = ["model=examples.own_model:DigitForest"]
    values = words_of(
        ["knobs.values={trees: [2, 20]}"], "knobs.samples=30 knobs.repeats=1 knobs.clock=cpu"
    )
    results = served(model, values, ["stream.clock=cpu"])
    assert results["model"] == "digit-forest"
    assert all(row["agrees"] for row in results["agreement"] if row["what"] == "accuracy")


def test_a_first_look_goes_from_the_profile_into_what_is_served(folder):
    model = ["model=models_of_a_test:Echo"]
    results = served(
        model, ["knobs.values={mode: [short, long]}", "knobs.metric=exact"], ["budgets_ms=[5.5]"]
    )
    rows = {row["policy"]: row for row in results["rows"]}
    # with the look "long" is late, without it is not; the answers to half of the questions are
    # short
    assert rows["most_accurate"]["accuracy"] == 1
    assert rows["most_accurate"]["latency_ms"] == pytest.approx(5.0)
    assert rows["most_accurate"]["satisfaction"] == 1
    facts = read_json("out/profile.json")
    assert facts["class"] == "models_of_a_test:Echo"


@pytest.mark.parametrize(
    ("blocks", "data", "knobs"),
    [
        ({"image_features", "language_features"}, "questions.jsonl", "knobs.max_crops=[1,4]"),
        ({"language_features"}, "questions.csv", "knobs.top_k=[1,2]"),
    ],
)
def test_a_tiny_hugging_face_model_from_a_folder(blocks, data, knobs, folder, capsys):
    """A language model takes no images: neither its questions nor its features have any. A random
    model is never right, which is said, since a wrong metric looks the same."""
    sees = "image_features" in blocks
    for part in tiny_model("llava_next") if sees else tiny_language_model():
        part.save_pretrained("model")
    rows = []
    for n in range(10):
        rows.append({"id": f"q{n}", "question": f"What is {n}?", "answers": ["a"]})
        if sees:
            picture(n, 64, 96).save(f"{n}.png")
            rows[-1]["image"] = f"{n}.png"
    questions = pl.DataFrame(rows)
    if sees:
        questions.write_ndjson(data)
    else:
        questions.explode("answers").rename({"answers": "answer"}).write_csv(data)
    model = words_of(f"model=model data={data} device=cpu knobs.max_new_tokens=2")
    values = words_of(knobs, "knobs.num_active_blocks=[2,4] knobs.repeats=1")
    results = served(model, values, ["stream.requests=4"])
    assert {row["policy"] for row in results["rows"]} >= {"controller", "budget_aware_static"}
    assert set(load_file("out/features.safetensors")) == blocks
    printed = capsys.readouterr().out
    assert "knobs.metric" in printed
    # what follows is a command
    (following,) = [line for line in printed.splitlines() if line.startswith("next:    knobwise t")]
    assert "profile.features=out/features.safetensors" in following


PROFILE = words_of("profile out=out", ["knobs.values={mode: [short, long]}"])
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
    assert MISTAKES[words] in refused([*PROFILE, *words.split()], capsys)


def test_a_metric_of_your_own(folder):
    assert main([*PROFILE, ECHO, "knobs.metric=models_of_a_test:half", "knobs.repeats=1"]) == 0
    facts = read_json("out/profile.json")
    assert facts["metrics"] == {"models_of_a_test:half": 40}


def test_options_of_live_are_all_refused_without_it(folder, capsys):
    line = "data=a.jsonl dtype=float32 device=cpu importance=a.json model=models_of_a_test:Echo"
    for word in line.split():
        name = word.partition("=")[0]
        assert f"{name}: is for live=true" in refused(["evaluate", word], capsys)
