"""Policies of any kind side by side: one's own, that of a run, a baseline."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.policy import Policy
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.evaluate import check_fits, clusters_of
from knobwise.experiments.evidence.statistics import FEWEST, Difference, holm, paired_differences
from knobwise.serving.knob_policy import KnobPolicy


def compare_policies(
    policies: Mapping[str, Policy],
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    costs_ms: Mapping[str, Tensor | float] | None = None,
) -> list[Difference]:
    """Judge policies on the same samples, and compare each with the first: the utility of its
    decisions, as a mean over the budgets.

    Args:
        policies: by name, at least two, such as what `knobwise.load` returns.
        rows: int64 [n], samples that no policy was fitted on, such as `table.split().test`.
        budgets_ms: float [B].
        costs_ms: the times of decisions, by the names of policies, see `evaluate_policy`; the
            others decide for free.

    Returns:
        a difference for each policy but the first, with its paired 95 % interval over samples, or
        the clusters or images that they belong to, and p corrected for their number.

    Raises:
        InputError: one policy, too few samples, costs of none of the policies; or a loaded policy
            for mean budgets, for another unit or other configurations, or that was trained on some
            of the samples.
    """
    costs_ms = costs_ms or {}
    _check(policies, table, rows, costs_ms)
    clusters = None
    if (names := clusters_of(table)) is not None:
        clusters = np.unique([names[row] for row in rows.tolist()], return_inverse=True)[1]
    scores = {}
    for name, policy in policies.items():
        cost_ms = costs_ms.get(name, 0.0)
        judged = evaluate_policy(policy, table, rows, budgets_ms, cost_ms=cost_ms)
        # [S, n, C] for one seed and the mean over budgets
        scores[name] = judged.utility.double().mean(1)[None, :, None].numpy()
    against, *others = policies
    differences = []
    for name in others:
        (test,) = paired_differences(scores[name], scores[against], True, clusters)
        gap, low, high, p = test
        difference = Difference(
            run=name,
            against=against,
            policy=name,
            against_policy=against,
            condition=None,
            samples=len(rows),
            difference=gap,
            ci95=(low, high),
            p=p,
        )
        differences.append(difference)
    return holm(differences)


def _check(
    policies: Mapping[str, Policy],
    table: ProfileTable,
    rows: Tensor,
    costs_ms: Mapping[str, Tensor | float],
) -> None:
    """Refuse what cannot be compared."""
    if len(policies) < 2 or len(rows) < FEWEST:
        raise InputError(
            f"compare_policies: {len(policies)} policies and {len(rows)} samples; give at least 2 "
            f"and {FEWEST}"
        )
    if unknown := costs_ms.keys() - policies.keys():
        raise InputError(f"compare_policies: costs_ms of {unknown.pop()!r}, which is no policy")
    for name, policy in policies.items():
        if isinstance(policy, KnobPolicy):
            _check_loaded(name, policy, table, rows)


def _check_loaded(name: str, policy: KnobPolicy, table: ProfileTable, rows: Tensor) -> None:
    """Refuse a loaded policy that this table or deadlines cannot judge, and samples that it was
    trained on."""
    if policy.agent.rule.kind == "mean":
        raise InputError(
            f"{name}: decides for mean budgets, but every request is judged by a deadline; "
            "`knobwise evaluate` judges it"
        )
    check_fits(name, policy.agent, table)
    seen = set(policy.loaded.extra.get("seen", ()))
    known = sum(fingerprint in seen for fingerprint in table.fingerprints(rows))
    if known:
        raise InputError(
            f"{name}: was trained on {known} of these {len(rows)} samples; judge on others, such "
            "as the test part of its split"
        )
