"""What a teacher makes of requests, and heads that imitate it."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import WITH_TEACHER, close, small_table, trained

from knobwise.agents.teacher.distillation import BEYOND, LIMITS, compose_requests, drawn_limits
from knobwise.agents.training.settings import OptimiserConfig

IMITATION = OptimiserConfig(10, 10, 0, contexts=32, minibatch=32, evaluate_every=10)


def generator():
    return torch.Generator().manual_seed(0)


# -- limits ----------------------------------------------------------------------------------------


def test_a_third_of_the_limits_are_among_the_judged_ones_and_the_others_even_in_logarithm():
    judged = torch.tensor([5.0, 8.0, 20.0])
    limits = drawn_limits(judged, (6000, 4), generator())
    assert limits.shape == (6000, 4)
    among = torch.isin(limits, judged)
    assert float(among.double().mean()) == pytest.approx(1 / 3, abs=0.01)
    counts = limits[among].unique(return_counts=True)[1]
    assert counts.min() > 0.9 * counts.max()
    logs = limits[~among].log()
    low, high = math.log(BEYOND[0] * 5), math.log(BEYOND[1] * 20)
    assert logs.min() >= low - 1e-6
    assert logs.max() <= high + 1e-6
    shares = torch.histc(logs, 10, low, high) / len(logs)
    close(shares, torch.full((10,), 0.1), within=0.015)


# -- requests --------------------------------------------------------------------------------------


def test_requests_are_composed_of_samples_block_by_block():
    # column j of sample i is i + 100 j: what it is made of can be read off
    columns = 100.0 * torch.arange(5)
    x = torch.arange(50)[:, None] + columns
    made = compose_requests(x, [2, 3], 4000, generator()) - columns
    assert made.shape == (4000, 5)
    assert 0 <= made.min() <= made.max() <= 49
    whole = ((made == made[:, :1]) & (made == made.round())).all(1)
    # as they are: of one sample (half), not a mean with another (half), no column of a second:
    # half, and where a share of half of a uniform number is drawn for each of five, ∫(1 − u/2)⁵ du
    none_drawn = (1 - 2**-6) / 3
    assert float(whole.double().mean()) == pytest.approx((1 + none_drawn) / 8, abs=0.02)
    by_block = (made == made[:, [0, 0, 2, 2, 2]]).all(1)
    crossed = by_block & (made[:, 0] != made[:, 2])
    assert float(crossed.double().mean()) > 0.1
    # no column comes from another column
    assert compose_requests(x[:, :0], [], 7, generator()).shape == (7, 0)


# -- targets ---------------------------------------------------------------------------------------


def test_each_pupil_learns_from_its_teacher_about_requests_of_its_own_samples():
    # a column that tells the sample, so that requests show what they are made of
    table = replace(small_table(60), features={"number": torch.arange(60.0).unsqueeze(1)})
    student = trained(table, optimiser=replace(IMITATION, contexts=256))
    targets = student.setup.distiller.targets
    teacher, of_folds, rows, folds = student.setup.distiller.fitted
    assert "by_value" not in targets  # no drift
    x, limits, utility = targets["x"][:, :, 0], targets["limit"], targets["utility"]
    assert limits.shape == (*x.shape[:2], LIMITS)
    drawn = torch.cat([*student.stages[-2].minibatches(student.buffer)], 1)
    shapes = [drawn[name].shape for name in ("x", "limit", "utility")]
    assert shapes == [(3, 256, 1), (3, 256), (3, 256, 12)]
    normal = student.setup.rows.all_features[:, 0]
    for pupil, taught_by in enumerate([*of_folds, teacher]):
        close(utility[pupil, :50], taught_by.expected_utility(x[pupil, :50], limits[pupil, :50]))
        assert torch.isin(drawn["limit"][pupil], limits[pupil]).all()
        # of each sample that it is fitted on, and of no other
        own = set(rows.tolist())
        if pupil < 2:
            own -= set(rows[folds[pupil]].tolist())
        seen = torch.isin(normal, x[pupil, :, 0])
        assert set(seen.nonzero().flatten().tolist()) == own


@torch.no_grad()
def agreement(student):
    """How often what is deployed takes what its teacher takes of test samples."""
    x = student.setup.rows.all_features[student.setup.split.test]
    mixture = student.setup.distiller.fitted.teacher.mixture(x)
    same = []
    for limit in student.setup.limits:
        limits = limit.expand(len(x))
        same.append(student.setup.controller(x, limits).argmax(-1) == mixture.choose(limits))
    return float(torch.cat(same).double().mean())


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
def test_the_more_it_imitates_the_more_it_agrees_with_its_teacher(constraint):
    policy = replace(WITH_TEACHER, hidden=32)
    brief, long = (
        OptimiserConfig(10, n, 0, contexts=64, minibatch=64, pretrain_lr=0.01, evaluate_every=300)
        for n in (1, 300)
    )
    assert agreement(trained(small_table(200), policy, constraint, optimiser=brief)) < 0.2
    # of twelve configurations, some of which are nearly as good
    assert agreement(trained(small_table(200), policy, constraint, optimiser=long)) > 0.55


def test_the_loss_is_the_cross_entropy_to_the_policy_of_the_teacher():
    student = trained(small_table(60), optimiser=IMITATION)
    stage = student.stages[-2]
    targets = next(stage.minibatches(student.buffer))
    loss = stage.loss(targets)["loss_imitation"]
    target = (40 * targets["utility"]).softmax(-1)
    log_probs = student.setup.controller.network(targets["x"], targets["limit"])
    close(loss, -(target * log_probs).sum(-1).mean())
