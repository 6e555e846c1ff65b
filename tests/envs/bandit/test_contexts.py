"""Budgets, how they are encoded, and the contexts that are drawn with them."""

import math

import numpy as np
import pytest
import torch
from helpers import close, identical, input_error, small_table, table_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from knobwise.envs import BudgetConfig, ConfigBandit, default_budgets
from knobwise.envs.bandit import budgets
from knobwise.envs.bandit.budgets import (
    MIN_LATENCY_MS,
    STRATEGIES,
    BudgetEncoding,
    few_budgets,
    judged_values,
    log_measured,
    log_ms,
    value_range,
)
from knobwise.envs.bandit.contexts import BudgetSampler, ContextSampler, RowSampler
from knobwise.envs.bandit.settings import TAKE_VALUES
from knobwise.profiling.design.cell_design import balanced_cells, with_cells

ZEROS = torch.zeros(20_000, dtype=torch.int64)
HALF = math.sqrt(0.5)


def of_latencies(latency_ms):
    """A table with these latencies [N, C]; NaN where not profiled."""
    return table_of(0 * latency_ms, latency_ms)


def draw(table, rows, seed=0, **settings):
    return BudgetSampler(table, BudgetConfig(**settings))(rows, torch.Generator().manual_seed(seed))


def test_relative_is_a_profiled_latency_of_the_same_sample_times_a_factor():
    table = small_table(holes=0.5)
    rows = torch.arange(60).repeat(50)
    factors = torch.tensor([0.8, 1.0, 1.2])
    drawn = draw(table, rows, strategy="relative")
    products = table.latency_ms[rows].nan_to_num(1e9)[:, :, None] * factors  # [n, C, 3]
    hit = (products - drawn[:, None, None]).abs() < 1e-4
    assert hit.flatten(1).any(1).all()
    assert hit.any(1).float().mean(0).min() > 0.3  # each factor a third of the time
    assert hit.any(2).any(0).all()  # and every configuration at times


def test_fixed_draws_each_value():
    drawn = draw(small_table(), ZEROS, strategy="fixed", values_ms=(5.0, 7.0))
    assert drawn.unique().tolist() == [5.0, 7.0]
    assert drawn.mean().item() == pytest.approx(6.0, abs=0.1)


@pytest.mark.parametrize(
    ("strategy", "quarters"),
    [
        ("quantiles", [4.0, 12.25, 25.0, 42.25, 64.0]),  # at ranks .2, .35, .5, .65, .8
        ("uniform", [4.0, 19.0, 34.0, 49.0, 64.0]),  # even in ms
    ],
)
def test_budgets_between_two_quantiles(strategy, quarters, monkeypatch):
    monkeypatch.setattr(budgets, "RANGE", (0.2, 0.8))
    table = of_latencies(torch.linspace(0, 10, 1001).square().reshape(1001, 1))
    drawn = draw(table, ZEROS, strategy=strategy)
    shares = torch.linspace(0, 1, 5)
    torch.testing.assert_close(drawn.quantile(shares), torch.tensor(quarters), rtol=0.03, atol=0.1)


@pytest.mark.parametrize("values_ms", [(), (5.0, 50.0)])
def test_spread_is_half_by_rank_and_half_even_in_the_logarithm(values_ms, monkeypatch):
    monkeypatch.setattr(budgets, "RANGE", (0.2, 0.8))
    table = of_latencies(torch.linspace(0, 10, 1001).square().reshape(1001, 1))
    drawn = draw(table, ZEROS, strategy="spread", values_ms=values_ms)
    low, high = values_ms or (4.0, 64.0)
    low, high = low * math.exp(-0.15), high * math.exp(0.15)
    assert min(low, 4.0) - 1e-3 <= float(drawn.min())
    assert float(drawn.max()) <= max(high, 64.0) + 1e-3
    # the share below a budget is the mean of the two shares
    for budget in (6.0, 16.0, 40.0):
        by_rank = (math.sqrt(budget) / 10 - 0.2) / 0.6
        even = math.log(budget / low) / math.log(high / low)
        share = (drawn <= budget).double().mean().item()
        assert share == pytest.approx((by_rank + even) / 2, abs=0.03)


@pytest.mark.parametrize("strategy", ["relative", "quantiles", "spread"])
def test_budgets_are_positive_where_a_timer_said_zero(strategy, monkeypatch):
    monkeypatch.setattr(budgets, "RANGE", (0.0, 0.97))
    table = of_latencies(torch.tensor([[0.0, 0.0], [0.0, 3.0]]))
    drawn = draw(table, torch.tensor([0, 1] * 50), strategy=strategy)
    assert drawn.isfinite().all()
    assert drawn.min() >= MIN_LATENCY_MS


