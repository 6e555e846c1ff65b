from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import small_table

from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import ContextSampler, row_weights
from knobwise.envs.configurations.settings import BalanceConfig, BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable

FIRST_ROWS, FIRST_OF_LISTS = [44, 39, 53, 0, 43, 39], [3, 0, 4, 7, 0, 2]
LISTS = [torch.tensor([3, 5, 7, 9, 11]), torch.tensor([0]), torch.tensor([2, 4])]


def sampler(rows: torch.Tensor | list[torch.Tensor] | None, seed: int = 0, **budget: object) -> ContextSampler:
    return ContextSampler(small_table(), BudgetConfig(**budget), rows, seed)  # type: ignore[arg-type]


def test_rows_are_drawn_evenly_from_those_given() -> None:
    rows, budgets = sampler(torch.tensor([4, 8, 15, 16]))(8000)
    shares = rows.bincount(minlength=17)[[4, 8, 15, 16]] / 8000
    torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.02, rtol=0)
    assert budgets.shape == (8000,)
    assert budgets.min() > 0


def test_of_several_lists_contexts_are_drawn_in_turn_and_evenly_from_each() -> None:
    contexts = sampler(LISTS)
    contexts(4)  # no whole round: whose turn it is does not depend on what was drawn before
    rows, _ = contexts(9000)
    for number, own in enumerate(LISTS):
        drawn = rows[number::3]
        assert set(drawn.tolist()) == set(own.tolist())
        shares = drawn.bincount(minlength=60)[own] / 3000
        torch.testing.assert_close(shares, torch.full((len(own),), 1 / len(own)), atol=0.03, rtol=0)


def test_budgets_are_those_of_the_rows_of_all_lists_together() -> None:
    table = small_table()
    table.latency_ms[[0, 2, 4]] = 5.0
    table.latency_ms[[3, 5, 7, 9, 11]] = 7.0
    budgets = ContextSampler(table, BudgetConfig(low=0.0, high=1.0), LISTS, seed=0)(3000)[1]
    assert budgets.min() == 5.0  # whichever list the row came from
    assert budgets.max() == 7.0
    # 3 of the 8 rows
    assert (budgets < 6).float().mean().item() == pytest.approx(3 / 8, abs=0.03)


def test_under_a_mean_budget_worths_are_drawn() -> None:
    table = small_table()
    worths = sampler(LISTS, sense="mean")(3000)[1]
    measured = table.latency_ms[torch.cat(LISTS)]
    assert worths.min() >= measured.min()
    assert measured.max() < worths.max() <= 30 * measured.max()


def unbalanced() -> ProfileTable:
    """Data set a has 48 rows and b 12; configuration 0 was profiled for rows 0 to 5 only, of two samples each."""
    table = small_table()
    types = tuple("rare" if row % 20 == 0 else "common" for row in range(60))
    table = replace(table, datasets=("a",) * 48 + ("b",) * 12, question_types=types)
    mask = table.mask.clone()
    mask[6:, 0] = False
    cells = {name: getattr(table, name).masked_fill(~mask, torch.nan) for name in ("accuracy", "latency_ms")}
    return replace(table, mask=mask, **cells)


@pytest.mark.parametrize(
    ("balance", "share_of_b"),
    [(BalanceConfig(by="dataset"), 0.5), (BalanceConfig(by="dataset", power=0.5), 12**0.5 / (12**0.5 + 48**0.5))],
)
def test_small_data_sets_are_drawn_more_often(balance: BalanceConfig, share_of_b: float) -> None:
    table = unbalanced()
    weights = row_weights(table, balance, torch.arange(60))
    rows, budgets = ContextSampler(table, BudgetConfig(), None, 0, weights)(20_000)
    assert (rows >= 48).float().mean().item() == pytest.approx(share_of_b, abs=0.015)
    shares = rows.bincount(minlength=60)[48:] / (rows >= 48).sum()
    torch.testing.assert_close(shares, torch.full((12,), 1 / 12), atol=0.015, rtol=0)
    assert budgets.min() > 0


