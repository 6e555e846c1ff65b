"""Visual questions from files, how their answers are compared, and features on disk: nothing
computed twice or lost."""

import io
import json

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.envs.readers.feature_files import read_features
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys, image_digests
from knobwise.profiling.measuring.questions import (
    VQAData,
    VQAItem,
    plain_answer,
    read_vqa_data,
    soft_accuracy,
)


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
    return {
        "id": number,
        "image": f"images/{image}.png",
        "question": f"Question {number}?",
        "answers": ["2"],
        **more,
    }


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
    annotated = {
        **row(3),
        "answers": [{"answer": "yes", "answer_id": 1}, {"answer": 3, "answer_id": 2}],
    }
    path = folder / "vqa.jsonl"
    path.write_text(
        json.dumps(other, ensure_ascii=False) + "\n" + json.dumps(annotated), encoding="utf-8"
    )
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
    data = read_vqa_data(
        written(folder / "q.json", [row(1)]), written(folder / "bank" / "b.json", bank)
    )
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
        (
            [row(1), {k: v for k, v in row(2).items() if k != "question"}],
            "row 2: has no question; it has id, image",
        ),
        ([row(1), row(2, "c")], r"row 2: no image file .*c\.png"),
        ([{**row(1), "image": None, "image_path": "x"}], r"row 1: no image file .*x"),
        ([{**row(1), "answers": []}], "row 1: has no answers or answer"),
        (
            [{**row(1), "answers": ["2", ""]}],
            "row 1: answers must be texts, and none of them empty",
        ),
        ([{**row(1), "answers": [["2"]]}], "row 1: answers must be texts"),
        (
            [row(1, choices=["3", "4"])],
            r"row 1: none of its choices \['3', '4'\] is one of its answers \['2'\]",
        ),
        ([{**row(1), "id": [1]}], "row 1: id must be a text or a whole number"),
        ({"queries": [row(1)]}, "must hold a list of items, or"),
        (
            {"queries": [row(1)], "bank": [row(1), {}]},
            r"bank, row 2: has no id or question_id; it has nothing",
        ),
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
    queries = (
        item("What color is it?", "red", "yellow", "red"),
        item("Is it?", "yes", choices=("no", "yes")),
    )
    data = VQAData(queries, tuple(bank))
    by_number = {
        2: "red yellow",
        3: "blue red yellow",
        4: "blue red yellow yes",
        9: "blue no red yellow yes",
    }
    assert {number: " ".join(data.candidates(0, number)) for number in by_number} == by_number
    assert data.candidates(1, 9) == ("no", "yes")


# -- features --------------------------------------------------------------------------------------


ITEMS = tuple(VQAItem(f"q{n}", png((n, 0, 0)), f"Question {n}?", ("yes",)) for n in range(5))


def keys_of(items, model="m"):
    return content_keys(image_digests(items), [item.question for item in items], model)


def take(item):
    n = int(item.id[1:])
    return {
        "image_features": np.float32([n, n + 0.25, -n]),
        "language_features": np.float32([0.1, n]),
    }


def collected(store, items=ITEMS, model="m", force=False):
    """Add the features that the store lacks, or all; return the keys of the items and the ids of
    those computed."""
    keys = keys_of(items, model)
    missing = [
        (key, item) for key, item in zip(keys, items, strict=True) if force or key not in store
    ]
    for key, item in missing:
        store.add(key, take(item), item.id)
    store.flush()
    return keys, [item.id for _, item in missing]


def test_the_file_is_a_feature_file_in_the_order_of_the_samples(tmp_path):
    store = FeatureStore(tmp_path / "parts", keys_of(ITEMS), chunk=2)
    keys, computed = collected(store)
    assert len(computed) == 5
    store.write(tmp_path / "f.safetensors", keys[::-1], [item.id for item in ITEMS[::-1]])
    found = read_features(tmp_path / "f.safetensors")
    assert found.sample_ids == ("q4", "q3", "q2", "q1", "q0")
    assert found.blocks["image_features"][1].tolist() == [3, 3.25, -3]
    assert found.blocks["language_features"].shape == (5, 2)
    assert found.blocks["language_features"][0, 0] == torch.tensor(0.1)


def test_what_was_added_before_a_kill_is_there_up_to_the_last_part(tmp_path):
    keys = keys_of(ITEMS)
    store = FeatureStore(tmp_path, keys, chunk=2)
    for key, item in zip(keys, ITEMS, strict=True):
        store.add(key, take(item), item.id)
    again = FeatureStore(tmp_path, keys, chunk=2)  # the first one was never flushed
    assert [key in again for key in keys] == [True] * 4 + [False]
    assert collected(again)[1] == ["q4"]
    assert all(key in FeatureStore(tmp_path, keys) for key in keys)


