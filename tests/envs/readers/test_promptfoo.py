"""Results of promptfoo."""

import gzip
import json
from pathlib import Path

import pytest
from helpers import identical, input_error

import knobwise
from knobwise.envs.readers.promptfoo import ERROR

DATA = Path(__file__).parents[2] / "data"
RESULTS = DATA / "promptfoo.jsonl.gz"


def results():
    return [json.loads(line) for line in gzip.open(RESULTS, "rt")]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def by_label(made, values):
    return {made.label(k): float(values[k]) for k in range(made.num_configurations)}


def test_right_reading_of_a_real_file():
    made = knobwise.read(RESULTS, features="auto")
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (24, 4, 1)
    assert [knob.name for knob in made.knobs] == ["model", "prompt"]
    assert made.sample_ids[:3] == ("0", "1", "2")
    accuracy = by_label(made, made.accuracy.mean(0))
    for label, share in accuracy.items():
        assert share == pytest.approx(5 / 6 if "model=large" in label else 2 / 3), label
    assert made.unit == "ms"
    assert list(made.texts) == ["vars.question"]
    small = next(k for k in range(4) if made.label(k) == "model=small prompt=Answer: {{question}}")
    first = results()[0]
    assert made.latency_ms[0, small] == first["latencyMs"]
    assert made.costs["cost"][0, small] == pytest.approx(first["cost"])


def test_failed_answers_are_wrong_and_late_and_have_no_price():
    failed = {
        (row["testIdx"], row["provider"]["label"])
        for row in results()
        if row["failureReason"] == ERROR
    }
    assert len(failed) == 4
    made = knobwise.read(RESULTS)
    slowest = max(row["latencyMs"] for row in results() if row["failureReason"] != ERROR)
    for test, provider in failed:
        row = made.sample_ids.index(str(test))
        cells = [k for k in range(4) if f"model={provider}" in made.label(k)]
        identical(made.accuracy[row, cells], [0.0, 0.0])
        assert made.latency_ms[row, cells].tolist() == pytest.approx([1.001 * slowest] * 2)
        assert made.costs["cost"][row, cells].isnan().all()
    assert any("8 of 96 answers failed" in note for note in made.notes)


@pytest.mark.parametrize("written", [0, None])
def test_model_without_a_known_price_is_not_free(tmp_path, written):
    """promptfoo writes 0 for it; what a provider says costs 0 does."""
    rows = results()
    for row in rows:
        if row["failureReason"] == ERROR:
            continue
        if row["provider"]["label"] == "large":
            row["cost"] = written
            del row["response"]["cost"]
        elif row["testIdx"] == 0:
            row["cost"] = row["response"]["cost"] = 0
    path = write(tmp_path / "r.jsonl", rows)
    made = knobwise.read(path)
    large = [k for k in range(4) if "model=large" in made.label(k)]
    small = [k for k in range(4) if "model=small" in made.label(k)]
    assert made.costs["cost"][:, large].isnan().all()
    identical(made.costs["cost"][0, small], [0.0, 0.0])
    (note,) = [note for note in made.notes if "no price" in note]
    answered = sum(
        row["provider"]["label"] == "large" and row["failureReason"] != ERROR for row in rows
    )
    assert note.startswith(f"{answered} answers have no price (model=large")
    # where the price is the budget, cells without one are no measurements
    budgeted = knobwise.read(path, latency="cost")
    for k, label in enumerate(map(budgeted.label, range(budgeted.num_configurations))):
        if "model=small" in label:
            assert budgeted.mask[0, k], label
    assert not any("no price" in note for note in knobwise.read(RESULTS).notes)


def test_budget_by_price():
    made = knobwise.read(RESULTS, latency="cost")
    assert made.unit == "USD"
    assert not made.costs
    dearest = max(row["cost"] or 0 for row in results())
    assert made.latency_ms.max() == pytest.approx(1.001 * dearest)


