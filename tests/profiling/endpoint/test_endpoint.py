"""A profile measured through an endpoint, from end to end, against a server that simulates one and
its faults."""

import base64
import io
import itertools
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from commands import Command, launch, mistake, read_json, refused, stop_when
from helpers import input_error
from PIL import Image

from knobwise.__main__ import main
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.endpoint.client import EndpointClient
from knobwise.profiling.endpoint.messages import images_in, most_tokens, prompt_features
from knobwise.profiling.endpoint.prices import Money, Price, read_prices
from knobwise.profiling.measuring.measuring import read_measurements
from knobwise.testbeds.simulated_endpoint import SimulatedEndpoint
from knobwise.testbeds.simulated_models import REFUSAL, Simulation, reply_to

SUMS = {f"s{i}": (f"What is {3 + 7 * i % 90} + {i}?", str(3 + 7 * i % 90 + i)) for i in range(12)}
VALUES = (
    "knobs.values={model: [small, large], max_tokens: [64, 256], reasoning_effort: [low, high]}"
)
QUICK = """
    policy=utility seeds=[0] optimiser.teacher_iterations=4 optimiser.pretrain_iterations=4
    optimiser.iterations=2 own_cost=false tracking=disabled baselines=false policy.hidden=16
"""
KEY = "sk-nobody-may-read-this"


@pytest.fixture
def endpoint():
    with SimulatedEndpoint(delay=0) as server:
        yield server