@pytest.mark.parametrize("per_sample", [2, 4])
def test_default_budgets_of_a_sparse_profile_are_near_those_of_the_whole_one(per_sample):
    # a part of the sample, a part of the configuration, and noise
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(2000, 1, generator=generator), torch.linspace(0, 2, 32)
    noise = 0.25 * torch.randn(2000, 32, generator=generator)
    table = of_latencies((0.4 * sizes[0] + sizes[1] + noise).exp())
    sparse = with_cells(table, balanced_cells(2000, 32, per_sample))
    fastest_measured = sparse.latency_ms.nan_to_num(torch.inf).amin(1).quantile(0.75)
    whole = default_budgets(table)
    # the fastest measured configuration of a sample is far from its fastest
    assert fastest_measured > 1.3 * whole[0]
    torch.testing.assert_close(default_budgets(sparse), whole, rtol=0.06, atol=0)


def test_the_range_of_values_and_those_that_are_judged_by_hand():
    latency = torch.arange(101.0) + 1  # 3 % and 97 % quantiles: 4 and 98
    assert value_range(latency).tolist() == pytest.approx([4, 30 * 98])
    # five, evenly apart in logarithm, the ends left out
    step = (30 * 98 / 4) ** (1 / 6)
    judged = judged_values(of_latencies(latency[:, None])).tolist()
    assert judged == pytest.approx([4 * step**k for k in range(1, 6)], rel=1e-4)
    # what costs nothing is left out
    identical(value_range(torch.cat([latency, torch.zeros(50)])), value_range(latency))
    identical(value_range(torch.zeros(4)), [1, 30])


def test_values_are_drawn_evenly_in_logarithm():
    table = of_latencies(torch.arange(101.0)[:, None] + 1)
    drawn = draw(table, ZEROS, constraint="mean").log()
    quarters = torch.histc(drawn, 4, math.log(4), math.log(30 * 98)) / len(drawn)
    close(quarters, [0.25] * 4, within=0.02)
    assert quarters.sum() == 1  # none is beyond the ends


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"constraint": "median"}, "budget.constraint"),
        ({"strategy": "best"}, "budget.strategy"),
        *[
            ({"strategy": "fixed", "values_ms": values}, "values_ms")
            for values in ((), (1.0, 0.0), (1.0, math.nan), (math.inf,))
        ],
    ],
)
def test_numbers_that_cannot_be_used_are_refused(settings, fault):
    with input_error(fault):
        BudgetSampler(small_table(), BudgetConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"values_ms": (40.0,)}, r"values_ms=.*strategy=quantiles"),
        ({"strategy": "quantiles", "values_ms": (40.0,)}, "values_ms"),
        ({"constraint": "mean", "strategy": "fixed", "values_ms": (7.0,)}, r"budget\.strategy"),
        ({"constraint": "mean", "values_ms": (7.0,)}, "values_ms"),
    ],
)
def test_settings_of_budgets_that_nothing_reads_are_refused(settings, fault):
    with input_error(fault):
        ConfigBandit(small_table(), budget=BudgetConfig(**settings))


def numbered(samples, configurations):
    """Latencies 1, 2, …: those of the first configuration, then those of the second, and so on."""
    return torch.arange(1.0, samples * configurations + 1).reshape(configurations, samples).T


FROM_38_UP = [44.0, 53.0, 69.0, 85.0, 94.0]
"""The 63 numbers from 38 to 100 at places .1·63 = 6.3, 15.75, 31.5, 47.25 and 56.7, rounded
down."""


