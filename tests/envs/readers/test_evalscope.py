"""Output folders of evalscope."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import identical, input_error

import knobwise

DATA = Path(__file__).parents[2] / "data/evalscope"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run(path, model="m", answers=4, repeats=1, time=1.0, metadata=None, config=None):
    """The output folder of one run on a data set, every other answer right."""
    predictions = []
    reviews = []
    for index in reversed(range(answers)):
        about = {"metadata": metadata(index // repeats)} if metadata else {}
        output = {"time": time + index, "usage": {"total_tokens": index}}
        predictions.append({"index": index, "model_output": output} | about)
        score = {"value": {"acc": float(index % 2)}, "main_score_name": "acc"}
        place = {"group_id": index // repeats, "generation_index": index % repeats}
        reviews.append({"index": index, "sample_score": {"score": score} | place})
    write(path / "predictions" / model / "d_default.jsonl", predictions)
    write(path / "reviews" / model / "d_default.jsonl", reviews)
    if config is not None:
        (path / "configs").mkdir()
        (path / "configs/task_config_1.yaml").write_text(json.dumps(config))
    return path


def test_right_reading_of_a_real_folder():
    made = knobwise.read(DATA, features="auto")
    assert (made.num_samples, made.num_repeats) == (24, 2)
    assert [made.label(k) for k in (0, 1)] == ["model=large", "model=small"]
    assert made.accuracy.nanmean(0).tolist() == pytest.approx([1.0, 10 / 24])
    assert made.latency_ms.nanmean(0).tolist() == pytest.approx([72, 53], abs=0.5)
    # one question of large failed both times
    identical(made.mask.sum(0), [23, 24])
    assert any("2 of 96 answers have no row (model=large: 2)" in note for note in made.notes)
    assert list(made.texts) == ["messages"]
    row = next(
        row for row in rows_of(DATA / "predictions/large/general_mcq_ex.jsonl") if row["index"] == 7
    )
    assert row["metadata"]["id"] == "k03"
    place = made.sample_ids.index("k03")
    times = made.measurements_ms[place, 0].tolist()
    assert times[1] == pytest.approx(row["model_output"]["time"] * 1000)


def test_right_reading_where_a_question_without_answer_failed():
    """The one that `large` has no row for counts as late and wrong, as in no score of evalscope."""
    made = knobwise.read(DATA, missing="failed")
    assert made.mask.all()
    assert made.accuracy.mean(0).tolist() == pytest.approx([23 / 24, 10 / 24])
    plain = knobwise.read(DATA)
    failed = ~plain.mask
    assert made.latency_ms[failed].tolist() == [plain.measurements_ms.nan_to_num().max()]
    identical(made.latency_ms[plain.mask], plain.latency_ms[plain.mask])
    assert made.latency_ms.mean(0).tolist() == pytest.approx([73.0, 53.2], abs=0.05)


def test_answers_of_a_sample_are_repeats_without_ids_too(tmp_path):
    for model in "ab":
        run(tmp_path, model, answers=12, repeats=3)
    made = knobwise.read(tmp_path)
    assert (made.num_samples, made.num_repeats) == (4, 3)
    identical(made.measurements_ms[1, 0], [4000.0, 5000.0, 6000.0])
    identical(made.accuracy[:2, 0], [1 / 3, 2 / 3])


def test_settings_of_several_runs_are_knobs(tmp_path):
    paths = [
        run(tmp_path / name, config={"generation_config": {"temperature": t, "seed": None}}, time=t)
        for name, t in (("x", 0.0), ("y", 1.0))
    ]
    made = knobwise.read(paths)
    (knob,) = made.knobs
    assert (knob.name, knob.values) == ("generation_config.temperature", (0, 1))
    assert made.mask.all()
    # and runs of equal settings are repeats
    again = knobwise.read(
        [*paths, run(tmp_path / "z", config={"generation_config": {"temperature": 1.0}})]
    )
    assert (again.num_configurations, again.num_repeats) == (2, 2)


def test_metadata_that_holds_answers_is_no_feature(tmp_path):
    for model in "ab":
        run(
            tmp_path,
            model,
            8,
            metadata=lambda n: {"kind": f"k{n % 3}", "answer": f"{n % 2}", "id": n},
        )
    made = knobwise.read(tmp_path, features="auto")
    assert [column.name for column in made.columns] == ["metadata.kind"]
    assert any("metadata.answer" in note for note in made.notes)


def test_answer_that_failed_or_has_no_score(tmp_path):
    for model in "ab":
        run(tmp_path, model)
    path = tmp_path / "predictions/a/d_default.jsonl"
    rows = rows_of(path)
    assert rows[0]["index"] == 3
    rows[0]["model_output"] |= {"error": "timeout", "time": None}
    write(path, rows)
    reviews = tmp_path / "reviews/b/d_default.jsonl"
    write(reviews, rows_of(reviews)[1:])
    made = knobwise.read(tmp_path)
    identical(made.mask, [[True, True]] * 3 + [[True, False]])
    identical(made.latency_ms[3, 0], 4004.0)
    identical(made.accuracy[3, 0], 0.0)


def test_damaged_folders_are_refused(tmp_path):
    shutil.copytree(DATA, tmp_path / "a")
    path = tmp_path / "a/predictions/small/general_mcq_ex.jsonl"
    whole = path.read_text()
    for content, words in ((whole[:-20], "not JSON lines"), ('{"id": 1}\n', "no index")):
        path.write_text(content)
        with input_error(f"general_mcq_ex.jsonl.*{words}"):
            knobwise.read(tmp_path / "a")
    for name in ("predictions", "reviews"):
        (tmp_path / "b" / name).mkdir(parents=True)
    with input_error("no answers"):
        knobwise.read(tmp_path / "b")