def test_document_of_an_evaluation_holds_the_same(tmp_path):
    document = {
        "evalId": "eval-x",
        "results": {"version": 3, "prompts": [{"raw": "a"}], "results": results()},
    }
    (tmp_path / "r.json").write_text(json.dumps(document))
    made = knobwise.read(tmp_path / "r.json")
    lines = knobwise.read(RESULTS)
    identical(made.accuracy, lines.accuracy)
    identical(made.latency_ms, lines.latency_ms)


def test_repeats_of_a_test_are_repeats(tmp_path):
    """`--repeat 2` numbers the tests 0 to 47; each two are one."""
    rows = []
    for row in results():
        for repeat in (0, 1):
            times = {"latencyMs": row["latencyMs"] + repeat}
            rows.append(row | times | {"testIdx": 2 * row["testIdx"] + repeat})
    made = knobwise.read(write(tmp_path / "r.jsonl", rows))
    assert (made.num_samples, made.num_repeats) == (24, 2)
    assert made.sample_ids[:3] == ("0", "2", "4")
    # two files hold the repeats of one, and are stacked
    parts = [write(tmp_path / f"{part}.jsonl", results()) for part in "ab"]
    stacked = knobwise.read(parts)
    assert (stacked.num_samples, stacked.num_repeats) == (24, 2)
    identical(stacked.accuracy, made.accuracy)


def test_other_tests_of_another_file_are_other_samples(tmp_path):
    rows = results()
    other = json.loads(json.dumps(rows).replace(" = ?", " is ?"))
    made = knobwise.read([write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", other)])
    assert made.num_samples == 48
    assert made.mask.all()


def test_cached_answers_are_copies(tmp_path):
    rows = results()
    for row in rows[:4]:
        row["response"]["cached"] = True
    made = knobwise.read(write(tmp_path / "r.jsonl", rows))
    assert int(made.mask.sum()) == 92
    assert any("4 answers came from promptfoo's cache" in note for note in made.notes)
    for row in rows:
        row["response"] = {"cached": True}
    with input_error("all 96 answers.*--no-cache"):
        knobwise.read(write(tmp_path / "r.jsonl", rows))


def test_answers_that_a_rate_limit_held_are_named(tmp_path):
    rows = results()
    for row in rows[:4:2]:
        row["latencyMs"] += 60_000
    made = knobwise.read(write(tmp_path / "r.jsonl", rows))
    note = next(note for note in made.notes if "rate limit" in note)
    assert note.startswith("2 answers")
    assert "model=small" in note
    assert not any("rate limit" in note for note in knobwise.read(RESULTS).notes)


def test_providers_without_labels_are_told_apart(tmp_path):
    """Two providers of one id differ in options that the file does not hold."""
    rows = results()
    for row in rows:
        row["provider"] = {"id": "openai:x", "label": ""}
    made = knobwise.read(write(tmp_path / "r.jsonl", rows))
    assert made.num_configurations == 4
    assert made.mask.all()
    assert any("told apart by promptIdx" in note for note in made.notes)


def test_variables_that_hold_answers_are_no_features(tmp_path):
    rows = results()
    for row in rows:
        row["vars"] |= {"expected": row["testIdx"] % 3, "n": row["testIdx"] % 5}
    made = knobwise.read(write(tmp_path / "r.jsonl", rows), features="auto")
    assert [column.name for column in made.columns] == ["vars.n"]
    assert any("vars.expected" in note for note in made.notes)


def test_columns_that_the_user_names_go_first():
    made = knobwise.read(RESULTS, id="vars.question", knobs=["promptIdx"], accuracy="success")
    assert (made.num_samples, made.num_configurations) == (24, 4)
    assert "1 + 1 = ?" in made.sample_ids
    with input_error("no column speed.*latencyMs"):
        knobwise.read(RESULTS, latency="speed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[3].pop("latencyMs"), ("result 4", "latencyMs")),
        (lambda rows: rows.__setitem__(5, [1]), ("result 6",)),
    ],
)
def test_damaged_results_are_refused(tmp_path, change, words):
    rows = results()
    change(rows)
    with input_error(".*".join(words)):
        knobwise.read(write(tmp_path / "r.jsonl", rows))
