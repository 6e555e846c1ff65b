"""The formulae of the losses, as pure functions of tensors.

A *group* is the last axis: J alternatives for one context, the G draws of a policy or all C
configurations. The `weight` says how the expectation over the group is taken: 1/G for draws, the
behaviour policy's probabilities for the exact expectation over all configurations. That is the only
difference between sampled and exact GRPO.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line
from knobwise.losses.guards import without_level

STD_FLOOR = 0.3
"""The least number that z-scores divide by, as a share of the spread of rewards (`reward_spread`),
unless a floor in units of reward is set."""

ZSCORE_CLIP = 5.0
"""Where z-scores are cut unless a clip is set, as in the original selector."""


def expectation(values: Tensor, weight: Tensor | None) -> Tensor:
    """Compute Σ_j weight_j · values_j over the last axis, [*, J] → [*]; None for the plain mean."""
    if weight is None:
        return values.mean(-1)
    return (weight * values).sum(-1)


def even_weight(mask: Tensor) -> Tensor:
    """Return 1/n for each of the n alternatives in the mask, and 0 for the others.

    bool [*, J] → float [*, J].
    """
    return mask / mask.sum(-1, keepdim=True).clamp_min(1)


def reward_spread(reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the typical standard deviation of rewards within a group: the mean over groups, with
    the top 10 % trimmed. It has the unit of the rewards.

    Args:
        reward: float [*, J], the group is the last axis; anything finite where the weight is 0.
        weight: [*, J], sums to 1 in each group; None for 1/J each. Groups of fewer than two
            alternatives are left out.

    Returns: a single number, 0 if no group differs.
    """
    std = expectation(centred_advantage(reward, weight).square(), weight).sqrt().flatten()
    present = torch.ones_like(reward) if weight is None else weight
    std = std.where(present.count_nonzero(-1).flatten() > 1, torch.nan)
    typical = std.where(std <= std.nanquantile(0.9), torch.nan).nanmean()
    # where nine in ten do not differ, all count
    return torch.where(typical > 0, typical, std.nanmean()).nan_to_num()


def weight_of_best(reward: Tensor, count: int, weight: Tensor | None = None) -> Tensor:
    """Return equal weights for the `count` alternatives with the highest rewards, 0 for the others.

    Args:
        reward: float [*, J], the group is the last axis. The first of equal rewards counts as the
            highest.
        count: how many alternatives get a weight. Those whose `weight` is 0 never do.
        weight: [*, J], None for equal weights.

    Returns:
        [*, J].
    """
    if weight is None:
        weight = torch.ones_like(reward)
    present = weight > 0
    best_first = reward.masked_fill(~present, -torch.inf).argsort(
        dim=-1, descending=True, stable=True
    )
    # the position of an alternative in this order is its rank, 0 for the best
    rank = best_first.argsort(-1)
    return even_weight(present & (rank < count))