@pytest.fixture(autouse=True)
def _in_a_folder(home, monkeypatch):
    """Questions and prices, a key in the environment, and short waits."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.01)
    write_questions(SUMS)
    Path("prices.yaml").write_text(
        "small: {input: 1, output: 4}\nlarge: {input: 10, output: 40, cached_input: 5}\n"
    )


def write_questions(questions):
    rows = [
        {"id": name, "question": text, "answer": right} for name, (text, right) in questions.items()
    ]
    pl.DataFrame(rows).write_ndjson("sums.jsonl")


def words(server, values=VALUES, out="out", **options):
    options = {"model": "openai", "endpoint": server.url, "data": "sums.jsonl", **options}
    return ["profile", values, f"out={out}", *(f"{k}={v}" for k, v in options.items())]


def table_of(out="out"):
    return pl.read_parquet(f"{out}/table.parquet").sort(
        "sample_id", pl.selectors.exclude("dataset")
    )


def asked(server):
    """How often each pair of question and model was asked since the last call."""
    pairs = [(r["messages"][-1]["content"], r["model"]) for r in server.state.requests]
    server.state.requests.clear()
    return Counter(pairs)


def test_a_table_holds_answers_times_tokens_and_prices_but_no_key(endpoint, capsys):
    launch(words(endpoint, prices="prices.yaml", max_usd=5))
    table = table_of()
    assert len(table) == 12 * 8
    prices = {"small": (1, 4), "large": (10, 40)}
    for row in table.iter_rows(named=True):
        body = {name: row[name] for name in ("model", "max_tokens", "reasoning_effort")}
        question, right = SUMS[row["sample_id"]]
        body["messages"] = [{"role": "user", "content": question}]
        reply = reply_to(body, row["model"], Simulation(), 0)
        usage = reply.usage()
        assert row["prompt"] == question
        assert (row["pred"], row["accuracy"]) == (" ".join(reply.words), reply.words == (right,))
        tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        assert (row["tokens_in"], row["tokens_out"]) == tokens
        per_million = np.dot(tokens, prices[row["model"]])
        assert row["usd"] == pytest.approx(per_million / 1e6)
        assert 0 < row["prefill_ms"] <= row["latency_ms"]
    assert {*table["accuracy"]} == {0, 1}
    profile = read_json("out/profile.json")
    assert (profile["concurrency"], profile["endpoint"]) == (8, endpoint.url)
    read = read_long_table("out/table.parquet", features="out/features.safetensors")
    assert {knob.name for knob in read.knobs} == {"model", "max_tokens", "reasoning_effort"}
    assert read.features["prompt_features"].shape == (12, 7)
    # the key is nowhere
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err
    for path in Path("out").rglob("*.*"):
        assert KEY.encode() not in path.read_bytes()


def test_more_at_once_measures_the_same(endpoint):
    for concurrency in (1, 8):
        launch(
            words(endpoint, out=f"at{concurrency}", prices="prices.yaml", concurrency=concurrency)
        )
    one, eight = (table_of(f"at{n}").select(pl.exclude("^.*_ms$", "dataset")) for n in (1, 8))
    assert one.equals(eight)
    endpoint.state.most_open = 0
    launch(words(endpoint, out="at3", concurrency=3))
    assert endpoint.state.most_open <= 3


def test_part_of_the_cells_is_measured(endpoint):
    launch(words(endpoint, **{"knobs.per_sample": 2, "knobs.warm_up": 0}))
    by_part = table_of().group_by("split", "sample_id").len()
    of_test = by_part["split"] == "test"
    assert {*by_part.filter(of_test)["len"]} == {8}
    assert {*by_part.filter(~of_test)["len"]} == {2}


def test_further_columns_of_the_data_can_be_features(endpoint, capsys):
    rows = []
    for number, (name, (text, right)) in enumerate(SUMS.items()):
        row = {"id": name, "question": text, "answer": right, "lang": "ab"[number % 2]}
        # a list is no feature, and what names a column of the table says something else
        rows.append({**row, "n_chars": len(text), "tags": [name], "split": "x", "usd": 3})
    pl.DataFrame(rows).write_ndjson("sums.jsonl")
    launch(words(endpoint, "knobs.values={model: [small, large]}", prices="prices.yaml"))
    assert "lang, n_chars;" in capsys.readouterr().out
    table = table_of()
    wanted = {row["id"]: (row["lang"], row["n_chars"]) for row in rows}
    for row in table.iter_rows(named=True):
        assert (row["lang"], row["n_chars"]) == wanted[row["sample_id"]]
    assert not {"tags", "split"} & {*table.columns}
    assert table["usd"].max() < 1
    read = read_long_table("out/table.parquet", features=["prompt", "lang", "n_chars"])
    assert [column.name for column in read.columns] == ["lang", "n_chars"]
    assert [knob.name for knob in read.knobs] == ["model"]


def test_what_the_printed_command_trained_is_completed(endpoint, capsys):
    write_questions({f"n{n}": (f"What is {n} + 1?", str(n + 1)) for n in range(40)})
    values = (
        "knobs.values={model: [small, large], reasoning_effort: [low, high], max_tokens: [64, 256]}"
    )
    part = {"knobs.per_sample": 2, "knobs.whole_test": False}
    launch(words(endpoint, values, prices="prices.yaml", **part))
    following = capsys.readouterr().out.partition("next:")[2].split()
    assert {"profile.features=[prompt]", "profile.costs=[usd]"} <= {*following}
    launch(following[1:], QUICK, "name=r")
    asked(endpoint)
    again = words(endpoint, values, prices="prices.yaml", complete="runs/controller/r")
    launch(again)
    assert asked(endpoint).total() > 0
    # what was measured for judging stands for itself, all else for 8 of 2 cells
    assert {*table_of()["sampling_weight"]} == {1.0, 4.0}
    # judged at the budgets that it was calibrated for, where all that it chooses was measured
    launch("evaluate own_cost=false decisions=d.parquet")
    judged = pl.read_parquet("d.parquet").filter(policy="controller")
    assert {*judged["sampling_weight"]} == {1.0}


# -- faults ----------------------------------------------------------------------------------------


def ask(endpoint, timeout_s=20.0, lost=lambda: None, **body):
    client = EndpointClient(endpoint.url, timeout_s)
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    try:
        return client.ask({"messages": messages, **body}, lost)
    finally:
        client.close()


@pytest.mark.parametrize("fault", ["429", "500", "cut", "json"])
def test_what_the_server_fails_is_asked_again_and_only_the_last_counts_as_time(
    endpoint, fault, monkeypatch
):
    # a clock that goes on by a second whenever it is read
    seconds = SimpleNamespace(perf_counter=itertools.count().__next__)
    for module in ("client", "reading"):
        monkeypatch.setattr(f"knobwise.profiling.endpoint.{module}.time", seconds)
    lost = []
    reply = ask(endpoint, model=f"large?fault={fault}&times=2", lost=lambda: lost.append(1))
    assert (reply.text, reply.failed, reply.attempts) == ("42", "", 3)
    assert (reply.first_ms, reply.total_ms) == (1000, 2000)
    # an attempt that broke may have cost something; one that was turned away has not
    assert len(lost) == (2 if fault in ("cut", "json") else 0)


def test_a_server_that_does_not_stream_takes_the_time_of_the_whole_answer(endpoint):
    # 40 ms to the first of ten chunks, 2 ms to each further one
    reply = ask(endpoint, model="small?stream=0&first_ms=40&chunks=10&chunk_ms=2")
    assert reply.text.split() == [f"word{i}" for i in range(10)]
    assert reply.first_ms == reply.total_ms >= 58
    assert (reply.counted, reply.tokens_out) == (True, 10)
    reply = ask(endpoint, model="small?stream=0&fault=refusal")
    assert (reply.text, reply.failed) == (REFUSAL, "refused")
    for fault in ("cut", "json"):
        reply = ask(endpoint, model=f"large?stream=0&fault={fault}&times=1")
        assert (reply.text, reply.attempts) == ("42", 2)


def test_a_refusal_is_wrong_at_its_own_time(endpoint):
    reply = ask(endpoint, model="small?fault=refusal&first_ms=1")
    assert (reply.text, reply.failed) == (REFUSAL, "refused")
    assert 1 <= reply.first_ms <= reply.total_ms
    # also where its words are the right answer
    write_questions({"a": ("Say it.", REFUSAL)})
    launch(words(endpoint, "knobs.values={model: ['small?fault=refusal', 'small?chunks=1']}"))
    assert sorted(table_of().select("pred", "accuracy").rows()) == [(REFUSAL, 0), ("word0", 0)]


def test_a_time_out_takes_exactly_so_long(endpoint):
    values = "knobs.values={model: [small, 'large?first_ms=30000']}"
    launch(words(endpoint, values, timeout_s=0.5, **{"knobs.warm_up": 0, "knobs.samples": 4}))
    late = table_of().filter(pl.col("model") != "small")
    assert late.select("latency_ms", "prefill_ms", "accuracy").unique().rows() == [(500, 500, 0)]
    # what nobody counted is not nothing
    assert late.select("tokens_in", "tokens_out").unique().rows() == [(None, None)]
    known = table_of().filter(pl.col("model") == "small")
    assert (known["tokens_in"] > 0).all()
    reply = ask(endpoint, model="large?first_ms=0&chunks=9&chunk_ms=9000", timeout_s=0.5)
    assert (reply.total_ms, reply.failed, reply.text) == (500, "timed out", "word0")
    assert reply.first_ms < 500


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_a_server_that_keeps_failing_ends_it_and_what_is_measured_stays(endpoint, fault, capsys):
    values = f"knobs.values={{model: [small, 'large?fault={fault}']}}"
    few = {"knobs.warm_up": 0, "knobs.samples": 4}
    assert "5 times" in mistake(words(endpoint, values, **few), capsys, "measures ")
    known = read_measurements("out/state/measured.jsonl")
    assert {*known["model"]} <= {"small"}
    asked(endpoint)
    launch(words(endpoint, "knobs.values={model: [small]}", **few))
    assert asked(endpoint).total() == 4 - len(known)


def test_a_wrong_key_is_said_before_anything_is_written(endpoint, capsys):
    endpoint.state.key = "another"
    assert KEY not in (line := refused(words(endpoint), capsys))
    assert "OPENAI_API_KEY" in line


# -- money, kills ----------------------------------------------------------------------------------


def test_prices_are_those_of_the_file():
    Path("p.yaml").write_text("m: {input: 2, output: 8, cached_input: 1}\nn: {input: 0, output: 1}")
    prices = read_prices("p.yaml")
    assert prices["m"].usd(1_000_000, 500_000, cached=400_000) == pytest.approx(1.2 + 0.4 + 4)
    assert prices["n"] == Price(0, 1)


def test_what_requests_in_flight_can_cost_is_reserved():
    money = Money(1.0)
    assert money.reserve(0.6)
    # another one waits for the first, which takes less than it might have
    waiting = threading.Timer(0.05, lambda: (money.pay(0.1), money.free(0.6)))
    waiting.start()
    assert money.reserve(0.8)
    money.free(0.8)
    assert not money.reserve(0.91)
    assert money.reserve(0.9)
    assert money.spent == 0.1


def test_a_text_has_no_more_tokens_than_are_reserved(endpoint):
    messages = [{"role": "user", "content": "ä" * 100}, {"role": "user", "content": "b"}]
    assert most_tokens(messages) > 201


def test_no_more_is_spent_than_allowed_and_more_money_goes_on(endpoint, capsys):
    options = {"prices": "prices.yaml", "knobs.warm_up": 0, "concurrency": 4}
    line = mistake(words(endpoint, max_usd=0.02, **options), capsys, "measures ")
    assert "max_usd" in line
    assert not Path("out/table.parquet").exists()
    known = read_measurements("out/state/measured.jsonl")
    spent = known["extra.usd"].sum()
    assert 0 < len(known) < 96
    assert spent <= 0.02
    # the next request could have cost more than was left
    most = (16 + 16 + 20) * 10e-6 + 256 * 40e-6
    assert spent > 0.02 - most
    asked(endpoint)
    # what was spent before counts
    mistake(words(endpoint, max_usd=0.02, **options), capsys, "measures ")
    assert not asked(endpoint)
    # enough for a table with holes
    launch(words(endpoint, max_usd=0.1, **options))
    holes = table_of()
    assert 5 * 8 <= len(holes) < 96
    assert holes["usd"].sum() <= 0.1
    read = read_long_table("out/table.parquet", features="out/features.safetensors")
    assert read.mask.sum() == len(holes)
    launch(words(endpoint, max_usd=1, **options))
    assert asked(endpoint).total() + len(known) == 96
    assert len(table_of()) == 96


@pytest.mark.usefixtures("_forked")
def test_after_a_kill_it_goes_on_and_nothing_measured_is_asked_twice(endpoint):
    slow = "knobs.values={model: [small, 'large?first_ms=100']}"
    typed = words(endpoint, slow, concurrency=2, **{"knobs.warm_up": 0})
    log = Path("out/state/measured.jsonl")
    stop_when(lambda: log.exists() and log.read_bytes().count(b"\n") >= 6, Command(typed))
    known = read_measurements(log)
    whole = len(known) - (not log.read_bytes().endswith(b"\n"))
    assert whole >= 6
    asked(endpoint)
    launch(typed)
    again = asked(endpoint)
    assert again.total() == 24 - whole
    assert len(table_of()) == 24


# -- what is sent ----------------------------------------------------------------------------------


def few_shots(question, knobs):
    """Demonstrations before a question: code of a user's own."""
    shots = [{"role": "system", "content": f"Be {knobs['tone']}."}]
    for number in range(knobs["shots"]):
        shots.append({"role": "user", "content": f"What is {number} + 1?"})
        shots.append({"role": "assistant", "content": str(number + 1)})
    return [*shots, {"role": "user", "content": question}]