def test_what_a_kill_left_half_written_is_passed_over(tmp_path):
    keys = keys_of(ITEMS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ".000000-x1y2.safetensors").write_bytes(b"half")
    store = FeatureStore(tmp_path / "own", keys)
    store.add(keys[0], take(ITEMS[0]), "q0")
    store.flush()
    (tmp_path / "own" / ".000001-x1y2.safetensors").write_bytes(b"half")
    assert keys[0] in FeatureStore(tmp_path / "own", keys)
    assert keys[0] in FeatureStore(tmp_path / "other", keys, [tmp_path / "own"])
    assert keys[0] not in FeatureStore(
        tmp_path / "other", keys[1:], [tmp_path / "own"]
    )  # nobody asks for it


def test_only_what_changed_is_computed_again_and_all_with_force(tmp_path):
    def run(items, model="m", force=False):
        store = FeatureStore(
            tmp_path / "parts", keys_of(items, model), [tmp_path / "f.safetensors"]
        )
        keys, computed = collected(store, items, model, force)
        store.write(tmp_path / "f.safetensors", keys, [item.id for item in items])
        return computed

    assert len(run(ITEMS)) == 5
    assert run(ITEMS) == []
    assert run(ITEMS[::-1]) == []  # another order is no change
    changed = (
        VQAItem("q0", ITEMS[0].image, "Another question?", ("yes",)),
        VQAItem("q1", png((9, 9, 9)), ITEMS[1].question, ("yes",)),
        VQAItem("q2", ITEMS[2].image, ITEMS[2].question, ("another answer",)),
    )
    assert run(changed) == ["q0", "q1"]
    assert run(ITEMS, model="another") == [item.id for item in ITEMS]
    assert run(ITEMS, model="another", force=True) == [item.id for item in ITEMS]


def test_the_same_image_from_a_file_and_from_bytes_is_the_same_content(tmp_path):
    (tmp_path / "a.png").write_bytes(png("red"))
    of_file, of_bytes = (
        VQAItem("1", image, "?", ("a",)) for image in (tmp_path / "a.png", png("red"))
    )
    assert image_digests([of_file, of_file]) == image_digests([of_bytes, of_bytes])
    red, blue = (
        VQAItem("1", Image.new("RGB", (2, 3), colour), "?", ("a",)) for colour in ("red", "blue")
    )
    wide = VQAItem("1", Image.new("RGB", (3, 2), "red"), "?", ("a",))
    assert len(set(image_digests([of_file, red, blue, wide]))) == 4
    # the same indices into another palette are another picture
    palettes = [
        VQAItem("1", item.image.convert("P", palette=Image.Palette.ADAPTIVE), "?", ("a",))
        for item in (red, blue)
    ]
    assert palettes[0].image.tobytes() == palettes[1].image.tobytes()
    assert image_digests(palettes) == image_digests([red, blue])


def test_features_in_half_precision_are_taken_anew(tmp_path):
    keys = keys_of(ITEMS)
    words = {"key": json.dumps(keys)}
    save_file(
        {"image_features": torch.zeros(len(keys), 2, dtype=torch.float16)},
        tmp_path / "f.safetensors",
        words,
    )
    assert not any(
        key in FeatureStore(tmp_path / "new", keys, [tmp_path / "f.safetensors"]) for key in keys
    )


def test_mistakes_are_named(tmp_path):
    keys = keys_of(ITEMS)
    store = FeatureStore(tmp_path / "parts", keys)
    store.add(keys[0], take(ITEMS[0]), "q0")
    for features, message in (
        (
            {"image_features": np.zeros(4, np.float32)},
            r"sample q1: widths are \{'image_features': 4\}",
        ),
        ({"image_features": np.float32([np.nan])}, "sample q1: image_features are not all finite"),
        ({}, "there are none"),
    ):
        with pytest.raises(InputError, match=message):
            store.add(keys[1], features, "q1")
    with pytest.raises(InputError, match="no features for 4 samples, such as q1"):
        store.write(tmp_path / "f.safetensors", keys, [item.id for item in ITEMS])
    assert not (tmp_path / "f.safetensors").exists()
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"broken\.safetensors: cannot be read"):
        FeatureStore(tmp_path / "parts", keys, [tmp_path / "broken.safetensors"])
    with pytest.raises(InputError, match="cannot be read"):
        image_digests([VQAItem("1", tmp_path / "gone.png", "?", ("a",))])