@pytest.mark.parametrize(
    ("latency_ms", "wanted"),
    [
        # 1 … 100 at places .1·99 = 9.9, 24.75, 49.5, 74.25, 89.1; fastest 1 … 10: place 6.75,
        # upward: 8
        (numbered(10, 10), [10.9, 25.75, 50.5, 75.25, 90.1]),
        # fastest 1 … 50: place 36.75, upward: 38, above two of the quantiles
        (numbered(50, 2), FROM_38_UP),
        # neither what times out counts nor samples with nothing else
        (torch.cat([numbered(50, 2), torch.full((30, 2), 1000.0)]), FROM_38_UP),
        # the largest of a few costs is none
        (torch.tensor([[1.0, 2.0, 4.0]]).expand(30, -1), [1, 2, 4]),
        (torch.tensor([[1.0, 50.0], [2.0, 50.0], [30.0, 50.0], [40.0, torch.nan]]), [40, 50]),
        (torch.zeros(4, 2), [MIN_LATENCY_MS]),
    ],
)
def test_default_budgets_by_hand(latency_ms, wanted):
    budgets = default_budgets(of_latencies(latency_ms))
    assert budgets.tolist() == pytest.approx(wanted, rel=1e-6)
    assert len(few_budgets(budgets)) == (len(wanted) < 5)


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.1, 4.0]),
    st.booleans(),
)
@example(23351, 1, 1, 0.1, True)
def test_default_budgets_are_distinct_feasible_and_below_time_outs(
    seed, samples, configurations, rounded_to, timed_out
):
    generator = torch.Generator().manual_seed(seed)
    measured = (torch.randn(samples, configurations, generator=generator) + 1).exp()
    if rounded_to:
        measured = (measured / rounded_to).ceil() * rounded_to
    out = torch.full((samples, timed_out * (5 * configurations + 1)), 1e4)
    budgets = default_budgets(of_latencies(torch.cat([measured, out], 1)))
    assert 1 <= len(budgets) <= 5
    assert (measured.flatten() <= budgets.unsqueeze(1)).sum(1).diff().gt(0).all()
    assert 0 < budgets[0] <= budgets[-1] <= measured.max()
    assert (measured.amin(1) <= budgets[0]).double().mean() >= 0.75


def test_in_logarithms_a_measured_zero_is_a_tenth_of_the_smallest_cost_whatever_the_unit():
    least = math.log(MIN_LATENCY_MS)
    close(log_ms(torch.tensor([0.0, 1.0, math.e])), [least, 0.0, 1.0])
    for unit in (1.0, 1e-5, 1e4):
        measured = unit * torch.tensor([0.0, 2.0, 20.0, math.nan])
        close(log_measured(measured), (unit * torch.tensor([0.2, 2.0, 20.0, math.nan])).log())
    assert log_measured(torch.zeros(2)).tolist() == pytest.approx([least] * 2)


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        (1, [1.0]),
        (5, [1.0, HALF, 1.0, HALF, 0.0]),  # z, then the sines and cosines of π/4 and π/2
        (4, [HALF, 1.0, HALF, 0.0]),  # an even width leaves z out
    ],
)
def test_encodings_by_hand(width, wanted):
    encoding = BudgetEncoding(torch.tensor([1.0, math.e**2]), width)  # ln: 0 and 2, so μ = σ = 1
    result = encoding(torch.tensor([[math.e**2, 1e9]]))  # z = 1, and 4 at most
    assert result.shape == (1, 2, width)
    close(result[0, 0], wanted, within=1e-6)
    if width == 1:
        assert result[0, 1] == 4


def test_sixteen_pairs_divide_seven_octaves_evenly():
    encoding = BudgetEncoding(small_table().latency_ms.flatten(), 32)
    close(encoding.frequencies, math.pi / 4 * 2 ** torch.linspace(0, 7, 16))


def test_encoding_survives_latencies_that_never_vary_and_zeros():
    for latencies in (torch.full((5,), 7.0), torch.zeros(3)):
        assert BudgetEncoding(latencies)(torch.tensor([0.0, 7.0, 1e6])).isfinite().all()


LISTS = [torch.tensor([3, 5, 7, 9, 11]), torch.tensor([0]), torch.tensor([2, 4])]


def sampler(rows):
    return ContextSampler(small_table(), BudgetConfig(), rows, seed=0)


def shares_drawn(table, by, rows):
    """Of the samples of a table, [N], for each list of rows."""
    drawn, _ = ContextSampler(table, BudgetConfig(), rows, 0, by)(6000 * len(rows))
    counts = [drawn[m :: len(rows)].bincount(minlength=table.num_samples) for m in range(len(rows))]
    return torch.stack(counts) / 6000


def test_balanced_groups_are_drawn_as_often_as_each_other():
    # a, a, a, b, and another a that is not drawn from; each list is balanced by the sizes of both
    # together
    table = small_table(5, datasets=tuple("aaaba"), question_types=tuple("xyyyx"))
    shares = shares_drawn(table, "dataset", [torch.arange(4)])
    close(shares, [[1 / 6, 1 / 6, 1 / 6, 1 / 2, 0]], within=0.025)
    # of 1/1, 1/3, 1/3
    shares = shares_drawn(table, "question_type", [torch.arange(3), torch.tensor([3])])
    close(shares, [[3 / 5, 1 / 5, 1 / 5, 0, 0], [0, 0, 0, 1, 0]], within=0.025)


def test_samples_with_rare_configurations_are_drawn_more_often():
    table = of_latencies(torch.tensor([[1.0, 2.0], [1.0, math.nan], [1.0, math.nan]]))
    shares = shares_drawn(table, "configuration", [torch.arange(3)])  # of 1/3 + 1, 1/3, 1/3
    close(shares, [[2 / 3, 1 / 6, 1 / 6]], within=0.025)


