"""A profile measured through servers that do not do what the protocol says, or do it slowly."""

import asyncio
import itertools
import json
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import polars as pl
import pytest
from commands import launch, mistake, read_json, refused
from helpers import input_error
from scripted_endpoint import (
    DONE,
    STOP,
    USAGE,
    WORD,
    Broken,
    ScriptedChats,
    Turned,
    chat,
    chunk,
    event,
    profile_words,
    write_questions,
)

from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.endpoint.client import EndpointClient, listed_models
from knobwise.profiling.endpoint.model_changes import measure_changes
from knobwise.profiling.endpoint.pauses import LONGEST_PAUSE_S, Pauses, retry_after_s
from knobwise.profiling.endpoint.reading import Cut, EndpointReply, read_stream, read_whole
from knobwise.profiling.endpoint.token_counts import cut_at
from knobwise.profiling.measuring.measuring import read_measurements
from knobwise.testbeds.simulated_endpoint import SimulatedEndpoint

PRICES = """
large: {input: 1, output: 4, flex: {input: 0.5, output: 2}}
small: {input: 1, output: 4}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(home, monkeypatch):
    """Questions, prices and short waits."""
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.01)
    write_questions()
    Path("prices.yaml").write_text(PRICES)


def words(server, values="{model: [large], max_tokens: [8, 16]}", **options):
    return profile_words(server, values, **options)


# -- what is an answer -----------------------------------------------------------------------------


def streamed(*events):
    """What is read of a stream."""
    reply = EndpointReply()

    async def lines():
        for line in b"".join(events).decode().splitlines():
            yield line

    asyncio.run(read_stream(lines(), reply, 0.0))
    return reply


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_what_a_server_broke_off_is_no_answer(finish):
    with pytest.raises(ValueError, match=finish):
        streamed(WORD, chunk({}, finish), DONE)
    choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": finish}
    with pytest.raises(ValueError, match=finish):
        read_whole(json.dumps(chat(choices=[choice])).encode(), EndpointReply(), 0.0)


def test_the_last_event_may_lack_the_empty_line_after_it():
    for ends in ([STOP[:-1]], [STOP[:-2]], [STOP, DONE[:-2]]):
        assert streamed(WORD, *ends).text == "yes"
    with pytest.raises(Cut):
        streamed(WORD, STOP[:-9])
    with pytest.raises(ValueError, match="overloaded"):
        streamed(WORD, event({"error": "overloaded"})[:-2])


def test_each_repeat_has_its_own_answer_and_tokens():
    """A server that draws its answers is right in one of three repeats, and once has none."""
    answers = Counter()

    def script(body):
        question = body["messages"][-1]["content"]
        number = question.split()[-1].rstrip("?")
        answers[number] += 1
        if number == "4" and answers[number] == 2:
            raise Turned(400, error={"message": "no", "code": "content_filter"})
        tokens = answers[number]
        yield number if answers[number] == 1 else "no"
        yield {"usage": {**USAGE, "completion_tokens": tokens, "total_tokens": 10 + tokens}}

    with ScriptedChats(script) as server:
        launch(words(server, "{model: [large], max_tokens: [8]}", **{"knobs.repeats": 3}))
    rows = pl.read_parquet("out/table.parquet").sort("sample_id", "repeat")
    assert rows["accuracy"].to_list() == [1.0, 0.0, 0.0] * 6
    assert rows["pred"].to_list()[:6] == ["0", "no", "no", "1", "no", "no"]
    assert rows["tokens_out"].to_list()[12:] == [1, 0, 3, 1, 2, 3]
    (accuracy,) = set(read_long_table("out/table.parquet").accuracy.flatten().tolist())
    assert accuracy == pytest.approx(1 / 3)


def test_only_what_follows_thoughts_is_scored():
    """Some templates open the thought in the prompt, so that the answer only ends it."""
    told = {
        "0": "<think>Or 7?</think>\n\n0",
        "1": "Or 7?</think>1",
        "2": "<think>It is 2",
        "3": "3",
    }
    told |= {"4": "<think>4</think>7", "5": "5 <think>"}

    def script(body):
        text = told[body["messages"][-1]["content"].split()[-1].rstrip("?")]
        yield from (text[i : i + 5] for i in range(0, len(text), 5))

    with ScriptedChats(script) as server:
        launch(words(server))
    rows = pl.read_parquet("out/table.parquet").filter(max_tokens=8).sort("sample_id")
    assert rows["accuracy"].to_list() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert rows["pred"].to_list() == [*told.values()]
    (line,) = (line for line in read_json("out/profile.json")["remarks"] if "thoughts" in line)
    assert line.startswith("8 of 12 answers begin with thoughts (<think>)")
    assert line.endswith("; 2 of them never end, so these have no answer")


# -- tokens and tiers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [-5, float("inf"), float("nan"), True, "5", 2.5, 10**30], ids=lambda count: str(count)
)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_tokens_that_cannot_be_are_refused_at_the_first_answer(name, count, capsys):
    def script(body):
        yield "1"
        yield {"usage": {**USAGE, name: count}}

    with ScriptedChats(script) as server:
        for options in ({"prices": "prices.yaml", "max_usd": 1}, {}):
            line = mistake(words(server, **options), capsys, "measures ")
            assert name in line
            assert len(server.bodies) == 1
            server.bodies.clear()


@pytest.mark.parametrize("counted", [True, False])
def test_tokens_that_nobody_counted_are_missing_and_that_is_said_once(counted):
    """Three questions of six; or all."""

    def script(body):
        number = int(body["messages"][-1]["content"].split()[-1].rstrip("?"))
        yield from ("the answer is", str(number))
        if not (counted and number % 2):
            yield {"usage": None}

    with ScriptedChats(script) as server:
        launch(words(server))
    rows = pl.read_parquet("out/table.parquet").sort("sample_id", "max_tokens")
    if counted:
        assert rows["tokens_in"].to_list() == [None, None, 10, 10] * 3
        assert rows["tokens_out"].to_list() == [None, None, 5, 5] * 3
    else:
        assert not {"tokens_in", "tokens_out", "tokens_cached"} & {*rows.columns}
    remarks = [line for line in read_json("out/profile.json")["remarks"] if "tokens_in" in line]
    assert len(remarks) == 1
    assert f"{6 if counted else 12} of 12 answers" in remarks[0]
    assert read_measurements(Path("out/state/measured.jsonl"))["output_tokens"].min() > 0


@pytest.mark.parametrize(
    ("tokens", "most"),
    [
        ([10, 20, 40, 40, 40, 40, 40], 40),
        ([10, 20, 30, 40, 40, 40, 40], None),  # four may be as long by chance
        ([10, 20, 30, 40, 50, 60, 70], None),
        ([math.nan] * 7, None),
        ([math.nan, math.nan, *[40] * 5], 40),
    ],
)
def test_prompts_of_other_lengths_and_equal_tokens_were_cut(tokens, most):
    letters = [100, 200, 300, 400, 500, 600, 700]
    assert cut_at(letters, tokens) == most
    # of one length they are as they should be; one prompt in several settings is one prompt
    assert cut_at([100] * 7, tokens) is None
    assert cut_at([letters[2]] * 10, [40] * 10) is None
    assert cut_at([], []) is None


def test_a_server_that_cuts_prompts_is_named():
    """Of six questions it reads the same number of tokens, though one is eleven times as long."""
    rows = [
        {"id": f"q{i}", "question": "why " * (10 * i) + f"{i}?", "answers": [str(i)]}
        for i in range(1, 7)
    ]
    pl.DataFrame(rows).write_ndjson("q.jsonl")

    def script(body):
        yield "yes"
        yield {"usage": {**USAGE, "prompt_tokens": 32}}

    with ScriptedChats(script) as server:
        launch(words(server))
    remarks = [
        line for line in read_json("out/profile.json")["remarks"] if "without a word" in line
    ]
    assert len(remarks) == 1
    assert "have 32 tokens for the server" in remarks[0]


def test_a_text_of_no_tokens_has_no_price(capsys):
    def script(body):
        yield "1"
        yield {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}

    with ScriptedChats(script) as server:
        assert "prices" in mistake(words(server, prices="prices.yaml"), capsys, "measures ")
        assert len(server.bodies) == 1
        launch(words(server))


def test_thinking_in_the_total_alone_is_paid_for():
    def script(body):
        yield "1"
        yield {"usage": {**USAGE, "total_tokens": 110}}

    with ScriptedChats(script) as server:
        launch(words(server, prices="prices.yaml"))
    table = pl.read_parquet("out/table.parquet")
    assert {*table["tokens_out"]} == {100}
    assert table["usd"].to_list() == pytest.approx([410e-6] * 12)


@pytest.mark.parametrize("says", [True, False])
def test_an_answer_costs_what_its_tier_does(capsys, says):
    """That which it says, or else that which was asked for, as while serving."""

    def script(body):
        yield "1"
        # one model has no capacity for it
        tier = body["service_tier"] if body["model"] == "large" else "default"
        if says:
            yield {"service_tier": tier}

    values = "{model: [large], service_tier: [default, flex]}"
    with ScriptedChats(script) as server:
        launch(words(server, values, prices="prices.yaml"))
        table = pl.read_parquet("out/table.parquet")
        prices = table.group_by("service_tier").agg(pl.mean("usd")).rows()
        assert dict(prices) == pytest.approx({"default": 30e-6, "flex": 15e-6})
        # one that has no price is said before anything is asked
        server.bodies.clear()
        other = values.replace("large", "large, small")
        for more in ({}, {"extra_body": "{service_tier: priority}"}):
            typed = words(
                server,
                other if not more else "{model: [large], max_tokens: [8, 16]}",
                prices="prices.yaml",
                **more,
            )
            assert "service_tier" in refused([*typed, "out=other"], capsys)
        assert not server.bodies


def test_an_answer_in_a_tier_without_a_price_is_refused(capsys):
    def script(body):
        yield "1"
        yield {"service_tier": "priority"}

    with ScriptedChats(script) as server:
        line = mistake(words(server, prices="prices.yaml"), capsys, "measures ")
        assert "service_tier=priority" in line
        assert len(server.bodies) == 1


# -- models ----------------------------------------------------------------------------------------


def answers(body):
    yield "1"


def lines_about(server, capsys):
    """The lines about the server."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(server.url)]


