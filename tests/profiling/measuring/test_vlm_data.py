"""Visual questions from files, how their answers are compared, and features on disk: nothing
computed twice or lost."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import close, input_error
from PIL import Image

from knobwise.envs.readers.feature_files import read_features
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys
from knobwise.profiling.measuring.questions import (
    VQAData,
    VQAItem,
    read_vqa_data,
    soft_accuracy,
)


@pytest.fixture
def folder(tmp_path):
    for name, colour in {"a": "red", "b": "blue"}.items():
        Image.new("RGB", (4, 3), colour).save(tmp_path / f"{name}.png")
    return tmp_path


def row(name, image="a.png", **more):
    known = {"id": name, "image": image, "question": f"Question {name}?", "answers": ["2"]}
    return known | more


def written(path, rows):
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("kind", ["json", "ndjson", "parquet", "csv"])
def test_every_format_gives_the_same_items(folder, kind):
    rows = pl.DataFrame([row(7), row(8, "b.png")])
    if kind == "csv":
        rows = rows.explode("answers")
    path = folder / f"vqa.{kind}"
    getattr(rows, f"write_{kind}")(path)
    data = read_vqa_data(path)
    assert data.queries == data.bank
    assert len({item.image_id for item in data.queries}) == 2
    for item, name, pixel in zip(data.queries, "78", ((255, 0, 0), (0, 0, 255)), strict=True):
        assert (item.id, item.question, item.answers) == (name, f"Question {name}?", ("2",))
        assert item.picture().getpixel((0, 0)) == pixel


def test_queries_and_bank_stand_in_one_file_or_in_two(folder):
    query = row(1, image_id=5, choices=["2", "3"], question_type="x")
    bank = [row(3, image_id=6), row(2, "b.png", image_id=7)]
    parts = [query | {"part": "query"}, *(item | {"part": "demonstration"} for item in bank)]
    one = read_vqa_data(written(folder / "both.json", parts))
    two = read_vqa_data(written(folder / "q.json", [query]), written(folder / "b.json", bank))
    assert one == two
    (first,) = one.queries
    assert (first.image_id, first.choices, first.question_type) == ("5", ("2", "3"), "x")
    assert [item.image_id for item in one.bank] == ["6", "7"]
    with input_error("both.json"):
        read_vqa_data(folder / "both.json", folder / "b.json")


def test_questions_that_differ_in_case_or_blanks_alone_count_as_one_image(folder):
    """Without pictures a question is its image: a twin in the pool would give the answer away."""
    questions = ["What is 2 + 2?", " what IS  2 + 2?", "What is 2 + 3?", "Straße?", "STRASSE?"]
    rows = [{"id": i, "question": text, "answer": "4"} for i, text in enumerate(questions)]
    data = read_vqa_data(written(folder / "twins.json", rows), images=False)
    assert [item.question for item in data.queries] == questions
    first, twin, other, *streets = (item.image_id for item in data.queries)
    assert first == twin != other
    assert len({*streets}) == 1


def test_other_spellings_of_a_row(folder):
    path = str(folder / "b.png")
    other = {"question_id": "q", "image_path": path, "question": "?", "answer": "two\u2028x"}
    annotated = row(3) | {"answers": [{"answer": "yes", "answer_id": 1}, {"answer": "3"}]}
    lines = [json.dumps(other, ensure_ascii=False), json.dumps(annotated)]
    (folder / "vqa.jsonl").write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    first, second = read_vqa_data(folder / "vqa.jsonl").queries
    assert (first.id, first.answers, second.answers) == ("q", ("two\u2028x",), ("yes", "3"))


def test_whole_numbers_stay_whole_beside_fractions(folder):
    rows = [row(1, answers=3), row(2, answers=4.5), row(3, answers=-0.0)]
    data = read_vqa_data(written(folder / "vqa.json", rows))
    assert [item.answers for item in data.queries] == [("3",), ("4.5",), ("0",)]
    chosen = row(1, answers=[2.0], choices=[2.0, 2.5])
    (item,) = read_vqa_data(written(folder / "vqa.json", [chosen])).queries
    assert (item.answers, item.choices) == (("2",), ("2", "2.5"))


def test_one_image_is_known_again_without_an_image_id(folder):
    (folder / "bank").mkdir()
    bank = written(folder / "bank" / "b.json", [row(1, "../a.png"), row(2, "../b.png")])
    data = read_vqa_data(written(folder / "q.json", [row(1)]), bank)
    assert [item.image_id == data.queries[0].image_id for item in data.bank] == [True, False]
    # as data sets of Hugging Face hold images
    images = [(folder / f"{name}.png").read_bytes() for name in "bab"]
    rows = [row(n, {"bytes": image, "path": None}) for n, image in enumerate(images)]
    pl.DataFrame(rows).write_parquet(folder / "vqa.parquet")
    first, second, third = read_vqa_data(folder / "vqa.parquet").queries
    assert first.image_id == third.image_id != second.image_id
    assert first.picture().getpixel((1, 1)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([], "no items"),
        (["text"], "row 1"),
        ([row(1), row(1)], "row 2: .*'1'"),
        ([row(1), row(2, question=None)], "row 2: .*question"),
        ([row(1), row(2, "c.png")], r"row 2: .*c\.png"),
        ([row(1, None, image_path="x")], "row 1: .*x"),
        ([row(1, "c" * 5000)], "row 1: .*ccc"),
        ([row(1, "c\0")], "row 1: "),
        ([row(1, answers=["2", ""])], "row 1: answers"),
        ([row(1, answers=[["2"]])], "row 1: answers"),
        ([row(1, choices=["3", "4"])], "row 1: .*choices"),
        ([row([1])], "row 1: id"),
        (3, "json"),
        ([row(1), row(2, answers="2")], "json"),
        ([row(1, part="query"), row(2, part="demonstration"), row(3, part="")], "part is ''"),
        ([row(1, part="query"), row(2, part="demonstration"), row(3)], "part is None"),
        ([row(1, part="query")], "demonstration"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_row(folder, rows, fault):
    with input_error(f"vqa.json.*{fault}"):
        read_vqa_data(written(folder / "vqa.json", rows))


@pytest.mark.parametrize(
    "name", ["gone.jsonl", "gone.parquet", "broken.jsonl", "broken.json", "broken.txt"]
)
def test_files_that_cannot_be_read(folder, name):
    if "broken" in name:
        (folder / name).write_text('{"id": 1}\n{"id"')
    with input_error(f"{name}: "):
        read_vqa_data(folder / name)


def test_an_image_that_cannot_be_read(folder):
    (folder / "a.png").write_text("not an image")
    (item,) = read_vqa_data(written(folder / "vqa.json", [row(1)])).queries
    for wrong, fault in ((item, r"'1'.*a\.png"), (VQAItem("x", b"", "?", ("yes",)), "'x'")):
        with input_error(fault):
            wrong.picture()


@pytest.mark.parametrize(
    ("answer", "references", "accuracy"),
    [
        ("The red", ["red"] * 2 + ["Red!"] + ["blue"] * 7, 1),
        ("blue", ["red"] * 9 + ["blue"], 1 / 3),
        ("blue", ["red", "blue"], 1 / 2),
    ],
)
def test_soft_accuracy_counts_up_to_three(answer, references, accuracy):
    assert soft_accuracy(answer, references) == pytest.approx(accuracy)


def item(question, *answers, **more):
    return VQAItem(question, b"", question, answers, **more)


def test_a_demonstration_shows_the_most_common_answer_and_its_picture_in_rgb():
    assert item("?", "cat", "Dog", "dog.", "the cat", "dog").answer == "Dog"
    assert item("?", "b", "a").answer == "b"
    grey = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    assert VQAItem("x", grey, "?", ("yes",)).picture().mode == "RGB"


def test_candidates_are_the_references_then_the_answers_to_alike_questions_then_others():
    bank = [
        item("What color is the sky?", "blue"),
        item("what color is the sun?", "yellow"),
        item("What color is the sea?", "Blue"),
        *[item(f"Is it {n}?", "yes" if n < 5 else "no") for n in range(8)],
    ]
    query = item("What color is it?", "red", "yellow", "red")
    data = VQAData((query, replace(query, choices=("no", "red"))), tuple(bank))
    assert [" ".join(data.candidates(0, most)) for most in (2, 3, 4, 9)] == [
        "red yellow",
        "blue red yellow",
        "blue red yellow yes",
        "blue no red yellow yes",
    ]
    assert data.candidates(1, 9) == ("no", "red")


# -- features --------------------------------------------------------------------------------------


def test_the_file_is_a_feature_file_in_the_order_of_the_samples(tmp_path):
    store = FeatureStore(tmp_path / "parts")
    for n, key in enumerate("abc"):
        blocks = {"image_features": [n, n + 0.25, -n], "language_features": [0.1, n]}
        store.add(key, blocks, "?")
    store.write(tmp_path / "f.safetensors", ["c", "a", "b"], ["q2", "q0", "q1"])
    ids, blocks, *_ = read_features(tmp_path / "f.safetensors")
    assert ids == ("q2", "q0", "q1")
    close(blocks["image_features"], [[2, 2.25, -2], [0, 0.25, 0], [1, 1.25, -1]])
    close(blocks["language_features"], [[0.1, 2], [0.1, 0], [0.1, 1]])


def test_the_same_pixels_are_the_same_content_whatever_holds_them(folder):
    def key(image):
        return content_keys([VQAItem("1", image, "?", ("a",))], "?")[0]

    path = folder / "a.png"
    red, blue = Image.open(path), Image.open(folder / "b.png")
    pixels = np.array(red)
    for held in (path, path.read_bytes(), pixels, torch.from_numpy(pixels)):
        assert key(held) == key(red)
    others = (red, blue, red.resize((3, 4)), pixels / 255, torch.zeros(3), None)
    assert len(set(map(key, others))) == len(others)
    # the same indices into another palette are another picture
    palettes = [image.convert("P", palette=Image.Palette.ADAPTIVE) for image in (red, blue)]
    assert palettes[0].tobytes() == palettes[1].tobytes()
    assert list(map(key, palettes)) == [key(red), key(blue)]
    with input_error("object"):
        key(object())
    with input_error("gone"):
        key(folder / "gone.png")


@pytest.mark.parametrize("features", [{"image_features": [np.nan]}, {}])
def test_features_that_are_missing_or_not_finite_are_refused(tmp_path, features):
    with input_error("q1"):
        FeatureStore(tmp_path).add("a", features, "q1")


@pytest.mark.parametrize("name", ["image_features", "other"])
def test_features_of_other_names_or_widths_are_refused(tmp_path, name):
    store = FeatureStore(tmp_path / "parts")
    store.add("a", {"image_features": np.zeros(3)}, "q0")
    store.add("b", {name: np.zeros(4)}, "q1")
    with input_error("names or widths"):
        store.write(tmp_path / "f.safetensors", ["a", "b"], ["q0", "q1"])
    assert not (tmp_path / "f.safetensors").exists()
