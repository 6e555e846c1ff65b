"""Off-policy estimates, by hand and against the truth of a simulated table."""

import numpy as np
import pytest
import torch

from knobwise.agents.learning.off_policy import judge
from knobwise.agents.serving.request_log import Logged
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.simulated.calibrated import SimulatedConfig, simulate


def logged_outcomes(
    choice: list[int], propensity: list[list[float]], reward: list[float]
) -> Logged:
    """Requests of which nothing else is known."""
    n = len(choice)
    ones, chances = np.ones(n), np.array(propensity)
    met, offset = np.ones(n, bool), np.zeros(chances.shape, np.float32)
    accuracy = np.array(reward, np.float64)
    ids = np.arange(n).astype(str)
    chosen, tried = np.array(choice), np.full(n, -1)
    return Logged(
        ids,
        {},
        met,
        ones,
        ones,
        offset,
        ones,
        chosen,
        chosen,
        tried,
        chances,
        0 * ones,
        ones,
        met,
        accuracy,
    )


def test_every_estimate_by_hand() -> None:
    chances = [[0.8, 0.2, 0.0]] * 4
    logged = logged_outcomes([0, 1, 0, 0], chances, [1.0, 0.0, 0.5, 1.0])
    expected = torch.tensor([[0.6, 0.4, 0.9]]).expand(4, -1)
    old, new = np.zeros(4, np.int64), np.array([1, 1, 0, 2])
    judged = judge(logged, expected, old, new)
    assert (judged.requests, judged.different, judged.unsupported) == (
        4,
        2,
        1,
    )  # 2 cannot be drawn
    # doubly robust, old: 0.6 + (r − 0.6)/0.8 where 0 was drawn
    assert judged.doubly_robust["old"].value == pytest.approx(
        (1.1 + 0.6 + 0.475 + 1.1) / 4, abs=1e-6
    )
    # new: 0.4 without a draw, 0.4 + (0 − 0.4)/0.2, then as the old
    assert judged.doubly_robust["new"].value == pytest.approx(
        (0.4 - 1.6 + 0.475 + 1.1) / 4, abs=1e-6
    )
    assert judged.doubly_robust["difference"].value == pytest.approx((-0.7 - 2.2) / 4, abs=1e-6)
    assert judged.direct["difference"].value == pytest.approx(-0.1, abs=1e-6)
    assert judged.self_normalised["old"].value == pytest.approx(2.5 / 3)
    # weights 5, 1.25, 1.25 for rewards 0, 0.5, 1
    assert judged.self_normalised["new"].value == pytest.approx(1.875 / 7.5)
    assert judged.effective_requests["new"] == pytest.approx(7.5**2 / (25 + 2 * 1.25**2))
    assert judged.clipped == 0
    assert judge(logged, expected, old, new, clip=2.0).clipped == 1
    assert not judged.better


def test_a_new_controller_is_better_only_where_the_log_shows_it() -> None:
    generator = np.random.default_rng(0)
    choice = generator.integers(2, size=400)
    logged = logged_outcomes(choice.tolist(), [[0.5, 0.5]] * 400, (0.4 + 0.3 * choice).tolist())
    old, new, flat = np.zeros(400, np.int64), np.ones(400, np.int64), torch.full((400, 2), 0.5)
    judged = judge(logged, flat, old, new)
    assert judged.better
    assert judged.bound > 0.2
    assert not judge(logged, flat, new, old).better
    assert not judge(logged, flat, old, old).better
    few = logged.take(np.arange(8))
    assert not judge(few, flat[:8], old[:8], new[:8], confidence=0.5).better
    # without exploration nothing is shown, whatever the model says
    greedy = logged._replace(choice=old, propensity=np.tile([1.0, 0.0], (400, 1)))
    judged = judge(greedy, torch.tensor([[0.1, 0.9]]).expand(400, -1), old, new)
    assert (judged.different, judged.unsupported, judged.better) == (0, 400, False)


@pytest.mark.parametrize(("share", "requests"), [(0.1, 200), (0.1, 1000), (0.05, 1000)])
def test_95_percent_intervals_hold_the_truth_in_at_least_90_of_100_replayed_logs(
    share: float, requests: int
) -> None:
    """The model is wrong, and the new policy, which trusts it, differs from the old one nearly
    everywhere."""
    table = simulate(
        SimulatedConfig(("okvqa",), samples=400, grid="27", image_width=0, language_width=4)
    )
    budgets = default_budgets(table)
    utility = (
        torch.stack([table.accuracy * (table.latency_ms <= b) for b in budgets], 1)
        .double()
        .flatten(0, 1)
    )
    noise = torch.Generator().manual_seed(0)
    typical = utility.mean(0, keepdim=True)
    wrong = 0.6 * typical + 0.4 * utility
    wrong = (wrong + 0.15 * torch.randn(utility.shape, generator=noise, dtype=torch.float64)).clamp(
        0, 1
    )
    old, new = typical.expand_as(utility).argmax(1), wrong.argmax(1)
    tried = (typical + 0.5 * wrong).topk(6, 1).indices
    chances = torch.zeros_like(utility).scatter_(1, tried, share / 6)
    chances[torch.arange(len(old)), old] += 1 - share
    chances /= chances.sum(1, keepdim=True)
    judged_as = torch.where(chances.gather(1, new.unsqueeze(1)).squeeze(1) > 0, new, old)
    true = {
        name: utility.gather(1, c.unsqueeze(1)).mean().item()
        for name, c in (("old", old), ("new", judged_as))
    }
    true["difference"] = true["new"] - true["old"]
    held = dict.fromkeys(
        ((kind, name) for kind in ("doubly_robust", "self_normalised") for name in true), 0
    )
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(utility), (requests,), generator=generator)
        choice = chances[rows].multinomial(1, generator=generator).squeeze(1)
        rewards = utility[rows, choice].tolist()
        logged = logged_outcomes(choice.tolist(), chances[rows].numpy(), rewards)  # type: ignore[arg-type]
        judged = judge(logged, wrong[rows], old[rows].numpy(), new[rows].numpy())
        assert judged.different > requests / 5
        for kind, name in held:
            low_high = getattr(judged, kind)[name]
            held[kind, name] += low_high.low <= true[name] <= low_high.high
    assert min(held.values()) >= 90, held


def test_a_model_that_is_wrong_where_the_log_is_thin_shows_nothing() -> None:
    """All answers are wrong. The model knows that of what the old policy chooses, and not of what
    the new one would."""
    requests = 1000
    expected = torch.tensor([[0.0, 0.2]]).expand(requests, -1)
    differs = np.arange(requests) % 5 == 0
    old, new = np.zeros(requests, np.int64), differs.astype(np.int64)
    chances = np.tile([0.994, 0.006], (requests, 1))
    better = 0
    for seed in range(100):
        choice = (np.random.default_rng(seed).random(requests) < 0.006).astype(np.int64)
        logged = logged_outcomes(choice.tolist(), chances, [0.0] * requests)
        better += judge(logged, expected, old, new).better
    assert better <= 5