def listing(*names):
    return {"object": "list", "data": [{"id": name} for name in names]}


@pytest.mark.parametrize(
    ("models", "unlisted"),
    [
        (listing("small", "large"), []),
        (listing("tiny", "small"), ["large"]),
        (listing("tiny"), ["large", "small"]),
        (listing("s*", "lar[g]e"), ["large"]),
        (listing("lar[g]e", "*"), []),
        (listing(), ["large", "small"]),
        ([{"id": "large"}, {"id": "small"}], []),
    ],
)
def test_models_that_are_not_listed_are_named_before_anything_is_asked(models, unlisted, capsys):
    order = []

    def script(body):
        order.append(lines_about(server, capsys))
        yield "1"

    # a server may have an alias, so that it is asked all the same
    with ScriptedChats(script, models) as server:
        launch(words(server, "{model: [large, small], max_tokens: [8]}"))
        assert len(server.bodies) == 12
    assert len(order[0]) == bool(unlisted)
    for line in order[0]:
        assert f"list {', '.join(unlisted)} among" in line
    assert not any(order[1:])


@pytest.mark.parametrize(
    "models", [None, "none", {"data": "x"}, {"data": [1]}, {"data": [{"id": 3}]}, [[]],
               {"data": [{"id": "a"}], "has_more": True}],
)  # fmt: skip
def test_a_server_without_a_list_of_models_is_measured(models, capsys):
    assert listed_models(models) is None
    with ScriptedChats(answers, models) as server:
        launch(words(server))
        (line,) = lines_about(server, capsys)
    assert "lists no models" in line
    assert len(pl.read_parquet("out/table.parquet")) == 12