def test_knobs_of_messages_and_of_fields_that_only_this_server_has(endpoint):
    values = "knobs.values={model: [small], shots: [0, 2], tone: [brief], top_k: [5, 50]}"
    body = "{temperature: 0, top_k: 1}"
    own = {"messages": "test_endpoint:few_shots", "extra_body": body, "knobs.warm_up": 0}
    launch(words(endpoint, values, **own, **{"knobs.samples": 2}))
    sent = endpoint.state.requests
    assert len(sent) == 2 * 4
    shapes = Counter((len(r["messages"]), r["top_k"], r["temperature"]) for r in sent)
    assert shapes == {(length, top_k, 0): 2 for length in (2, 6) for top_k in (5, 50)}
    assert {r["messages"][0]["content"] for r in sent} == {"Be brief."}
    # without a knob for it, an answer is as long as for other models
    assert {r["max_tokens"] for r in sent} == {32}


def test_a_question_with_an_image_is_sent_with_it(endpoint):
    Image.new("RGB", (6, 4), "red").save("red.png")
    rows = [{"id": "a", "question": "What is 1 + 1?", "answer": "2", "image": "red.png"}]
    rows.append({"id": "b", "question": "What is 2 + 1?", "answer": "3", "image": None})
    pl.DataFrame(rows).write_ndjson("sums.jsonl")
    launch(words(endpoint, "knobs.values={model: [small]}", **{"knobs.warm_up": 0}))
    sent = {images_in(r["messages"]): r["messages"][0]["content"] for r in endpoint.state.requests}
    assert sent[0] == "What is 2 + 1?"
    picture, text = sent[1]
    assert text == {"type": "text", "text": "What is 1 + 1?"}
    encoded = picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (6, 4)


