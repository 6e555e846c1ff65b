"""What an answer cost, by what the server says of it."""

import math
from pathlib import Path

import pytest
from helpers import input_error

from knobwise.profiling.endpoint.prices import Price, answer_usd, lacking_tiers, read_prices
from knobwise.profiling.endpoint.token_counts import count_tokens

PRICE = Price(1, 4)


def usage(read, written, total=None, **more):
    counts = {"prompt_tokens": read, "completion_tokens": written}
    return {**counts, "total_tokens": read + written if total is None else total, **more}


def test_thinking_that_only_the_total_counts_is_paid_for():
    thought = {"completion_tokens_details": {"reasoning_tokens": 550}}
    assert answer_usd(PRICE, usage(100, 50)) == pytest.approx(0.0003)
    assert answer_usd(PRICE, usage(100, 600, **thought)) == pytest.approx(0.0025)
    assert answer_usd(PRICE, usage(100, 50, 700, **thought)) == pytest.approx(0.0025)
    # a total that counts less than its parts says nothing
    assert answer_usd(PRICE, usage(100, 50, 0)) == pytest.approx(0.0003)
    assert count_tokens({"prompt_tokens": 3, "total_tokens": 10}) == (3, 7, 0)


def test_the_names_of_responses_are_those_of_the_same_tokens():
    details = {"input_tokens_details": {"cached_tokens": 40}}
    counts = {"input_tokens": 100, "output_tokens": 50, "total_tokens": 150, **details}
    assert count_tokens(counts) == (100, 50, 40)
    assert answer_usd(Price(1, 4, cached_input=0.5), counts) == pytest.approx(280e-6)


@pytest.mark.parametrize("said", [None, {}, {"prompt_tokens": None}, {"total_tokens": 9}])
def test_a_price_is_not_known_where_tokens_are_not_counted(said):
    assert count_tokens(said) is None
    assert math.isnan(answer_usd(PRICE, said))


@pytest.mark.parametrize("said", [usage(0, 0), usage(9, 0), usage(0, 9)])
def test_a_text_took_tokens(said):
    assert math.isnan(answer_usd(PRICE, said))
    # an answer that is none may have taken none
    assert answer_usd(PRICE, said, has_text=False) <= 36e-6


IMPOSSIBLE = [-1, -0.5, math.inf, -math.inf, math.nan, True, "12", 1.5, 10**400, 10**12, [3], {}]


@pytest.mark.parametrize("count", IMPOSSIBLE, ids=lambda count: str(count)[:9])
def test_counts_that_cannot_be_have_no_price(count):
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert math.isnan(answer_usd(PRICE, {**usage(10, 5), name: count}))
        with pytest.raises(ValueError, match=name):
            count_tokens({**usage(10, 5), name: count})
    assert math.isnan(
        answer_usd(PRICE, usage(10, 5, prompt_tokens_details={"cached_tokens": count}))
    )


def test_no_more_tokens_come_from_the_cache_than_are_read():
    assert math.isnan(answer_usd(PRICE, usage(10, 5, prompt_tokens_details={"cached_tokens": 11})))
    assert count_tokens(usage(10, 5, prompt_tokens_details={"cached_tokens": 10})).cached == 10
    # what is no object says nothing of a cache
    assert count_tokens(usage(10, 5, prompt_tokens_details=[1])) == (10, 5, 0)
    assert count_tokens(usage(10.0, 5)) == (10, 5, 0)


def test_tiers_and_long_prompts_have_prices_of_their_own():
    Path("p.yaml").write_text("""
        large:
            input: 1
            output: 4
            cached_input: 0.5
            above: {1000: {input: 2, output: 6}, 9_000: {input: 3, output: 9}}
            flex: {input: 0.5, output: 2, above: {1000: {input: 1, output: 3}}}
            priority: {input: 2, output: 8}
    """)
    large = read_prices("p.yaml")["large"]

    def millionths(read, tier=None):
        return round(1e6 * answer_usd(large, usage(read, 10), tier))

    # all tokens of a prompt that is longer cost more, and none of one that is just as long
    assert [millionths(n) for n in (1000, 1001, 9000, 9001)] == [1040, 2062, 18060, 27093]
    assert [millionths(n, "flex") for n in (100, 1000, 1001)] == [70, 520, 1031]
    assert millionths(2000, "priority") == 4080
    for standard in ("default", "auto", "", "standard", "on_demand"):
        assert millionths(100, standard) == 140
    for unknown in ("batch", 3, ["flex"], "Flex"):
        assert math.isnan(answer_usd(large, usage(100, 10), unknown))
    # the most is that of the dearest tier, and of the longest prompt that it may be
    assert large.most_usd(9001, 10) == pytest.approx(27093e-6)
    assert large.most_usd(1000, 10) == pytest.approx(2080e-6)


def test_a_tier_of_a_knob_without_a_price_is_said():
    Path("p.yaml").write_text(
        "large: {input: 1, output: 1, flex: {input: 0.5, output: 0.5}}\n"
        "small: {input: 1, output: 1}"
    )
    prices = read_prices("p.yaml")
    rows = [{"model": "large", "service_tier": tier} for tier in ("default", "flex", None)]
    assert lacking_tiers(prices, [*rows, {"model": "small"}, {}]) == ""
    said = lacking_tiers(prices, [*rows, {"model": "small", "service_tier": "flex"}])
    assert "service_tier=flex" in said
    assert "small" in said


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("m: {input: 1, output: 1, above: 3}", "above"),
        ("m: {input: 1, output: 1, above: {200k: {input: 1, output: 1}}}", "200k"),
        ("m: {input: 1, output: 1, above: {true: {input: 1, output: 1}}}", "above"),
        ("m: {input: 1, output: 1, above: {9: {input: 1}}}", "above.9"),
        ("m: {input: 1, output: 1, above: {9: {input: 1, output: -1}}}", "above.9"),
        ("m: {input: 1, output: 1, above: {9: {input: 1, output: 1, above: {}}}}", "above.9"),
        ("m: {input: 1, output: 1, flex: {input: 1}}", "flex"),
        ("m: {input: 1, output: 1, flex: {input: 1, output: 1, slow: {}}}", "slow"),
        ("m: {input: 1, output: 1, flex: {input: 1, output: 1, image_tokens: 9}}", "image_tokens"),
        ("m: {input: {a: 1}, output: 1}", "input"),
        ("m: {input: 1, output: 1, flex: 3}", "flex"),
        ("m: &m {input: 1, output: 1, above: {9: *m}}", "above.9"),
        ("m: &m {input: 1, output: 1, flex: *m}", "flex"),
    ],
)
def test_prices_of_another_form_are_refused(text, fault):
    Path("p.yaml").write_text(text)
    with input_error(fault):
        read_prices("p.yaml")


@pytest.fixture(autouse=True)
def _in_a_folder(home):
    """A folder of its own for each test."""
