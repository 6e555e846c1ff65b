"""The protocol of everything that chooses configurations: controllers, teachers, baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.deployed.arrays import Array as Array
from knobwise.agents.deployed.arrays import Arrays
from knobwise.agents.deployed.calibrated import Guard
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.problem import Problem
from knobwise.common.errors import InputError


class Policy(Protocol):
    """Protocol: maps requests and limits (deadlines in ms, or 1/λ in ms under a mean budget) to
    configurations."""

    def choose(self, features: Arrays, limits: Array, mask: Array | None = None, /) -> Array:
        """Choose for n requests.

        Args:
            features: block name → float [n, d]; may be empty.
            limits: float [n], the requests' deadlines in ms; under a mean budget 1/λ in ms.
            mask: bool [n, C], the configurations that may be chosen, at least one for each request;
                None for all.

        Returns:
            configuration indices, int64 [n], inside `mask`.
        """
        ...


class Baseline(Policy, Protocol):
    """A `Policy` that is judged under its own name."""

    name: str


@dataclass
class Guarded:
    """A `Policy` that gives way to budget-aware static where its guard says so."""

    policy: Policy
    guard: Guard

    def choose(self, features: Arrays, limits: Array, mask: Array | None = None) -> Array:
        """Choose for n requests, see `Policy.choose`."""
        return self.guard.with_fallback(self.policy.choose(features, limits, mask), limits, mask)

    def choose_each(self, features: Arrays, limits: Array, mask: Array) -> Array:
        """Choose for n requests under each of B limits, see `choose_each`."""
        chosen = choose_each(self.policy, features, limits, mask)
        for column, limit in enumerate(limits):
            of_limit = np.full(len(mask), limit)
            chosen[:, column] = self.guard.with_fallback(chosen[:, column], of_limit, mask)
        return chosen

    def reads_features(self, limits: Array) -> Array:
        """Tell under which limits [n] the policy decides and static does not, bool [n]."""
        return self.guard.reads_features(limits)


def reads_features(policy: Any, limits: Array) -> Array:
    """Return where a policy reads features, by limits [B]: bool [B].

    A policy has a method of this name, or if it always reads them an attribute `informed`.
    """
    if hasattr(policy, "reads_features"):
        return np.asarray(policy.reads_features(limits), bool)
    return np.full(len(limits), getattr(policy, "informed", False))


def inputs_of_rows(problem: Problem, rows: Tensor) -> tuple[dict[str, Array], Array]:
    """Return the feature blocks [n, d] by name and the mask bool [n, C] of samples int64 [n]."""
    features = {name: block.numpy() for name, block in problem.facts.blocks(rows).items()}
    return features, problem.mask[rows].numpy()


def allowed_in_service(decider: NumpyController, problem: Problem, rows: Tensor) -> Array:
    """Return what a controller may choose in service for samples int64 [n], bool [n, C]: what its
    own limits on further costs allow, whether or not it was measured."""
    features, mask = inputs_of_rows(problem, rows)
    allowed, _ = decider.allowed(features, len(mask))
    return np.ones_like(mask) if allowed is None else allowed


def choose_each(policy: Any, features: Arrays, limits: Array, mask: Array) -> Array:
    """Return what a policy chooses for n requests under each of B limits, int64 [n, B].

    A policy that predicts the same under all limits has a method of this name, which predicts once;
    the others are asked for one limit after the other.

    Args:
        features: block name → float [n, d].
        limits: float [B].
        mask: bool [n, C].

    Raises:
        InputError: a policy that returns something else than configurations, one for each request,
            or that has no `choose`.
    """
    if hasattr(policy, "choose_each"):
        chosen: Array = policy.choose_each(features, limits, mask)
        return chosen
    name = type(policy).__name__
    if not hasattr(policy, "choose"):
        raise InputError(
            f"{name}: has no choose(features, limits, mask); of a Controller judge "
            "DeployedController(controller)"
        )
    n, count = mask.shape
    columns = np.empty((n, len(limits)), np.int64)
    for column, limit in enumerate(limits):
        chosen = np.asarray(policy.choose(features, np.full(n, limit), mask))
        if chosen.shape != (n,) or chosen.dtype.kind not in "iu":
            raise InputError(
                f"{name}.choose: returns {chosen.dtype} {[*chosen.shape]}; must "
                f"return int64 [{n}], the index of a configuration for each request"
            )
        outside = chosen[(chosen < 0) | (chosen >= count)]
        if len(outside):
            raise InputError(
                f"{name}.choose: returns {outside[0]}; configurations are 0 to {count - 1}"
            )
        columns[:, column] = chosen
    return columns


def choices_of(policy: Policy, features: Arrays, limits: Array, mask: Array) -> Tensor:
    """Return the choices of a policy, int64 [n, B]; arguments and errors as of `choose_each`."""
    return torch.from_numpy(choose_each(policy, features, limits, mask))
