"""What a profile through an endpoint costs, over all calls that measure into one folder."""

import math
import threading
from pathlib import Path

import polars as pl
import pytest
from commands import Command, launch, mistake, read_json, stop_when
from scripted_endpoint import USAGE, Broken, ScriptedChats, Turned, profile_words, write_questions

from knobwise.profiling.endpoint.prices import Money
from knobwise.profiling.measuring.measuring import read_measurements

PRICES = "large: {input: 1, output: 4}\nsmall: {input: 1, output: 4}\n"
MOST = (16 + 16 + 8 + 4 * 8) / 1e6
"""What a request with 8 characters and max_tokens=8 can cost: a token for each byte, and 32."""
COST = (10 + 4 * 5) / 1e6
"""What it does cost, by `USAGE`."""


@pytest.fixture(autouse=True)
def _in_a_folder(home, monkeypatch):
    """Questions, prices and short waits."""
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.01)
    write_questions()
    Path("prices.yaml").write_text(PRICES)


def words(server, values="{model: [large], max_tokens: [8]}", **options):
    return profile_words(server, values, **{"prices": "prices.yaml", **options})


def kept():
    """What the folder holds of payments, in US dollars."""
    return math.fsum(
        pl.read_ndjson("out/state/payments.jsonl", infer_schema_length=None)["usd"].drop_nulls()
    )


def yes(body):
    yield "yes"


# -- a limit over several calls --------------------------------------------------------------------


def test_warm_ups_and_looks_at_changes_of_the_model_count_in_later_calls(capsys):
    values = "{model: [small, large], max_tokens: [8]}"
    options = {"max_usd": 0.0005, "knobs.warm_up": 1}
    with ScriptedChats(yes) as server:
        line = mistake(words(server, values, **options), capsys, "measures ")
        assert "nothing was asked" not in line
        # the 15th begins when 420 millionths are spent, of which each took 30, and none begins
        # after it, since one can take 72
        assert len(server.bodies) == 15
        # two warm up, and at least six look at what a change of the model takes
        assert 0 < len(read_measurements("out/state/measured.jsonl")) <= 15 - 8
        assert kept() == pytest.approx(0.00045)
        for _ in range(3):
            line = mistake(words(server, values, **options), capsys, "measures ")
            assert "max_usd=0.0005 ($0.00045 is spent, and the next" in line
            assert "could cost $7.2e-05, so nothing was asked" in line
        assert len(server.bodies) == 15
        launch(words(server, values, **options | {"max_usd": 1}))
        assert kept() == pytest.approx(COST * len(server.bodies))


def test_a_warm_up_leaves_enough_for_a_measurement(capsys):
    # the limit allows one request, which would be the warm-up
    options = {"max_usd": 1.5 * MOST, "knobs.warm_up": 1}
    with ScriptedChats(yes) as server:
        mistake(words(server, **options), capsys, "measures ")
        mistake(words(server, **options), capsys, "measures ")
        known = read_measurements("out/state/measured.jsonl")
        assert len(known) == len(server.bodies) == (1.5 * MOST - MOST) // COST + 1


def breaks(body):
    yield "yes"
    raise Broken


def miscounts(body):
    yield "yes"
    yield {"usage": {**USAGE, "prompt_tokens": -1}}


def counts_nothing(body):
    yield "yes"
    yield {"usage": None}


@pytest.mark.parametrize("script", [breaks, miscounts, counts_nothing])
def test_answers_without_a_price_count_as_the_most_in_later_calls(script, capsys):
    # 6 times the most, and a little
    options = {"max_usd": 6 * MOST + 1e-6}
    with ScriptedChats(script) as server:
        for _ in range(8):
            line = mistake(words(server, **options), capsys, "measures ")
            assert kept() == pytest.approx(MOST * len(server.bodies))
        assert len(server.bodies) == 6
        assert "nothing was asked" in line


def test_answers_that_break_leave_what_others_have_reserved():
    money = Money(1.0)
    assert money.reserve(0.4)
    assert money.reserve(0.4)
    # the first is lost, and would be sent again
    money.pay(0.4)
    assert money.is_short(0.4)
    money.free(0.4)
    # the second alone may be
    assert not money.is_short(0.4)


@pytest.mark.usefixtures("_forked")
def test_what_is_under_way_at_a_kill_counts_as_the_most(capsys):
    held = threading.Event()

    def script(body):
        # the third never comes
        held.wait(60 * (len(server.bodies) == 3))
        yield "yes"

    options = {"max_usd": 2 * COST + 2 * MOST + 1e-6}
    with ScriptedChats(script) as server:
        stop_when(lambda: len(server.bodies) == 3, Command(words(server, **options)))
        held.set()
        assert kept() == pytest.approx(2 * COST + MOST)
        # one more can be paid, and after it none
        mistake(words(server, **options), capsys, "measures ")
        assert len(server.bodies) == 4
        assert kept() == pytest.approx(3 * COST + MOST)


