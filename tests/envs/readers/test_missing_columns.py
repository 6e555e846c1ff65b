"""Tables that lack a column which they need, and the options that would read them."""

import json
import random

import polars as pl
import pytest
from commands import refused, words_of
from helpers import identical, input_error

import knobwise

HYPERFINE = {
    "command": "sort a",
    "mean": 0.1,
    "stddev": 0.01,
    "median": 0.1,
    "min": 0.09,
    "max": 0.2,
}
STATS = {"min": 0.1, "max": 0.3, "mean": 0.2, "rounds": 2, "data": [0.1, 0.3]}
ROUTED = ["gpt-4-1106-preview", "mistralai/Mixtral-8x7B-Instruct-v0.1"]


def write(path, rows):
    if path.suffix == ".csv":
        pl.DataFrame(rows).write_csv(path)
    else:
        path.write_text(json.dumps(rows))
    return path


# -- times alone -----------------------------------------------------------------------------------

TIMES = {
    "hyperfine.csv": [HYPERFINE | {"parameter_n": n} for n in range(4)],
    "hyperfine.json": {
        "results": [
            HYPERFINE | {"times": [0.1, 0.2], "exit_codes": [0, 0], "parameters": {"n": str(n)}}
            for n in range(4)
        ]
    },
    "pytest_benchmark.json": {
        "machine_info": {"node": "host"},
        "benchmarks": [
            {"name": f"test[{n}]", "params": {"n": n}, "extra_info": {}, "stats": STATS}
            for n in range(4)
        ],
    },
    "pyperf.json": {
        "benchmarks": [
            {
                "metadata": {"name": name},
                "runs": [
                    {"metadata": {"loops": 4}, "warmups": [[1, 0.2], [2, 0.1]]},
                    {"metadata": {"date": "2026-01-31"}, "values": [0.1, 0.1]},
                ],
            }
            for name in ("a", "b")
        ],
        "version": "1.0",
    },
}


@pytest.mark.parametrize("name", TIMES)
def test_times_alone_want_scores(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, TIMES[name])
    line = refused(words_of(f"inspect profile=table profile.path={name}"), capsys)
    assert line.startswith(f"knobwise: {name}: ")
    for word in ("accuracy", "times alone", "profile.path=["):
        assert word in line


def test_the_advice_for_times_alone_is_what_reads_them(tmp_path):
    rows = [{"id": n, "mode": m, "seconds": n + 1.0} for n in range(4) for m in ("fast", "full")]
    with input_error("times alone"):
        knobwise.read(write(tmp_path / "t.csv", rows), id="id", latency="seconds", unit="s")
    given = write(tmp_path / "u.csv", [row | {"accuracy": 1} for row in rows])
    made = knobwise.read(given, id="id", latency="seconds", unit="s")
    assert (made.accuracy == 1).all()
    scores = [{name: row[name] for name in ("id", "mode")} | {"accuracy": 0.5} for row in rows]
    paths = [write(tmp_path / "s.csv", scores), tmp_path / "t.csv"]
    made = knobwise.read(paths, id="id", latency="seconds", unit="s")
    identical(made.latency_ms[2], [3000.0, 3000.0])


# -- a column for each model -----------------------------------------------------------------------


def answers(truths=False, **more):
    """Whether each of two models is right about 30 prompts."""
    draw = random.Random(0)
    rows = []
    for n in range(30):
        right = [draw.random() < share for share in (0.9, 0.6)]
        values = right if truths else map(int, right)
        rows.append({"prompt": f"what is {n}", **dict(zip(ROUTED, values, strict=True)), **more})
    return rows


@pytest.mark.parametrize("truths", [False, True])
def test_columns_of_models_are_named(truths, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = answers(truths, source="gsm8k", length=3)
    path = write(tmp_path / "routed.csv", rows)
    line = refused(words_of("inspect profile=table profile.path=routed.csv"), capsys)
    assert line.startswith("knobwise: routed.csv: ")
    wide = f"profile.wide=[{','.join(ROUTED)}]"
    assert wide in line
    assert "profile.wide_latency=[" in line
    words = ["inspect", "profile=table", "profile.path=routed.csv", wide]
    refused(words, capsys)
    made = knobwise.read(path, wide=ROUTED, wide_latency=[24.7, 0.24], unit="USD")
    share = sum(row[ROUTED[1]] for row in rows) / 30
    assert made.accuracy.mean(0).min().item() == pytest.approx(share)


def test_columns_of_prices_are_named_beside_those_of_models(tmp_path):
    costs = {f"{name}|total_cost": 0.01 for name in ROUTED} | {f"{ROUTED[0]}|answer": "x"}
    path = write(tmp_path / "t.csv", answers(**costs))
    listed = ",".join(f"{name}|total_cost" for name in ROUTED).replace("|", r"\|")
    with input_error(rf"profile.wide_latency=\[{listed}\]"):
        knobwise.read(path)


@pytest.mark.parametrize("score", ["correct", "exact_match", "is_right"])
def test_the_score_of_a_long_table_is_named(score, tmp_path):
    rows = [
        {"sample_id": n, "model": model, score: (n + len(model)) % 2, "latency_ms": 5}
        for n in range(8)
        for model in ("s", "large")
    ]
    with input_error(f"no column accuracy.*profile.accuracy=… may be {score}"):
        knobwise.read(write(tmp_path / "t.csv", rows))


def test_ids_and_times_of_other_names_are_named(tmp_path):
    rows = [
        {"image_id": n, "crops": crops, "correct": (n + crops) % 2, "latency_s": 0.3}
        for n in range(8)
        for crops in (1, 4)
    ]
    path = write(tmp_path / "t.csv", rows)
    with input_error("may be image_id.*profile.accuracy=… may be correct.*may be latency_s"):
        knobwise.read(path)
    with input_error("no column latency_ms.*profile.latency=… may be latency_s"):
        knobwise.read(path, id="image_id", accuracy="correct")


def test_what_is_neither_is_listed(tmp_path):
    rows = [{"sample_id": n, "text": f"t{n}"} for n in range(4)]
    with input_error("t.csv: no column accuracy, latency_ms; its columns are sample_id, text") as e:
        knobwise.read(write(tmp_path / "t.csv", rows))
    for word in ("profile.wide=", "times alone", "may be"):
        assert word not in str(e.value)
