"""Visual questions from files: four formats, how answers are compared, and everything about a row that can be wrong."""

import io
import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.questions import VQAData, VQAItem, plain_answer, read_vqa_data, soft_accuracy


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / "images" / f"{name}.png").write_bytes(png(colour))
    return tmp_path


def row(number, image="a", **more):
    return {"id": number, "image": f"images/{image}.png", "question": f"Question {number}?", "answers": ["2"], **more}


def written(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    elif path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    else:
        pl.DataFrame(rows).with_columns(pl.col("answers").list.first()).write_csv(path)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
def test_every_format_gives_the_same_items(folder, suffix):
    data = read_vqa_data(written(folder / f"vqa{suffix}", [row(7), row(8, "b")]))
    assert data.queries == data.bank
    found = [(item.id, item.question, item.answers) for item in data.queries]
    assert found == [("7", "Question 7?", ("2",)), ("8", "Question 8?", ("2",))]
    assert len({item.image_id for item in data.queries}) == 2
    assert [item.picture().getpixel((0, 0)) for item in data.queries] == [(255, 0, 0), (0, 0, 255)]


def test_queries_and_bank_stand_in_one_file_or_in_two(folder):
    queries, bank = [row(1, image_id=5, choices=["2", "3"])], [row(1, image_id=6), row(2, "b")]
    one = read_vqa_data(written(folder / "both.json", {"queries": queries, "bank": bank}))
    two = read_vqa_data(written(folder / "q.jsonl", queries), bank=written(folder / "b.json", bank))
    assert one == two
    assert (len(one.queries), len(one.bank)) == (1, 2)
    assert [item.image_id for item in (*one.queries, one.bank[0])] == ["5", "6"]
    assert one.queries[0].choices == ("2", "3")


def test_other_spellings_of_a_row(folder):
    other = {"question_id": "q", "image_path": str(folder / "images" / "b.png")}
    other |= {"question": "?", "answer": "two\u2028x"}
    annotated = {**row(3), "answers": [{"answer": "yes", "answer_id": 1}, {"answer": 3, "answer_id": 2}]}
    path = folder / "vqa.jsonl"
    path.write_text(json.dumps(other, ensure_ascii=False) + "\n" + json.dumps(annotated), encoding="utf-8")
    first, second = read_vqa_data(path).queries
    assert (first.id, first.answers, second.answers) == ("q", ("two\u2028x",), ("yes", "3"))


def test_images_in_parquet_files_of_hugging_face_datasets(folder):
    rows = [{**row(1), "image": {"bytes": png("lime"), "path": None}, "image_id": 4}]
    (item,) = read_vqa_data(written(folder / "vqa.parquet", rows)).queries
    assert item.picture().getpixel((1, 1)) == (0, 255, 0)
    assert item.image_id == "4"


def test_one_image_is_known_again_without_an_image_id(folder):
    (folder / "bank").mkdir()
    bank = [{**row(1), "image": "../images/a.png"}, {**row(2), "image": "../images/b.png"}]
    data = read_vqa_data(written(folder / "q.json", [row(1)]), written(folder / "bank" / "b.json", bank))
    assert [item.image_id == data.queries[0].image_id for item in data.bank] == [True, False]
    pictures = [{**row(n), "image": png(colour)} for n, colour in enumerate(("red", "blue", "red"))]
    first, second, third = read_vqa_data(written(folder / "vqa.parquet", pictures)).queries
    assert first.image_id == third.image_id != second.image_id


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no items"),
        (["text"], "row 1: must be an object"),
        ([row(1), row(1)], "row 2: the id '1' occurs twice"),
        ([row(1), {k: v for k, v in row(2).items() if k != "question"}], "row 2: has no question; it has id, image"),
        ([row(1), row(2, "c")], r"row 2: no image file .*c\.png"),
        ([{**row(1), "image": None, "image_path": "x"}], r"row 1: no image file .*x"),
        ([{**row(1), "answers": []}], "row 1: has no answers or answer"),
        ([{**row(1), "answers": ["2", ""]}], "row 1: answers must be texts, and none of them empty"),
        ([{**row(1), "answers": [["2"]]}], "row 1: answers must be texts"),
        ([row(1, choices=["3", "4"])], r"row 1: none of its choices \['3', '4'\] is one of its answers \['2'\]"),
        ([{**row(1), "id": [1]}], "row 1: id must be a text or a whole number"),
        ({"queries": [row(1)]}, "must hold a list of items, or"),
        ({"queries": [row(1)], "bank": [row(1), {}]}, r"bank, row 2: has no id or question_id; it has nothing"),
        ({"queries": [row(1)], "bank": []}, r"holds no items \(bank\)"),
        (3, "must hold a list of items"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_row(folder, rows, message):
    with pytest.raises(InputError, match=rf"vqa\.json.*{message}"):
        read_vqa_data(written(folder / "vqa.json", rows))


def test_files_that_cannot_be_read(folder):
    for name, text, message in (
        ("gone.jsonl", None, "gone.jsonl: no such file"),
        ("gone.parquet", None, "gone.parquet: no such file"),
        ("broken.jsonl", '{"id": 1}\n{"id"', "broken.jsonl, row 2: is not JSON"),
        ("broken.json", "[", "broken.json: is not JSON"),
        ("vqa.txt", "x", "vqa.txt: not a table"),
    ):
        if text is not None:
            (folder / name).write_text(text)
        with pytest.raises(InputError, match=message):
            read_vqa_data(folder / name)
    both = written(folder / "both.json", {"queries": [row(1)], "bank": [row(2)]})
    for queries, bank in ((both, both), (written(folder / "q.json", [row(1)]), both)):
        with pytest.raises(InputError, match=r"both\.json: .* queries and a bank"):
            read_vqa_data(queries, bank)


def test_an_image_that_cannot_be_read(folder):
    (folder / "images" / "a.png").write_text("not an image")
    (item,) = read_vqa_data(written(folder / "vqa.json", [row(1)])).queries
    with pytest.raises(InputError, match=r"image of item '1' cannot be read: .*a\.png"):
        item.picture()
    with pytest.raises(InputError, match="image of item 'x' cannot be read: its bytes"):
        VQAItem("x", b"", "?", ("yes",)).picture()


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("Two", "2"), ("the red  car.", "red car"), ("1,000", "1000"), ("3.5", "3.5"), ("it's", "its"),
        ("A", "a"), ("?!", "?!"), ("anthem", "anthem"),
    ],
)  # fmt: skip
def test_answers_are_compared_without_case_articles_and_punctuation(answer, plain):
    assert plain_answer(answer) == plain