def rank_advantage(reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute A = P(a random draw from the group is worse) − P(it is better), by rank alone.

    It is divided by 1 − Σ weight², the probability that two draws differ, so that G draws without
    ties get 1 − 2·rank/(G − 1), rank 0 the best. The divisor is at least 1/2, its value for two
    draws.

    Args:
        reward: float [*, J], the group is the last axis.
        weight: [*, J], sums to 1; None for 1/J each.

    Returns: [*, J], of mean 0 in each group, within ±1 for draws and ±2 for any weights.
    """
    if weight is None:
        weight = torch.full_like(reward, 1 / reward.shape[-1])
    # [*, J, 1] with [*, 1, J]: the sign is 1 where the second is worse, −1 where it is better
    comparison = (reward.unsqueeze(-1) - reward.unsqueeze(-2)).sign()
    differ = 1 - weight.square().sum(-1, keepdim=True)
    return expectation(comparison, weight.unsqueeze(-2)) / differ.clamp_min(0.5)


def faster_rank_advantage(reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute `rank_advantage` without comparing each with each, which takes J² numbers a group."""
    if weight is None:
        weight = torch.full_like(reward, 1 / reward.shape[-1])
    reward = reward.contiguous()  # else searchsorted copies it, and warns
    ordered, order = reward.sort(-1)
    # the weight of the alternatives below each rank, [*, J + 1]
    below = functional.pad(weight.gather(-1, order).cumsum(-1), (1, 0))
    # the weight of what is worse, and of what is better; ties are in neither
    worse = below.gather(-1, torch.searchsorted(ordered, reward))
    better = below[..., -1:] - below.gather(-1, torch.searchsorted(ordered, reward, right=True))
    differ = 1 - weight.square().sum(-1, keepdim=True)
    return (worse - better) / differ.clamp_min(0.5)


def centred_advantage(reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute A = r − E r, as in Dr. GRPO (Liu et al. 2025); 0 where all rewards are equal."""
    reward = without_level(reward, weight)
    return reward - expectation(reward, weight).unsqueeze(-1)


def zscore_advantage(
    reward: Tensor,
    weight: Tensor | None = None,
    *,
    std_floor: float | None = None,
    std_eps: float = 0.0,
) -> Tensor:
    """Compute A = (r − E r)/(max(std, floor) + ε), the form of GRPO (Shao et al. 2024,
    "DeepSeekMath", section 4.1.1).

    Only the floor is ours. Without it, rewards that differ by noise alone would give advantages as
    large as any. None for `STD_FLOOR` times the `reward_spread` of all groups together.
    """
    advantage = centred_advantage(reward, weight)
    std = expectation(advantage.square(), weight).sqrt().unsqueeze(-1)
    floor = STD_FLOOR * reward_spread(reward, weight) if std_floor is None else std_floor
    # where all rewards are equal, 0/0 would be NaN
    least = torch.finfo(std.dtype).tiny
    return advantage / (std.clamp_min(floor) + std_eps).clamp_min(least)


def unnormalised_advantage(reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return A = r, without a baseline."""
    return reward


AdvantageFunction = Callable[[Tensor, Tensor | None], Tensor]
"""Rewards [*, J] and weights [*, J] (None for draws) → advantages [*, J]. The group is the last
axis. Rewards are in units of their spread. Alternatives of weight 0 must not affect the others."""

ADVANTAGES: dict[str, AdvantageFunction] = {
    "zscore": zscore_advantage,
    "centred": centred_advantage,
    "rank": faster_rank_advantage,
    "unnormalised": unnormalised_advantage,
}
"""By the words of `loss.advantage`; a new one is an entry here, and one of your own needs none."""


def known_advantage(kind: str | AdvantageFunction) -> str | AdvantageFunction:
    """Import the function that `module:name` names, and try it, or any other kind of advantage, on
    two groups of three draws.

    Returns:
        The kind, or the function, as `group_advantage` takes it.

    Raises:
        InputError: there is no such function or kind, it raises, or it returns no advantages.
    """
    function = kind
    if isinstance(kind, str) and ":" in kind:
        function = import_callable("loss.advantage", kind, "function", "mine:leave_one_out")
    try:
        group_advantage(torch.tensor([[[0.0, 0.5, 1.0]], [[1.0, 0.0, 0.0]]]), function)
    except Exception as error:
        raise InputError(
            f"loss.advantage={getattr(kind, '__name__', kind)}: tried on two groups, it fails: "
            f"{in_a_line(error, function)}"
        ) from error
    return function


def group_advantage(
    reward: Tensor,
    kind: str | AdvantageFunction = "zscore",
    *,
    weight: Tensor | None = None,
    clip: float | None = None,
    unit: float | None = None,
    std_floor: float | None = None,
    std_eps: float = 0.0,
) -> Tensor:
    """Compute the advantages A of rewards r inside each group, after r is divided by the unit.

    Args:
        reward: [*, J], the group is the last axis.
        kind: one of `ADVANTAGES`, or a function of the rewards and the weights.
        weight: [*, J], sums to 1; None for 1/J each.
        clip: advantages are cut to ±clip; None for `ZSCORE_CLIP` for z-scores, no cut for others.
        unit: what rewards are divided by, their `reward_spread`; None leaves them as they are.
        std_floor: the floor of `zscore`, as a reward; None for `STD_FLOOR` times the unit, or
            without one times the `reward_spread` of all groups together.
        std_eps: ε of `zscore`, as a reward.

    Returns: [*, J], not differentiable.

    Raises:
        ValueError: another kind.
        InputError: the function returns something else than finite advantages in the shape of the
            rewards.
    """
    scale = unit or 1.0
    reward = reward.detach() / scale
    if callable(kind):
        advantage = kind(reward, weight)
        _check_advantage(advantage, reward)
    elif kind not in ADVANTAGES:
        raise ValueError(f"advantage {kind!r}: must be one of {', '.join(ADVANTAGES)}")
    elif kind == "zscore":
        # the only one with numbers of its own, here in the unit
        if std_floor is not None:
            std_floor /= scale
        elif unit is not None:
            std_floor = STD_FLOOR
        std_eps /= scale
        advantage = zscore_advantage(reward, weight, std_floor=std_floor, std_eps=std_eps)
    else:
        advantage = ADVANTAGES[kind](reward, weight)
    if clip is None and kind == "zscore":
        clip = ZSCORE_CLIP
    return advantage if clip is None else advantage.clamp(-clip, clip)


def _check_advantage(advantage: object, reward: Tensor) -> None:
    """Raise InputError unless a user's function has returned finite advantages [*, J]."""
    got = repr(advantage)
    if isinstance(advantage, Tensor):
        if advantage.shape == reward.shape and advantage.isfinite().all():
            return
        got = f"a tensor {[*advantage.shape]}"
    raise InputError(
        f"loss.advantage: {got}; must be finite, in the shape of the rewards {[*reward.shape]}"
    )


def both_epsilons(clip_epsilon: Tensor | float) -> tuple[Any, Any]:
    """Return the ε of the lower and that of the upper end of a clip: of a tensor [2], or one number
    for both."""
    if isinstance(clip_epsilon, Tensor) and clip_epsilon.ndim:
        below, above = clip_epsilon.unbind()
        return below, above
    return clip_epsilon, clip_epsilon


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_epsilon: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped objective, min(ρA, clip(ρ, 1 − ε, 1 + ε)A) with ρ = π(a)/π_old(a).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; with an ε for each
    end Yu et al. 2025, "DAPO", equation 8.

    Args:
        log_prob: [*], ln π of the policy that is trained.
        old_log_prob: [*], ln π_old of the behaviour policy.
        advantage: [*], A.
        clip_epsilon: ε, or float [2], those of the lower and the upper end.

    Returns:
        the objective, to be maximised, [*]; and bool [*], True where the clip cut the gradient off.
    """
    below, above = both_epsilons(clip_epsilon)
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - below, 1 + above) * advantage
    free = ratio * advantage
    # torch.minimum(free, clipped), whose gradient takes longer. Only what is kept of the free one
    # has a gradient, which no infinite ratio elsewhere is to make NaN.
    kept = free <= clipped
    surrogate = log_ratio.where(kept, 0.0).exp() * advantage
    return torch.where(kept, surrogate, clipped), free > clipped


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) from draws of π: r − 1 − ln r with r = π_ref(a)/π(a).

    The estimate is unbiased and never negative. Shapes: [*] → [*]. Schulman 2020, "Approximating KL
    Divergence"; Shao et al. 2024, "DeepSeekMath", equation 4.
    """
    # ln of π_ref/π
    log_ratio = reference_log_prob - log_prob
    return log_ratio.exp() - 1 - log_ratio


def expected_k3(
    log_prob: Tensor,
    reference_log_prob: Tensor,
    old_log_prob: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute E_j k3_j over the last axis, [*, J] → [*]: the plain mean, or weighted by `weight`.

    Far from the reference, π_ref/π overflows where π is close to 0. If the weight is π_old, give
    ln π_old too: the two are then multiplied before the exponential is taken.
    """
    if weight is None or old_log_prob is None:
        return expectation(k3(log_prob, reference_log_prob), weight)
    log_ratio = reference_log_prob - log_prob
    return ((old_log_prob + log_ratio).exp() - weight * (1 + log_ratio)).sum(-1)


class Objective(NamedTuple):
    """The parts of GRPO's objective, of each context: surrogate − β·kl."""

    surrogate: Tensor
    """E_j[min(ρ_j A_j, clip(ρ_j, 1 − ε, 1 + ε) A_j)], [*]."""
    kl: Tensor | None
    """E_j[k3_j] to the reference policy, [*]; None without a reference."""
    cut: Tensor
    """bool [*, J], where the clip stops the gradient."""


def grpo_objective(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    reference_log_prob: Tensor | None = None,
    weight: Tensor | None = None,
    clip_epsilon: Tensor | float = 0.2,
    *,
    exact: bool = False,
    learned: Tensor | None = None,
) -> Objective:
    """Compute the parts of GRPO's objective, to be maximised: surrogate − β·kl.

    Shao et al. 2024, "DeepSeekMath", equation 3.

    Args:
        log_prob: [*, J], ln π of the policy that is trained.
        old_log_prob: [*, J], ln π_old of the behaviour policy.
        advantage: [*, J], A, see `group_advantage`.
        reference_log_prob: [*, J], ln π_ref; None for no KL.
        weight: [*, J], sums to 1; None for 1/J each.
        clip_epsilon: ε, see `clipped_surrogate`.
        exact: the weights are the probabilities of the behaviour policy, see `expected_k3`.
        learned: [*, J], in the place of `weight` in the surrogate, for a curriculum.
    """
    surrogate, cut = clipped_surrogate(log_prob, old_log_prob, advantage, clip_epsilon)
    surrogate = expectation(surrogate, weight if learned is None else learned)
    if reference_log_prob is None:
        return Objective(surrogate, None, cut)
    behaviour = old_log_prob if exact else None
    return Objective(surrogate, expected_k3(log_prob, reference_log_prob, behaviour, weight), cut)


def entropy(log_probs: Tensor) -> Tensor:
    """Compute −Σ_c p_c ln p_c over the last axis, [*, C] → [*].

    Masked alternatives (−inf) count 0.
    """
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def effective_sample_size(log_ratio: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the effective sample size (E ρ)² / E ρ² over a whole batch, a share in (0, 1].

    It is 1 while the policy is still the behaviour policy. `log_ratio` is ln ρ, [*, J]. Kish 1965.
    """
    # a common factor changes nothing and keeps the exponential finite
    ratio = (log_ratio - log_ratio.max()).exp()
    return expectation(ratio, weight).mean().square() / expectation(ratio.square(), weight).mean()


def ratio_diagnostics(
    log_ratio: Tensor, weight: Tensor | None, cut: Tensor, clip_epsilon: Tensor | float
) -> dict[str, Tensor]:
    """Return diagnostics of the importance ratios ρ of a batch of groups, each a scalar.

    Args:
        log_ratio: ln ρ, [*, J].
        weight: [*, J], None for 1/J each.
        cut: bool [*, J], where the clip stops the gradient.
        clip_epsilon: ε, see `clipped_surrogate`.

    Returns:
        `kl_approx`, −E ln ρ; `clip_fraction`, where ρ is outside the clip; `cut_fraction`; `ESS`;
        and `ratio_mean`, E ρ.
    """
    ratio = log_ratio.exp()
    below, above = both_epsilons(clip_epsilon)
    outside = (1 - ratio > below) | (ratio - 1 > above)
    return {
        "kl_approx": -expectation(log_ratio, weight).mean(),
        "clip_fraction": expectation(outside.to(ratio.dtype), weight).mean(),
        "cut_fraction": expectation(cut.to(ratio.dtype), weight).mean(),
        "ESS": effective_sample_size(log_ratio, weight),
        "ratio_mean": expectation(ratio, weight).mean(),
    }


def advantage_diagnostics(
    advantage: Tensor, weight: Tensor | None, used: Tensor
) -> dict[str, Tensor]:
    """Return what the advantages of a batch of groups say, each a single number.

    Args:
        advantage: [*, J].
        weight: [*, J], None for 1/J each.
        used: [*, J], the advantages that are learned from, else 0.

    Returns:
        `zero_advantage_fraction`, the share of groups that teach nothing; `advantage_mean` and
        `advantage_std` over all groups together.
    """
    idle = (used.abs() < 1e-6).all(-1)
    mean = expectation(advantage, weight).mean()
    square = expectation(advantage.square(), weight).mean()
    return {
        "zero_advantage_fraction": idle.to(advantage.dtype).mean(),
        "advantage_mean": mean,
        "advantage_std": (square - mean.square()).clamp_min(0).sqrt(),
    }


def reward_weighted_cross_entropy(
    log_probs: Tensor, rewards: Tensor, temperature: float | Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute RCE, the cross-entropy of a policy to softmax(reward/τ): −Σ_c softmax(r/τ)_c ln π_c.

    Args:
        log_probs: [*, C], −inf where masked.
        rewards: [*, C]; masked ones may be anything.
        temperature: τ > 0, in units of reward; infinite for a plain mean, which is supervised
            learning.
        mask: bool [*, C], True where an alternative takes part; where none does the result is 0.

    Returns:
        [*].
    """
    # the target is softmax(scores)
    scores = rewards / temperature
    if mask is not None:
        # a finite number, because everything may be masked
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        log_probs = log_probs.masked_fill(~mask, 0.0)
    return -(torch.softmax(scores, -1) * log_probs).sum(-1)