# -- answers that are cut --------------------------------------------------------------------------


class OneAtATime:
    """A script of a server that ends an answer when another request comes."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.numbers = itertools.count()
        self.last = -1
        self.lock = threading.Lock()

    def __call__(self, body):
        with self.lock:
            self.last = number = next(self.numbers)
        for _ in range(10):
            yield "1"
            time.sleep(self.seconds / 10)
            if self.last != number:
                raise Broken


@pytest.mark.parametrize("concurrency", [2, 8])
def test_a_server_that_ends_answers_when_others_come_is_told_from_a_broken_one(concurrency, capsys):
    with ScriptedChats(OneAtATime(0.1)) as server:
        line = mistake(words(server, concurrency=concurrency), capsys, "measures ")
        assert "concurrency=1" in line
        # what was answered stays
        launch(words(server, out="one"))
    assert len(pl.read_parquet("one/table.parquet")) == 12


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_server_that_is_broken_alone_too_is_said_to_be(concurrency, capsys):
    def script(body):
        yield "1"
        raise Broken

    with ScriptedChats(script) as server:
        line = mistake(words(server, concurrency=concurrency), capsys, "measures ")
        # each is sent five times, and one of them once more, alone
        assert len(server.bodies) <= 5 * concurrency + (concurrency > 1)
    assert "5 times" in line
    assert "concurrency=1" not in line


@pytest.mark.parametrize("fault", ["cut", "json"])
def test_whole_answers_to_plain_prompts_that_are_cut_are_tried_alone_too(fault):
    body = {"model": f"small?fault={fault}&first_ms=30", "prompt": "Is it 1?", "max_tokens": 9}
    with SimulatedEndpoint(delay=0) as server, ThreadPoolExecutor(3) as pool:
        client = EndpointClient(server.url, 20.0)
        asked_at_once = [pool.submit(client.ask, body, whole=True) for _ in range(3)]
        for future in asked_at_once:
            with input_error("5 times"):
                future.result()
        client.close()


def test_a_server_that_was_broken_for_a_while_is_measured():
    numbers = itertools.count(1)

    def script(body):
        yield "1"
        # as while it starts again
        if next(numbers) <= 24:
            raise Broken

    with ScriptedChats(script) as server:
        launch(words(server, "{model: [large], max_tokens: [8, 9, 10]}", concurrency=8))
    assert len(pl.read_parquet("out/table.parquet")) == 18


def test_a_server_that_breaks_now_and_then_is_measured(capsys):
    numbers = itertools.count(1)

    def script(body):
        yield "1"
        if next(numbers) % 4 == 0:
            raise Broken

    with ScriptedChats(script) as server:
        launch(words(server, "{model: [large], max_tokens: [8, 9, 10, 11, 12, 13]}", concurrency=4))
    assert len(pl.read_parquet("out/table.parquet")) == 36


# -- waiting ---------------------------------------------------------------------------------------


def test_a_time_to_wait_is_a_number_or_a_date_to_come():
    at = 1_700_000_000
    clock = {"date": formatdate(at, usegmt=True)}
    assert retry_after_s({"retry-after": "7"}) == 7
    assert retry_after_s({"retry-after": "7", "retry-after-ms": "20"}) == 0.02
    assert retry_after_s({"retry-after": formatdate(at + 90, usegmt=True), **clock}) == 90
    assert 80 < retry_after_s({"retry-after": formatdate(time.time() + 90, usegmt=True)}) < 91
    past = formatdate(at - 90, usegmt=True)
    for none in (
        "nan",
        "inf",
        "-inf",
        "-1",
        "-1e400",
        "soon",
        "",
        past,
        "Mon, 99 Foo 2023",
        "1e999",
    ):
        assert retry_after_s({"retry-after": none, **clock}) is None
    # what cannot be waited for by one name may be told by the other
    assert retry_after_s({"retry-after": "7", "retry-after-ms": "nan"}) == 7
    assert retry_after_s({}) is None


@pytest.mark.parametrize("after", ["nan", "-1", "inf", "0", "x", "0.001", "1e-300"])
def test_no_time_to_wait_is_a_licence_for_thousands_of_requests(after):
    turned = 0

    def script(body):
        nonlocal turned
        turned += 1
        if turned <= 8:
            raise Turned(429, {"retry-after": after})
        yield "1"

    with ScriptedChats(script) as server:
        client = EndpointClient(server.url, 20.0)
        start = time.monotonic()
        reply = client.ask({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        client.close()
    assert (reply.text, reply.attempts) == ("1", 9)
    # each wait is twice the one before: .01, .02, … .64 s (the first may be as short as is said)
    assert time.monotonic() - start >= 1.27


def test_a_server_that_turns_all_away_for_too_long_is_given_up(monkeypatch):
    now = 100.0
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.time.monotonic", lambda: now)
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.5)
    for after in ("1e300", "90000", formatdate(time.time() + 90000, usegmt=True)):
        with input_error("429"):
            Pauses("http://server/v1").turned_away({"retry-after": after}, 1)
    # word by word it is no longer than an hour
    pauses = Pauses("http://server/v1")
    waited = []
    with input_error("429"):
        for attempts in range(1, 1000):
            pauses.turned_away({"retry-after": "nan"}, attempts)
            waited.append(pauses.left_s)
            now += pauses.left_s
    assert waited[:9] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert LONGEST_PAUSE_S - 60 <= sum(waited) <= LONGEST_PAUSE_S
    # an answer to any request ends the count
    pauses.answered()
    pauses.turned_away({"retry-after": "30"}, 1)
    assert math.isclose(pauses.left_s, 30)


# -- changes of the model --------------------------------------------------------------------------


class HoldsOne:
    """A script of a server that holds one model, loads it at each change, and then first answers
    who waits for it."""

    def __init__(self, load_s):
        self.load_s = load_s
        self.model = None
        self.answered = []  # what was asked, and whether the model was loaded for it
        self.lock = threading.Lock()

    def __call__(self, body):
        with self.lock:
            is_load = self.model != body["model"]
            self.answered.append((body, is_load))
            if is_load:
                self.model = body["model"]
                time.sleep(self.load_s)
            yield f"{body['messages'][-1]['content']} {body['model']}"


def simulated_server(held, load_ms=8000, quick_ms=100):
    """Times to the first token of a server that holds so many models; and the models asked."""
    models = []

    def first_ms(model, turn):
        loaded = [*dict.fromkeys(reversed(models))][:held]
        models.append(model)
        assert models.count(model) == turn + 1
        return quick_ms + load_ms * (model not in loaded)

    return first_ms, models


def test_what_a_change_costs_is_the_time_of_a_load():
    first_ms, models = simulated_server(held=1)
    assert measure_changes(first_ms, ["a", "b", "c"]) == {"a": 8000, "b": 8000, "c": 8000}
    first_ms, models = simulated_server(held=3)
    assert measure_changes(first_ms, ["a", "b", "c"]) == {}
    # each once to load it, and once after a change and once more
    assert len(models) == 9
    assert measure_changes(simulated_server(1, load_ms=400)[0], ["a", "b"]) == {}
    assert measure_changes(simulated_server(1, load_ms=4000, quick_ms=9000)[0], ["a", "b"]) == {}
    # no further request may be sent
    assert measure_changes(lambda model, turn: None, ["a", "b"]) == {}


def test_a_first_token_that_is_late_by_chance_is_no_change():
    times = itertools.cycle([9000, 100, 100, 100, 100])
    assert measure_changes(lambda model, turn: next(times), ["a", "b"]) == {}


def test_one_model_that_is_loaded_at_each_change_is_told_from_those_that_stay():
    models = []

    def first_ms(model, turn):
        models.append(model)
        return 3100 if model == "a" and models[-2:-1] != ["a"] else 100

    assert measure_changes(first_ms, ["a", "b"]) == {"a": 3000}
    assert len(models) < 14


@pytest.fixture
def _loads_count(monkeypatch):
    monkeypatch.setattr("knobwise.profiling.endpoint.model_changes.LEAST_MS", 60)


@pytest.mark.usefixtures("_loads_count")
@pytest.mark.parametrize("concurrency", [1, 4])
def test_models_that_are_loaded_at_each_change_are_measured_one_after_the_other(
    concurrency, capsys
):
    script = HoldsOne(0.15)
    values = "{model: [small, large], max_tokens: [8, 16, 24]}"
    more = {"knobs.warm_up": 1, "concurrency": concurrency}
    with ScriptedChats(script) as server:
        launch(words(server, values, **more))
        # those that measure a change, and then one for each model: a warm-up of three, and 18 cells
        assert sum(is_load for _, is_load in script.answered) <= 16
        blocks = [script.answered[-42:-21], script.answered[-21:]]
        models = [{body["model"] for body, _ in block} for block in blocks]
        assert models in ([{"small"}, {"large"}], [{"large"}, {"small"}])
        for block in blocks:
            # no load is measured, since the first warm-up waits for it
            assert not any(is_load for _, is_load in block[1:])
            cells = {(body["messages"][-1]["content"], body["max_tokens"]) for body, _ in block[3:]}
            assert len(cells) == 18
        (remark,) = read_json("out/profile.json")["remarks"]
        printed = capsys.readouterr()
        assert remark in printed.out
        assert len(lines_about(server, capsys)) == 0
        assert "small" in remark
        assert "large" in remark
        assert len(pl.read_parquet("out/table.parquet")) == 36
        # what was measured is not forgotten by a call that has nothing to measure
        launch(words(server, values, **more))
        assert read_json("out/profile.json")["remarks"] == [remark]


@pytest.mark.usefixtures("_loads_count")
def test_loads_that_are_in_the_times_are_said():
    values = "{model: [small, large], max_tokens: [8, 16, 24]}"
    with ScriptedChats(HoldsOne(0.1)) as server:
        launch(words(server, values))
    (remark,) = read_json("out/profile.json")["remarks"]
    assert "in the times" in remark
    assert pl.read_parquet("out/table.parquet")["latency_ms"].max() >= 100


@pytest.mark.usefixtures("_loads_count")
def test_a_server_that_holds_its_models_is_measured_in_random_order():
    def script(body):
        yield f"{body['messages'][-1]['content']} {body['model']}"

    values = "{model: [small, large], max_tokens: [8, 16, 24]}"
    with ScriptedChats(script) as server:
        launch(words(server, values, **{"knobs.warm_up": 1}))
        models = [body["model"] for body in server.bodies[-36:]]
    assert sum(a != b for a, b in itertools.pairwise(models)) > 8
    assert read_json("out/profile.json")["remarks"] == []


@pytest.mark.usefixtures("_loads_count")
def test_the_limit_of_money_ends_blocks_too(capsys):
    with ScriptedChats(HoldsOne(0.1)) as server:
        # a request costs 30 millionths, and at most some 200
        more = {"prices": "prices.yaml", "max_usd": 0.0008, "knobs.warm_up": 1}
        mistake(
            words(server, "{model: [small, large], max_tokens: [8, 16]}", **more),
            capsys,
            "measures ",
        )
        assert 30e-6 * len(server.bodies) <= 0.0008
    assert len(read_measurements("out/state/measured.jsonl")) < 24


# -- knobs that are ignored ------------------------------------------------------------------------


def remarks_of(script, values, **options):
    with ScriptedChats(script) as server:
        launch(words(server, values, **options))
    return read_json("out/profile.json")["remarks"]


def deterministic(body):
    # so long that the noise of a machine with much to do is no tenth of it
    time.sleep(0.2)
    yield f"An answer to {body['messages'][-1]['content']}"


def test_a_knob_that_changes_nothing_is_said():
    (line,) = remarks_of(deterministic, "{model: [large], temperature: [0, 1, 2]}")
    assert line.startswith("temperature: 6 of 6 answers with 0 are those with 2")


def test_a_knob_that_changes_something_is_not_said():
    def hot(body):
        # at one question it makes no difference
        question = body["messages"][-1]["content"]
        yield f"An answer to {question}" + "?" * (body["temperature"] and "3" not in question)

    assert remarks_of(hot, "{model: [large], temperature: [0, 2]}") == []


@pytest.mark.parametrize("change", ["tokens", "price", "time"])
def test_a_knob_that_changes_tokens_prices_or_times_alone_is_heeded(change):
    def script(body):
        high = body["service_tier"] == "flex"
        if change == "time":
            time.sleep(0.03 * high)
        yield "A long and even answer"
        tokens = 9 if high and change == "tokens" else 5
        tier = body["service_tier"] if change == "price" else "default"
        yield {"usage": {**USAGE, "completion_tokens": tokens}, "service_tier": tier}

    values = "{model: [large], service_tier: [default, flex]}"
    assert remarks_of(script, values, prices="prices.yaml") == []


def test_a_knob_that_one_model_ignores_is_said_of_that_one():
    def script(body):
        time.sleep(0.2)
        hot = body["temperature"] and body["model"] == "large"
        yield f"An answer to {body['messages'][-1]['content']} by {body['model']}" + "!" * hot

    (line,) = remarks_of(script, "{model: [small, large], temperature: [0, 2]}")
    assert line.startswith("temperature: 6 of 6")
    assert line.endswith("(with model=small)")


def test_one_model_under_two_names_is_said():
    (line,) = remarks_of(deterministic, "{model: [small, large], top_p: [0.5]}")
    assert line.startswith("model: 6 of 6")
    assert "both names" in line


@pytest.mark.parametrize(
    ("heeds", "longest", "lines"), [(True, 90, 0), (False, 90, 1), (False, 7, 0)]
)
def test_answers_that_are_longer_than_their_limit_are_said(heeds, longest, lines):
    def script(body):
        tokens = min(longest, body["max_tokens"] if heeds else longest)
        yield "word " * tokens
        yield {"usage": {**USAGE, "completion_tokens": tokens, "total_tokens": 10 + tokens}}

    # that short answers are equal is no sign
    remarks = remarks_of(script, "{model: [large], max_tokens: [8, 64]}")
    assert len(remarks) == lines
    assert all(line.startswith("max_tokens: 6 of 6") for line in remarks)


def test_few_samples_say_nothing_of_a_knob():
    values = "{model: [large], temperature: [0, 2]}"
    assert remarks_of(deterministic, values, **{"knobs.samples": 3}) == []


def test_answers_that_failed_say_nothing_of_a_knob():
    def script(body):
        raise Turned(400, error={"message": "no", "code": "content_filter"})
        yield

    assert remarks_of(script, "{model: [large], temperature: [0, 2]}") == []