def test_features_are_counts_and_shares():
    text = "Ab 1é\nc"
    wanted = [np.log1p(7), np.log1p(3), np.log1p(1), 1 / 7, 1 / 7, 1 / 7, 2]
    np.testing.assert_allclose(prompt_features(text, 2)["prompt_features"], wanted, rtol=1e-6)
    assert not prompt_features("")["prompt_features"].any()


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"values": "knobs.values={shots: [1], model: [small]}"}, "shots"),
        ({"values": "knobs.values={max_tokens: [1, 2]}"}, "model"),
        ({"values": "knobs.values={model: [small, null]}"}, "model"),
        ({"values": "knobs.values={model: [small], n: [1, 2]}"}, "n"),
        ({"endpoint": "http://127.0.0.1:1/v1"}, "endpoint"),
        ({"endpoint": "http://user:secret@127.0.0.1/v1"}, "endpoint"),
        ({"endpoint": "127.0.0.1:8000"}, "endpoint"),
        ({"endpoint": "null"}, "endpoint"),
        ({"prices": "none.yaml"}, "none.yaml"),
        ({"prices": "sums.jsonl"}, "sums.jsonl"),
        ({"values": "knobs.values={model: [medium]}", "prices": "prices.yaml"}, "medium"),
        ({"max_usd": 1}, "max_usd"),
        ({"max_usd": 0, "prices": "prices.yaml"}, "max_usd"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"extra_body": 3}, "extra_body"),
        ({"messages": "few_shots"}, "messages"),
        ({"knobs.clock": "cpu"}, "knobs.clock"),
        ({"device": "cpu"}, "device"),
        ({"model": "elastic", "data": "null"}, "endpoint"),
        ({"vlm.data": "sums.jsonl"}, "vlm.data"),
    ],
)
def test_mistakes_are_refused_in_a_line(endpoint, changed, fault, capsys):
    assert fault in refused(words(endpoint, **changed), capsys).partition(": ")[2]


