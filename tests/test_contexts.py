from __future__ import annotations

import pytest
import torch
from helpers import small_table

from knobwise.envs.budgets import BudgetConfig
from knobwise.envs.contexts import ContextSampler
from knobwise.envs.errors import InputError

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
    rows, _ = sampler(LISTS)(9000)
    for number, own in enumerate(LISTS):
        drawn = rows[number::3]
        assert set(drawn.tolist()) == set(own.tolist())
        shares = drawn.bincount(minlength=60)[own] / 3000
        torch.testing.assert_close(shares, torch.full((len(own),), 1 / len(own)), atol=0.03, rtol=0)


def test_whose_turn_it_is_does_not_depend_on_what_was_drawn_before() -> None:
    contexts = sampler(LISTS)
    contexts(4)  # no whole round
    assert set(contexts(9)[0][1::3].tolist()) == {0}


def test_budgets_are_those_of_the_rows_of_all_lists_together() -> None:
    table = small_table()
    table.latency_ms[[0, 2, 4]] = 5.0
    table.latency_ms[[3, 5, 7, 9, 11]] = 7.0
    budgets = ContextSampler(table, BudgetConfig(low=0.0, high=1.0), LISTS, seed=0)(3000)[1]
    assert budgets.min() == 5.0  # whichever list the row came from
    assert budgets.max() == 7.0
    # 3 of the 8 rows
    assert (budgets < 6).float().mean().item() == pytest.approx(3 / 8, abs=0.03)


@pytest.mark.parametrize("rows", [torch.arange(20), LISTS])
def test_set_back_to_where_it_was_it_draws_the_same_again(rows: torch.Tensor | list[torch.Tensor]) -> None:
    contexts = sampler(rows)
    contexts(12)
    first = contexts(12)
    contexts.generator.set_state(contexts.before)
    again = contexts(12)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_under_a_mean_budget_worths_are_drawn() -> None:
    table = small_table()
    worths = sampler(LISTS, sense="mean")(3000)[1]
    measured = table.latency_ms[torch.cat(LISTS)]
    assert worths.min() >= measured.min()
    assert measured.max() < worths.max() <= 30 * measured.max()


def test_nothing_to_draw_from() -> None:
    for rows in (torch.tensor([], dtype=torch.int64), [], [torch.arange(3), torch.tensor([], dtype=torch.int64)]):
        with pytest.raises(InputError, match="no samples to draw from"):
            sampler(rows)