@pytest.mark.parametrize("by", ["dataset", "question_type"])
def test_nothing_to_balance_is_refused(by):
    with input_error(f"balance.by={by}: .*'small' have fewer than two"):
        ContextSampler(small_table(), BudgetConfig(), None, 0, by)


@pytest.mark.parametrize("lists", [[torch.tensor([4, 8, 15, 16])], LISTS])
def test_of_several_lists_contexts_are_drawn_in_turn_and_evenly_from_each(lists):
    contexts = sampler(lists)
    contexts(4)  # no whole round: whose turn it is does not depend on what was drawn before
    rows, budgets = contexts(9000)
    assert budgets.shape == (9000,)
    for number, own in enumerate(lists):
        drawn, counts = rows[number :: len(lists)].unique(return_counts=True)
        identical(drawn, own)
        close(counts / counts.sum(), [1 / len(own)] * len(own), within=0.03)


def test_budgets_are_those_of_the_rows_of_all_lists_together(monkeypatch):
    monkeypatch.setattr(budgets, "RANGE", (0.0, 1.0))
    table = small_table()
    table.latency_ms[torch.cat(LISTS)] = 5.0
    table.latency_ms[LISTS[0]] = 7.0
    drawn = ContextSampler(table, BudgetConfig(), LISTS, seed=0)(3000)[1]
    assert (drawn.min(), drawn.max()) == (5.0, 7.0)  # whichever list the row came from
    # 3 of the 8 rows
    assert (drawn < 6).float().mean().item() == pytest.approx(3 / 8, abs=0.03)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("balance", ["none", "question_type"])
@pytest.mark.parametrize("rows", [torch.arange(20), LISTS])
def test_contexts_come_from_the_seed_and_come_again(rows, balance, strategy):
    table = small_table(holes=0.3, question_types=("x", "y", "y") * 20)
    values = (5.0, 7.0, 9.0) if strategy in TAKE_VALUES else ()
    budget = BudgetConfig(strategy, values_ms=values)
    one, same, other = (ContextSampler(table, budget, rows, seed, balance) for seed in (0, 0, 1))
    first = one(40)
    identical(first, same(40))
    assert not torch.equal(first[0], other(40)[0])
    one.set_back(one.before)
    identical(first, one(40))


def test_equal_seeds_draw_what_they_always_drew():
    identical(sampler(None)(6)[0], [44, 39, 53, 0, 43, 39])
    identical(sampler(LISTS)(6)[0], [3, 0, 4, 7, 0, 2])


def test_nothing_to_draw_from_is_refused():
    for rows in (torch.arange(0), [], [torch.arange(3), torch.arange(0)]):
        with input_error("no samples to draw from"):
            sampler(rows)


@pytest.mark.parametrize("rows", [[1, 2, 100_000], torch.tensor([-1, 0]), [torch.tensor([60])]])
def test_rows_that_the_table_does_not_have_are_refused(rows):
    with input_error("rows: must be from 0 to 59"):
        ContextSampler(small_table(60), BudgetConfig(), rows, seed=0)


# -- the rows to draw from -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (range(5, 8), [5, 6, 7]),
        ([5, 7], [5, 7]),
        (np.array([5, 7], dtype=np.int32), [5, 7]),
        (torch.tensor([5, 7], dtype=torch.uint8), [5, 7]),
        ([torch.tensor([5, 7]), torch.tensor([6])], [5, 6, 7]),
    ],
)
def test_rows_are_whole_numbers(rows, wanted):
    sampler = RowSampler(small_table(40), rows)
    assert sampler.together.dtype == torch.int64
    assert sampler.together.tolist() == wanted
    assert set(sampler(60).tolist()) == set(wanted)


MASK = torch.arange(40) > 9


@pytest.mark.parametrize(
    "rows",
    [
        MASK,
        MASK.numpy(),
        MASK.tolist(),
        [MASK, MASK],
        torch.tensor([1.9, 2.9]),
        [1.0, 2.0],
        MASK.nonzero(),
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        torch.tensor(3),
        ["1", "2"],
    ],
    ids=range(11),
)
def test_a_mask_and_what_else_is_no_list_of_rows_is_refused(rows):
    with input_error(r"rows: .*nonzero"):
        RowSampler(small_table(40), rows)


@pytest.mark.parametrize("rows", [[], torch.tensor([]), [torch.tensor([1]), torch.tensor([])]])
def test_an_empty_list_of_rows_is_refused(rows):
    with input_error("no samples"):
        RowSampler(small_table(40), rows)