def test_question_types_and_configurations() -> None:
    table, everything = unbalanced(), torch.arange(60)
    weights = row_weights(table, BalanceConfig(by="question_type"), everything)
    assert weights is not None
    assert weights[[0, 20, 40]].tolist() == pytest.approx([1 / 3] * 3)
    assert float(weights.sum()) == pytest.approx(2)
    weights = row_weights(table, BalanceConfig(by="configuration"), everything)
    assert weights is not None
    # 11 configurations were profiled for all 60 rows, one for six of them; then among rows 3 to 12 for three of ten
    assert weights[0].item() == pytest.approx(11 / 60 + 1 / 6)
    assert weights[6].item() == pytest.approx(11 / 60)
    assert float(weights.sum()) == pytest.approx(12)
    some = row_weights(table, BalanceConfig(by="configuration", power=0.5), torch.arange(3, 13))
    assert some is not None
    assert some[[0, 3, 6]].tolist() == pytest.approx([0, 11 / 10**0.5 + 1 / 3**0.5, 11 / 10**0.5])
    later = row_weights(table, BalanceConfig(by="dataset"), torch.arange(40, 60))  # of a 8 rows, of b 12
    assert later is not None
    assert later[:40].sum() == 0
    assert later[[40, 59]].tolist() == pytest.approx([1 / 8, 1 / 12])


def test_weights_hold_in_each_of_several_lists() -> None:
    lists = [torch.tensor([0, 10, 30]), torch.tensor([5])]
    rows, _ = ContextSampler(small_table(), BudgetConfig(), lists, 0, torch.arange(60.0))(20_000)
    assert set(rows[1::2].tolist()) == {5}
    assert set(rows[::2].tolist()) == {10, 30}
    shares = rows[::2].bincount(minlength=60)[[0, 10, 30]] / 10_000
    torch.testing.assert_close(shares, torch.tensor([0, 0.25, 0.75]), atol=0.015, rtol=0)


@pytest.mark.parametrize("weights", [None, torch.rand(60)])
@pytest.mark.parametrize("rows", [torch.arange(20), LISTS])
def test_contexts_come_from_the_seed_and_come_again(weights: torch.Tensor | None, rows: Any) -> None:
    one, same, other = (ContextSampler(small_table(), BudgetConfig(), rows, seed, weights) for seed in (0, 0, 1))
    first = one(40)
    assert all(map(torch.equal, first, same(40)))
    assert not torch.equal(first[0], other(40)[0])
    one.set_back(one.before)
    assert all(map(torch.equal, first, one(40)))


def test_equal_seeds_without_weights_draw_what_they_always_drew() -> None:
    """Written down before there were weights."""
    assert sampler(None)(6)[0].tolist() == FIRST_ROWS
    assert sampler(LISTS)(6)[0].tolist() == FIRST_OF_LISTS
    assert row_weights(small_table(), BalanceConfig(), torch.arange(60)) is None


def test_nothing_to_draw_from_and_a_balance_that_cannot_be() -> None:
    for rows in (torch.tensor([], dtype=torch.int64), [], [torch.arange(3), torch.tensor([], dtype=torch.int64)]):
        with pytest.raises(InputError, match="no samples to draw from"):
            sampler(rows)
    with pytest.raises(InputError, match=r"balance\.by='colour'"):
        BalanceConfig(by="colour")
    with pytest.raises(InputError, match=r"balance\.power=0"):
        BalanceConfig(power=0)
    with pytest.raises(InputError, match="has no question types"):
        row_weights(small_table(), BalanceConfig(by="question_type"), torch.arange(3))
    with pytest.raises(InputError, match="are of 'small'"):
        row_weights(small_table(), BalanceConfig(by="dataset"), torch.arange(3))
    with pytest.raises(InputError, match="are of 'a'"):
        row_weights(unbalanced(), BalanceConfig(by="dataset"), torch.arange(40))
    with pytest.raises(ValueError, match="nor all 0"):
        ContextSampler(small_table(), BudgetConfig(), None, 0, torch.zeros(60))
