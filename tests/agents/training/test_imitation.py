"""What a teacher makes of requests, and heads that imitate it."""

from dataclasses import replace

import pytest
import torch
from helpers import BRIEF, TAUGHT, small_table, trained

from knobwise.agents.training.imitation import BEYOND, LIMITS, composed, drawn_limits

TEN = {"teacher_iterations": 10, "warmup_iterations": 10, "evaluate_every": 10}
IMITATION = replace(BRIEF, iterations=0, **TEN)


def generator():
    return torch.Generator().manual_seed(0)


# -- limits ----------------------------------------------------------------------------------------


def test_a_third_of_the_limits_are_among_the_judged_ones_and_the_others_even_in_logarithm():
    judged = torch.tensor([5.0, 8.0, 20.0])
    limits = drawn_limits(judged, (6000, 4), generator())
    assert limits.shape == (6000, 4)
    among = torch.isin(limits, judged)
    assert float(among.double().mean()) == pytest.approx(1 / 3, abs=0.01)
    counts = [int((limits == each).sum()) for each in judged]
    assert min(counts) > 0.9 * max(counts)
    others = limits[~among]
    low, high = BEYOND[0] * 5, BEYOND[1] * 20
    assert others.min() >= low * (1 - 1e-6)
    assert others.max() <= high * (1 + 1e-6)
    place = (others.log() - torch.tensor(low).log()) / (torch.tensor(high / low).log())
    shares = torch.histc(place, 10, 0.0, 1.0) / len(place)
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.015, rtol=0)


# -- requests --------------------------------------------------------------------------------------


def test_requests_are_composed_of_samples_block_by_block():
    # column j of sample i is i + 100 j: what it is made of can be read off
    n, widths = 50, [2, 3]
    x = torch.arange(n)[:, None] + 100.0 * torch.arange(5)
    made = composed(x, widths, 4000, generator()) - 100.0 * torch.arange(5)
    assert made.shape == (4000, 5)
    assert made.min() >= 0
    assert made.max() <= n - 1
    whole = (made == made[:, :1]).all(1) & (made[:, 0] == made[:, 0].round())
    # as they are: of one sample (half), not a mean with another (half), no column of a second:
    # half, and where a share of half of a uniform number is drawn for each of five, ∫(1 − u/2)⁵ du
    none_drawn = (1 - 2**-6) / 3
    wanted = (1 + none_drawn) / 8
    assert float(whole.double().mean()) == pytest.approx(wanted, abs=0.02)
    by_block = (made[:, :2] == made[:, :1]).all(1) & (made[:, 2:] == made[:, 2:3]).all(1)
    crossed = by_block & (made[:, 0] != made[:, 2])
    assert float(crossed.double().mean()) > 0.1
    # no column comes from another column
    assert composed(x[:, :0], [], 7, generator()).shape == (7, 0)


# -- lessons ---------------------------------------------------------------------------------------


def test_each_pupil_learns_from_its_teacher_about_requests_of_its_own_samples():
    # a column that tells the sample, so that requests show what they are made of
    table = replace(small_table(60), features={"number": torch.arange(60.0).unsqueeze(1)})
    student = trained(table, optimiser=replace(IMITATION, contexts=256))
    lessons = student.lessons
    teacher, of_folds, rows, folds = student.taught_by
    assert "by_value" not in lessons  # no drift
    x, limits, worths = lessons["x"][:, :, 0], lessons["limit"], lessons["worth"]
    assert x.shape[::2] == (3, student.agent.controller.normaliser.width)
    assert worths.shape == (*x.shape[:2], LIMITS, 12)
    drawn = student._draw_lessons(500)
    shapes = [drawn[name].shape for name in ("x", "limit", "worth")]
    assert shapes == [(3, 500, 1), (3, 500), (3, 500, 12)]
    normal = student.all_features[:, 0]
    for pupil, taught_by in enumerate([*of_folds, teacher]):
        taught = taught_by.teach(x[pupil, :50], limits[pupil, :50])
        torch.testing.assert_close(worths[pupil, :50], taught)
        assert torch.isin(drawn["limit"][pupil], limits[pupil]).all()
        # of each sample that it is fitted on, and of no other
        seen = x[pupil, :, 0]
        named = {int((normal == value).nonzero()) for value in seen[torch.isin(seen, normal)]}
        own = set(rows.tolist())
        if pupil < 2:
            own -= set(rows[folds[pupil]].tolist())
        assert named == own


@torch.no_grad()
def agreement(student):
    """How often what is deployed takes what its teacher takes of test samples."""
    rows = student.split.test
    x = student.all_features[rows]
    mixture = student.taught_by.teacher.mixture(x)
    same = []
    for limit in student.limits:
        limits = limit.expand(len(rows))
        chosen = student.agent.controller(x, limits).argmax(-1)
        same.append((chosen == mixture.choose(limits)).double().mean())
    return float(torch.stack(same).mean())


@pytest.mark.parametrize("sense", ["deadline", "mean"])
def test_the_more_it_imitates_the_more_it_agrees_with_its_teacher(sense):
    agreed = []
    for iterations in (1, 300):
        changes = {"warmup_iterations": iterations, "evaluate_every": 300, "warmup_lr": 0.01}
        optimiser = replace(IMITATION, **changes, contexts=64, minibatch=64)
        policy = replace(TAUGHT, hidden=32)
        student = trained(small_table(200), policy, sense, optimiser=optimiser)
        agreed.append(agreement(student))
    assert agreed[0] < 0.2
    assert agreed[1] > 0.55  # of twelve configurations, some of which are nearly as good


def test_the_loss_is_the_cross_entropy_to_the_policy_of_the_teacher():
    student = trained(small_table(60), optimiser=IMITATION)
    torch.manual_seed(0)
    lessons = student._draw_lessons(7)
    x, limits, worths = lessons["x"], lessons["limit"], lessons["worth"]
    torch.manual_seed(0)
    loss = student._imitate(student._draw_lessons(7))["loss_imitation"]
    target = (student.policy.sharpness * worths).softmax(-1)
    log_probs = student.agent.controller.network(x, limits)
    torch.testing.assert_close(loss, -(target * log_probs).sum(-1).mean())
    assert student.policy.sharpness == 40
