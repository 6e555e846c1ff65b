"""Under weights: the front that each policy draws over pairs of worths, and its hypervolume.

A point of a front is what a policy gets on the test samples at a pair of worths: the share of
errors (1 − accuracy), mean latency and mean further cost, all better if less. Requests may be
shared out among the points at random, so that a front is all mixtures of its points: of the static
policy those of single configurations (Vamplew et al. 2009, "Constructing Stochastic Mixture
Policies for Episodic Multiobjective Reinforcement Learning Tasks").
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.judging.baselines import BestAtWorths, averages_with_cost
from knobwise.agents.judging.evaluation import Judged, for_all
from knobwise.agents.judging.policy import Policy, requests_of
from knobwise.agents.serving.own_cost import expected_cost_ms
from knobwise.envs.configurations.budgets import worth_pairs
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.controllers import decision_frame, profile_of
from knobwise.experiments.results.statistics import ends_of, mean_intervals, resampled_means

STEPS = 7
"""Worths of each kind; policies are judged at all pairs of them."""
MARGIN = 1.1
"""The reference point is so many times as bad as the worst means of single configurations."""
DRAWS = 1000
Array = NDArray[np.float64]


def dominated(points: Array, reference: Array) -> Any:
    """What mixtures of points [P, D] dominate of the box from 0 to the reference point [D], all of
    them inside, as a `scipy.spatial.ConvexHull` in units of the reference point; its vertices below
    P are points. It is convex, and each corner is a point with some coordinates moved to the
    reference's: a mixture's box has its points' corners, mixed alike. So Quickhull gives the volume
    exactly."""
    from scipy.spatial import ConvexHull

    moved = np.array(
        list(itertools.product((False, True), repeat=len(reference)))
    )  # not at all first
    return ConvexHull(np.where(moved[:, None], 1.0, points / reference).reshape(-1, len(reference)))


def hypervolume(points: Array, reference: Array) -> float:
    """The share of the box that mixtures of points [P, D] dominate; points outside the box do not
    count."""
    inside = points[(points < (1 - 1e-9) * reference).all(1)]
    if len(inside):
        return float(dominated(inside, reference).volume)
    return 0.0


def judge_fronts(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    controllers: Sequence[Policy],
    seeds: Sequence[int],
    charge: bool = True,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The contents of `results.json` and of `decisions.parquet`: controllers, one for each of
    `seeds`, beside static configurations, chosen on the rows `fitted`, and the oracle on the same
    samples `test`, int64 [n], at all pairs of worths. `charge`: controllers pay the expected time
    of a decision, and that of the features."""
    worths = worth_pairs(table, STEPS)
    averages = averages_with_cost(table, fitted)
    oracle = BestAtWorths(
        *(values[test] for values in (table.accuracy, table.latency_ms, table.weighed_cost))
    )
    policies = {
        "controller": controllers,
        "static_mix": [BestAtWorths(*averages)],
        "oracle": [oracle],
    }
    features, mask = requests_of(table, test)
    chosen: dict[str, list[Tensor]] = {}
    for name, several in policies.items():
        chosen[name] = []
        for policy in several:
            columns = []
            for pair in worths:
                limits = for_all(pair, test).double().numpy()
                columns.append(torch.from_numpy(policy.choose(features, limits, mask)))
            chosen[name].append(torch.stack(columns, 1))
    fronts = {
        name: np.stack([_points(table, test, each) for each in several])
        for name, several in chosen.items()
    }
    fronts["controller"][..., 1] += expected_cost_ms(table) if charge else 0.0
    means = np.stack([1 - averages[0].numpy(), averages[1].numpy(), averages[2].numpy()], 1)
    reference = (MARGIN * means.max(0)).clip(1e-9)
    hull = dominated(means, reference)
    corners = torch.from_numpy(hull.vertices[hull.vertices < len(means)]).long()
    single = _points(table, test, corners.expand(len(test), -1))
    single = np.where(
        np.isnan(single), means[corners], single
    )  # what was not profiled counts as the average
    volumes = _volumes(fronts | {"static_mix": single[None]}, reference)
    rewards = {
        name: 1 - front[..., 0] - (front[..., 1:] / worths.numpy()).sum(-1)
        for name, front in fronts.items()
    }
    judged: dict[str, list[Judged]] = {name: [] for name in fronts}
    for name, front in fronts.items():
        for c, p, r in zip(
            chosen[name], torch.from_numpy(front), torch.from_numpy(rewards[name]), strict=True
        ):
            judged[name].append(
                Judged(torch.arange(len(worths)), c, 1 - p[..., 0], p[..., 1], None, r, r)
            )
    results = {
        "sense": "weights",
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
    }
    results |= {
        "seeds": list(seeds),
        "unit": table.unit,
        "cost_name": table.cost_name,
        "worths": worths.tolist(),
    }
    results |= {
        "reference_point": reference.tolist(),
        "rows": _rows(rewards, fronts, worths, volumes),
    }
    return results, decision_frame(table, test, judged, seeds, {})