@given(st.text(max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_plain_answer_stays_as_it_is_and_agrees_with_itself(answer):
    assert plain_answer(plain_answer(answer)) == plain_answer(answer)
    assert soft_accuracy(answer, [answer]) == 1


@pytest.mark.parametrize(
    ("answer", "references", "accuracy"),
    [
        ("red", ["red"] * 2 + ["blue"] * 8, 2 / 3),
        ("The red", ["red"] * 2 + ["Red!"] + ["blue"] * 7, 1),
        ("blue", ["red"] * 9 + ["blue"], 1 / 3), ("green", ["red"] * 10, 0), ("red", ["red"], 1),
        ("blue", ["red"], 0), ("blue", ["red", "blue"], 1 / 2),
    ],
)  # fmt: skip
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
        *[item(f"Is it {n}?", "yes") for n in range(5)],
        *[item(f"Is it not {n}?", "no") for n in range(3)],
    ]
    queries = item("What color is it?", "red", "yellow", "red"), item("Is it?", "yes", choices=("no", "yes"))
    data = VQAData(queries, tuple(bank))
    by_number = {2: "red yellow", 3: "blue red yellow", 4: "blue red yellow yes", 9: "blue no red yellow yes"}
    assert {number: " ".join(data.candidates(0, number)) for number in by_number} == by_number
    assert data.candidates(1, 9) == ("no", "yes")