def test_a_folder_that_keeps_no_payments_has_paid_for_what_it_measured(capsys):
    payments = Path("out/state/payments.jsonl")
    with ScriptedChats(yes) as server:
        command = words(server, "{model: [large], max_tokens: [8, 16]}", max_usd=1)
        launch(command)
        assert kept() == pytest.approx(12 * COST)
        payments.unlink()
        launch(command)
        # the sum, and the price
        assert payments.read_text().count("\n") == 2
        assert kept() == pytest.approx(12 * COST)
        payments.write_text("nothing\n")
        assert "payments.jsonl: is damaged" in mistake(command, capsys)
        assert len(server.bodies) == 12


# -- prices that change ----------------------------------------------------------------------------


def test_a_folder_goes_on_only_at_the_same_prices(capsys):
    values = "{model: [large], max_tokens: [8, 16]}"
    some = {"knobs.samples": 3}
    with ScriptedChats(yes) as server:
        launch(words(server, values, **some))
        before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        Path("prices.yaml").write_text("large: {input: 100, output: 4, cached_input: 1}\n")
        line = mistake(words(server, values), capsys)
        assert line.startswith("knobwise: prices.yaml: out was measured at other prices ")
        assert "(large.input: 1 → 100; large.cached_input: None → 1)" in line
        assert "another out folder" in line
        line = mistake(words(server, values, prices="null"), capsys)
        assert "out: holds answers that were measured with prices" in line
        for path, content in before.items():
            assert path.read_bytes() == content
        assert len(server.bodies) == 6
        # prices of models and tiers that nothing was paid at may be others
        Path("prices.yaml").write_text(
            "large: {input: 1.0, output: 4, flex: {input: 9, output: 9}}\n"
            "small: {input: 7, output: 7}\nother: {input: 1, output: 1}\n"
        )
        launch(words(server, "{model: [large, small], max_tokens: [8, 16]}"))
    table = pl.read_parquet("out/table.parquet")
    prices = dict(table.group_by("model").agg(pl.col("usd").unique().implode()).iter_rows())
    assert {model: [*set(usd)] for model, usd in prices.items()} == {
        "large": [pytest.approx(COST)],
        "small": [pytest.approx(105e-6)],
    }


def test_what_was_measured_without_prices_gets_none_later(capsys):
    values = "{model: [large], max_tokens: [8, 16]}"
    with ScriptedChats(yes) as server:
        launch(words(server, values, prices="null", **{"knobs.samples": 3}))
        line = mistake(words(server, values), capsys)
        assert "out: holds answers that were measured without prices; leave out prices" in line
        assert len(server.bodies) == 6


def test_prices_may_change_as_long_as_nothing_was_paid(capsys):
    def refuses(body):
        raise Turned(404, error={"message": "no such model"})
        yield

    values = "{model: [large], max_tokens: [8, 16]}"
    with ScriptedChats(refuses) as server:
        mistake(words(server, values), capsys, "measures ")
        Path("prices.yaml").write_text("large: {input: 2, output: 8}\n")
        server.script = yes
        launch(words(server, values))
        assert kept() == pytest.approx(12 * 2 * COST)


# -- prompts that the server has in its cache ------------------------------------------------------


class Caching:
    """Reads 100 tokens, of which all prompts share 20; it keeps each prompt by model."""

    def __init__(self):
        self.known = set()

    def __call__(self, body):
        key = body["model"], body["messages"][0]["content"]
        cached = 90 if key in self.known else 20 * bool(self.known)
        self.known.add(key)
        yield "yes"
        yield {
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
        }


def test_prompts_that_are_cached_since_they_are_sent_again_are_said(capsys):
    Path("prices.yaml").write_text("large: {input: 1, output: 4, cached_input: 0.1}\n")
    with ScriptedChats(Caching()) as server:
        launch(words(server, "{model: [large], max_tokens: [8, 16]}"))
    table = pl.read_parquet("out/table.parquet")
    # of each sample one answer is to a new prompt, and the first of these shares nothing
    assert sorted(table["tokens_cached"]) == [0, *[20] * 5, *[90] * 6]
    usd = (100 - table["tokens_cached"] + 0.1 * table["tokens_cached"] + 20) / 1e6
    assert table["usd"].to_list() == pytest.approx(usd.to_list())
    # (5 × 20 + 6 × 90) / 1200 is 53 %, less the 20 % that all prompts share
    (line,) = read_json("out/profile.json")["remarks"]
    assert line.startswith("33% of the input tokens came from the server's cache, because each ")
    assert line in capsys.readouterr().out


def test_a_beginning_that_all_prompts_share_is_no_reason_to_switch_a_cache_off():
    with ScriptedChats(Caching()) as server:
        launch(words(server, "{model: [large, small], max_tokens: [8]}"))
    assert pl.read_parquet("out/table.parquet")["tokens_cached"].sum() == 11 * 20
    assert not [r for r in read_json("out/profile.json")["remarks"] if "cache" in r]


def test_a_server_that_says_nothing_of_a_cache_has_no_such_column():
    with ScriptedChats(yes) as server:
        launch(words(server, "{model: [large], max_tokens: [8, 16]}"))
    assert "tokens_cached" not in pl.read_parquet("out/table.parquet").columns
    assert not [r for r in read_json("out/profile.json")["remarks"] if "cache" in r]
