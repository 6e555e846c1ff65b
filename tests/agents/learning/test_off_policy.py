"""Off-policy estimates, by hand and against the truth of a simulated table."""

import pytest
import torch
from replayed import logged_outcomes

from knobwise.agents.learning import off_policy
from knobwise.agents.learning.logged import of_choices
from knobwise.agents.learning.off_policy import doubly_robust, estimate_gain
from knobwise.envs import default_budgets
from knobwise.serving.exploration import Exploration
from knobwise.testbeds.simulated.calibrated import SimulatedConfig, simulate


def test_every_estimate_by_hand(monkeypatch):
    logged = logged_outcomes([0, 1, 0, 0], [[0.8, 0.2, 0.0]] * 4, [1.0, 0.0, 0.5, 1.0])
    expected = torch.tensor([[0.6, 0.4, 0.9]]).expand(4, -1)
    old = torch.zeros(4, dtype=torch.int64)
    new = torch.tensor([1, 1, 0, 2])  # 2 cannot be drawn
    judged = estimate_gain(logged, expected, old, new)
    assert (judged.requests, judged.different, judged.better) == (4, 2, False)
    # old: 0.6 + (1 − 0.6)/0.8, then 0.6 without a draw; new: 0.4, then 0.4 + (0 − 0.4)/0.2
    assert judged.gain == pytest.approx(-2.9 / 4, abs=1e-6)
    monkeypatch.setattr(off_policy, "CLIP", 2.0)
    # 0.4 + 2·(0 − 0.4)
    assert estimate_gain(logged, expected, old, new).gain == pytest.approx(-1.7 / 4, abs=1e-6)


def test_a_new_controller_is_better_only_where_the_log_shows_it(monkeypatch):
    choice = torch.randint(2, (400,))
    logged = logged_outcomes(choice, [[0.5, 0.5]] * 400, 0.4 + 0.3 * choice)
    old = torch.zeros_like(choice)
    new = torch.ones_like(choice)
    flat = torch.full((400, 2), 0.5)
    judged = estimate_gain(logged, flat, old, new)
    assert judged.better
    assert judged.bound > 0.2
    assert not estimate_gain(logged, flat, new, old).better
    assert not estimate_gain(logged, flat, old, old).better
    with monkeypatch.context() as patch:
        patch.setattr(off_policy, "CONFIDENCE", 0.5)
        assert not estimate_gain(logged[:8], flat[:8], old[:8], new[:8]).better
    # without exploration nothing is shown, whatever the model says
    greedy = logged_outcomes(old, [[1.0, 0.0]] * 400, logged.accuracy)
    judged = estimate_gain(greedy, torch.tensor([[0.1, 0.9]]).expand(400, -1), old, new)
    assert (judged.different, judged.gain, judged.better) == (0, 0.0, False)


@pytest.mark.parametrize(("share", "requests"), [(0.1, 200), (0.1, 1000), (0.05, 1000)])
def test_bounds_at_95_percent_are_below_the_truth_in_at_least_90_of_100_replayed_logs(
    share, requests
):
    """The model is wrong, and the new policy, which trusts it, differs from the old one nearly
    everywhere."""
    config = SimulatedConfig(("okvqa",), samples=400, grid="27", image_width=0, language_width=4)
    table = simulate(config)
    limits = default_budgets(table)[:, None]
    met = table.latency_ms[:, None] <= limits
    utility = (table.accuracy[:, None] * met).double().flatten(0, 1)
    typical = utility.mean(0, keepdim=True)
    noise = torch.randn(utility.shape, dtype=torch.float64)
    wrong = (0.6 * typical + 0.4 * utility + 0.15 * noise).clamp(0, 1)
    old = typical.expand_as(utility).argmax(1)
    new = wrong.argmax(1)
    tried = (typical + 0.5 * wrong).topk(6, 1).indices
    chances = torch.zeros_like(utility).scatter_(1, tried, share / 6)
    chances[torch.arange(len(old)), old] += 1 - share
    chances /= chances.sum(1, keepdim=True)
    # where there is no evidence, the new one counts as the old one
    judged_as = torch.where(of_choices(chances, new) > 0, new, old)
    true = (of_choices(utility, judged_as) - of_choices(utility, old)).mean().item()
    held = 0
    for seed in range(100):
        torch.manual_seed(seed)
        rows = torch.randint(len(utility), (requests,))
        choice = chances[rows].multinomial(1).squeeze(1)
        logged = logged_outcomes(choice, chances[rows], utility[rows, choice])
        judged = estimate_gain(logged, wrong[rows], old[rows], new[rows])
        assert judged.different > requests / 5
        held += judged.bound <= true
    assert held >= 90


def test_a_model_that_is_wrong_where_the_log_is_thin_shows_nothing():
    """All answers are wrong. The model knows that of what the old policy chooses, and not of what
    the new one would."""
    n = 1000
    expected = torch.tensor([[0.0, 0.2]]).expand(n, -1)
    old = torch.zeros(n, dtype=torch.int64)
    new = (torch.arange(n) % 5 == 0).long()
    better = 0
    for seed in range(100):
        torch.manual_seed(seed)
        logged = logged_outcomes((torch.rand(n) < 0.006).long(), [[0.994, 0.006]] * n, old)
        better += estimate_gain(logged, expected, old, new).better
    assert better <= 5


def test_doubly_robust_rewards_by_hand():
    expected = torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.9]])
    reward, probability = torch.tensor([[1.0, 0.0], [0.5, 0.1]])
    rewards = doubly_robust(expected, torch.tensor([1, 2]), reward, probability, 5.0)
    # 0.2 + (1 − 0.2)/0.5; 0.9 + min(10, 5)·(0 − 0.9)
    assert rewards.flatten().tolist() == pytest.approx([0.5, 1.8, 0.1, 0.4, 0.3, -3.6])


def test_an_estimate_where_static_s_second_choice_was_drawn_rarely_by_hand():
    # ε = 0.3, of which half draws: 0.15 for the second choice, 0.85 for static's
    chances = Exploration(0.3, 0.05).chances(0, [1], 0.5)
    assert chances == pytest.approx({0: 0.85, 1: 0.15})
    # 200 requests, in which both were drawn as often as their chances say
    choice = torch.tensor([0] * 170 + [1] * 30)
    right = torch.tensor([1.0] * 85 + [0.0] * 85 + [1.0] * 18 + [0.0] * 12)
    logged = logged_outcomes(choice, [[0.85, 0.15]] * 200, right)
    static, second = torch.zeros_like(choice), torch.ones_like(choice)
    # static is right in 85 of 170, the second choice in 18 of 30, whatever a model says
    for level in (0.0, 0.5):
        expected = torch.full((200, 2), level)
        gain = estimate_gain(logged, expected, static, second).gain
        assert gain == pytest.approx(18 / 30 - 85 / 170)