def _points(table: ProfileTable, rows: Tensor, chosen: Tensor) -> Array:
    """Errors, latency and further cost of the configurations int64 [n, B] for these samples,
    float64 [n, B, 3]."""
    at = rows.unsqueeze(1), chosen
    return (
        torch.stack([1 - table.accuracy[at], table.latency_ms[at], table.weighed_cost[at]], -1)
        .double()
        .numpy()
    )


def _volumes(fronts: Mapping[str, Array], reference: Array) -> dict[str, dict[str, Any]]:
    """For each policy, from its outcomes [S, n, B, 3], `hypervolume`, the mean over seeds,
    `over_static_mix` and `gap_closed`, each with its interval over samples, the same for all
    policies, and seeds."""
    volumes = {}
    for name, several in fronts.items():
        drawn = np.empty((DRAWS + 1, len(several)))
        for number, front in enumerate(several):
            means = resampled_means([*front.reshape(len(front), -1).T], DRAWS).reshape(
                DRAWS, *front.shape[1:]
            )
            drawn[:, number] = [
                hypervolume(points, reference) for points in (*means, front.mean(0))
            ]
        seeds = len(several)
        shares = (
            np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds
        )
        volumes[name] = (drawn * np.vstack([shares, np.full(seeds, 1 / seeds)])).sum(
            1
        )  # the last as observed
    static = volumes["static_mix"]
    oracle = volumes["oracle"]
    between = np.where(oracle - static > 1e-9, oracle - static, np.nan)
    summary = {}
    for name, volume in volumes.items():
        columns = np.stack([volume, volume - static, (volume - static) / between], 1)
        keys = ("hypervolume", "over_static_mix", "gap_closed")
        row: dict[str, Any] = dict(zip(keys, np.nan_to_num(columns[-1]).tolist(), strict=True))
        summary[name] = row | {
            f"{k}_ci95": each for k, each in zip(keys, ends_of(columns[:-1]), strict=True)
        }
    return summary


def _rows(
    rewards: Mapping[str, Array],
    fronts: Mapping[str, Array],
    worths: Tensor,
    volumes: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The mean of each policy over the pairs of worths, with its hypervolume, and a row for each
    pair."""
    rows = []
    for name, reward in rewards.items():
        every = [reward.mean(2), *np.moveaxis(reward, 2, 0)]
        means = fronts[name].mean((0, 1))  # [S, n] each; [B, 3]
        points = [means.mean(0), *means]
        pairs = [[None, None], *worths.tolist()]
        for place, ci95 in enumerate(mean_intervals(every)):
            row = {"policy": name, "weights": place - 1 if place else None} | (
                volumes[name] if not place else {}
            )
            row |= dict(zip(("worth_ms", "worth_cost"), pairs[place], strict=True))
            row |= {
                "reward": float(every[place].mean()),
                "reward_ci95": ci95,
                "accuracy": float(1 - points[place][0]),
            }
            rows.append(
                row
                | dict(
                    zip(("latency_ms_mean", "cost_mean"), points[place][1:].tolist(), strict=True)
                )
            )
    return rows
