"""A profile measured through servers that do not do what the protocol says, or do it slowly."""

from pathlib import Path

import polars as pl
import pytest
from commands import launch, mistake, refused
from scripted_endpoint import USAGE, ScriptedEndpoint

PRICES = """
large: {input: 1, output: 4, flex: {input: 0.5, output: 2}}
small: {input: 1, output: 4}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(home, monkeypatch):
    """Questions, prices and short waits."""
    monkeypatch.setattr("knobwise.profiling.endpoint.client.FIRST_WAIT_S", 0.01)
    rows = [{"id": f"q{i}", "question": f"Is it {i}?", "answer": str(i)} for i in range(6)]
    pl.DataFrame(rows).write_ndjson("q.jsonl")
    Path("prices.yaml").write_text(PRICES)


def words(server, values="{model: [large], max_tokens: [8, 16]}", out="out", **options):
    options = {"model": "openai", "endpoint": server.url, "data": "q.jsonl", **options}
    options = {"knobs.warm_up": 0, "concurrency": 1, **options}
    return [
        "profile",
        f"knobs.values={values}",
        f"out={out}",
        *(f"{k}={v}" for k, v in options.items()),
    ]


# -- tokens and tiers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [-5, float("inf"), float("nan"), 2.5, 10**30], ids=lambda count: str(count)
)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_tokens_that_cannot_be_are_refused_at_the_first_answer(name, count, capsys):
    def script(body):
        yield "1"
        yield {"usage": {**USAGE, name: count}}

    with ScriptedEndpoint(script) as server:
        for options in ({"prices": "prices.yaml", "max_usd": 1}, {}):
            line = mistake(words(server, **options), capsys, "measures ")
            assert name in line
            assert len(server.bodies) == 1
            server.bodies.clear()


def test_a_text_of_no_tokens_has_no_price(capsys):
    def script(body):
        yield "1"
        yield {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}

    with ScriptedEndpoint(script) as server:
        assert "prices" in mistake(words(server, prices="prices.yaml"), capsys, "measures ")
        assert len(server.bodies) == 1
        launch(words(server))


def test_thinking_in_the_total_alone_is_paid_for():
    def script(body):
        yield "1"
        yield {"usage": {**USAGE, "total_tokens": 110}}

    with ScriptedEndpoint(script) as server:
        launch(words(server, prices="prices.yaml"))
    table = pl.read_parquet("out/table.parquet")
    assert {*table["tokens_out"]} == {100}
    assert table["usd"].to_list() == pytest.approx([410e-6] * 12)


def test_an_answer_costs_what_its_tier_does(capsys):
    def script(body):
        yield "1"
        # one model has no capacity for it
        tier = body["service_tier"] if body["model"] == "large" else "default"
        yield {"service_tier": tier}

    values = "{model: [large], service_tier: [default, flex]}"
    with ScriptedEndpoint(script) as server:
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

    with ScriptedEndpoint(script) as server:
        line = mistake(words(server, prices="prices.yaml"), capsys, "measures ")
        assert "service_tier=priority" in line
        assert len(server.bodies) == 1