@pytest.mark.parametrize(
    "text", ["", "[1]", "m: 3", "m: {input: 1}", "m: {input: x, output: 1}", "m: {input: -1, output: 1}",
             "m: {input: 1, output: 1, image: 2}", "m: {"],
)  # fmt: skip
def test_prices_that_are_none_are_refused(text):
    Path("p.yaml").write_text(text)
    with input_error("p.yaml"):
        read_prices("p.yaml")


def test_a_request_that_the_server_finds_wrong_is_said_at_once(endpoint, capsys):
    line = mistake(words(endpoint, "knobs.values={model: [unknown]}"), capsys, "measures ")
    assert "does not exist" in line
    assert asked(endpoint).total() == 0


@pytest.mark.parametrize("features", ["out/features.safetensors", "[prompt]"])
def test_a_controller_serves_models_behind_the_endpoint_live(endpoint, capsys, features):
    names = [f"What is {n} + 1?" for n in range(60)]
    write_questions({f"n{n}": (text, str(n + 1)) for n, text in enumerate(names)})
    values = "knobs.values={model: [small, large], reasoning_effort: [low, high]}"
    launch(words(endpoint, values, **{"knobs.max_new_tokens": 200, "concurrency": 4}))
    table = ["profile=table", "profile.path=out/table.parquet"]
    table.append(f"profile.features={features}")
    launch("train", table, QUICK, "name=r")
    behind = ["model=openai", f"endpoint={endpoint.url}", "data=sums.jsonl", "json=live.json"]
    capsys.readouterr()
    asked(endpoint)
    settings = ["stream.requests=12", "knobs.max_new_tokens=200"]
    launch("evaluate", "checkpoint=runs/controller/r", "live=true", table, behind, settings)
    # the times were measured with more requests at once
    assert "4 requests" in capsys.readouterr().err
    assert asked(endpoint).total() > 12
    live = read_json("live.json")
    accuracy = {row["policy"]: row["accuracy"] for row in live["rows"]}
    assert len(accuracy) > 2
    assert 0 < max(accuracy.values()) <= 1
    # other questions under the same ids
    write_questions({f"n{n}": (f"{text} Please", str(n + 1)) for n, text in enumerate(names)})
    again = ["evaluate", "checkpoint=runs/controller/r", "live=true", *table, *behind, *settings]
    capsys.readouterr()
    assert main(again) == 2
    assert "does not match" in capsys.readouterr().err
    refused(["evaluate", "checkpoint=runs/controller/r", f"endpoint={endpoint.url}"], capsys)
