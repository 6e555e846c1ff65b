"""Options that a choice beside them does not read, such as `reward.beta` under `reward=utility`.

A word that sets one would change nothing, without anybody noticing: it is refused where it is
typed. Values that nobody typed, such as those of an experiment's file, may be there unread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from knobwise.common.errors import InputError
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import WEIGHTS, unread_of_budget, unread_weights

OF_THE_TEACHER = (
    "policy.teacher_hidden",
    "policy.teacher_dropout",
    "optimiser.teacher_iterations",
)
OF_GRPO = (
    "optimiser.lr",
    "optimiser.patience",
    "loss.advantage",
    "loss.advantage_std_floor",
    "loss.advantage_std_eps",
    "loss.advantage_clip",
    "loss.clip_epsilon",
    "loss.entropy_coeff",
    "loss.kl_to_ref_coeff",
    "loss.kl_band",
)


def unread_options(config: Any) -> dict[str, str]:
    """Return the options that nothing reads: key → the choice that is the reason, as it is written.

    Args:
        config: the settings of a verb, as its dataclass or as OmegaConf holds them; they need not
            have been checked.
    """
    if hasattr(config, "selector"):
        from knobwise.agents.selector.settings import UNREAD

        version = config.selector.version
        return {
            f"selector.{name}": f"selector.version={version}" for name in UNREAD.get(version, ())
        }
    if not hasattr(config, "policy"):
        return _by_kind(config.reward.kind) if hasattr(config, "reward") else {}
    return {
        **_by_reward(config),
        **_by_budget(config.budget),
        **_by_policy(config),
        **_by_loss(config),
        **_by_stages(config),
    }


def refuse_unread(config: DictConfig, keys: Iterable[str]) -> None:
    """Refuse the first of the keys that somebody typed whose option nothing reads, unless its
    value says as much, as 0 and false do.

    Raises:
        InputError: there is one.
    """
    reasons = unread_options(config)
    for key in keys:
        value = OmegaConf.select(config, key) if key in reasons else None
        if value:
            # of a group the name of the choice
            value = getattr(value, "kind", value)
            raise InputError(f"{key}={value}: {reasons[key]} does not read it; leave it out")


def _because(reason: str, keys: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(keys, reason)


def _by_kind(kind: str) -> dict[str, str]:
    """Return the weights that a kind of reward does not read."""
    return _because(f"reward={kind}", [f"reward.{weight}" for weight in unread_weights(kind)])


def _by_reward(config: Any) -> dict[str, str]:
    constraint = config.budget.constraint
    if constraint == "mean" or ":" in constraint:
        # a mean budget has a reward of its own, and so has a rule of the user's own
        names = ("kind", "function", *WEIGHTS)
        reason = f"budget={constraint}"
        return _because(reason, ["reward", *(f"reward.{name}" for name in names)])
    return _by_kind(config.reward.kind)


def _by_budget(budget: Any) -> dict[str, str]:
    mean = budget.constraint == "mean"
    reason = "mean" if mean else budget.strategy or "deadline"
    names = unread_of_budget(budget.constraint, budget.strategy)
    reasons = _because(f"budget={reason}", [f"budget.{name}" for name in names])
    if not mean and not budget.limits:
        reasons["budget.limit_probability"] = "budget without limits"
    return reasons


def _by_policy(config: Any) -> dict[str, str]:
    """Return what policies without a teacher, a guard or a head for utility do not read."""
    policy = config.policy
    mean = config.budget.constraint == "mean"
    reasons = {}
    if mean:
        reasons["policy.utility_head"] = "budget=mean"
    # the teacher teaches in the warm-up alone
    no_teacher = ""
    if not policy.teacher:
        no_teacher = "policy.teacher=false"
    elif not config.optimiser.pretrain_iterations:
        no_teacher = "optimiser.pretrain_iterations=0"
    if no_teacher:
        reasons |= _because(no_teacher, OF_THE_TEACHER)
        if mean or not policy.utility_head:
            reasons["policy.sharpness"] = no_teacher
    # another aim than utility has no guard, and a promise takes its place
    kind = KINDS.get(config.reward.kind)
    if not mean and kind is not None and kind.judged_by != "utility":
        reasons["policy.guard"] = f"reward={config.reward.kind}"
    elif policy.promise:
        reasons["policy.guard"] = f"policy.promise={policy.promise}"
    if policy.budget_encoding == "linear":
        reasons["policy.budget_width"] = "policy.budget_encoding=linear"
    return reasons


def _by_loss(config: Any) -> dict[str, str]:
    loss = config.loss
    reasons = {}
    if loss.objective == "exact":
        reasons["loss.group_size"] = "loss=exact"
    if loss.objective == "ppo":
        reasons["loss.advantage_clip"] = "loss=ppo"
    if loss.advantage != "zscore":
        floors = ["loss.advantage_std_floor", "loss.advantage_std_eps"]
        reasons |= _because(f"loss.advantage={loss.advantage}", floors)
    optimiser = config.optimiser
    # at the first step on a batch the policy is still the one that drew it
    one_step = optimiser.epochs == 1 and optimiser.minibatch >= optimiser.contexts
    if one_step and not _grpo_drops_out(config):
        reasons["loss.clip_epsilon"] = "a training of one optimiser step on each batch"
    return reasons


def _grpo_drops_out(config: Any) -> bool:
    """Return True if the network drops out in GRPO's loss, as `ControllerSetup.drops_out` says."""
    if config.loss.dropout is not None:
        return bool(config.loss.dropout)
    warm = config.optimiser.pretrain_iterations or config.init_from
    return not warm and config.loss.objective != "ppo"


def _by_stages(config: Any) -> dict[str, str]:
    """Return what trainings without a warm-up, or without GRPO, do not read."""
    optimiser = config.optimiser
    reasons: dict[str, str] = {}
    if not optimiser.pretrain_iterations:
        reasons["optimiser.pretrain_lr"] = "optimiser.pretrain_iterations=0"
        if not _grpo_drops_out(config):
            reason = "a training in which nothing drops out"
            reasons |= _because(reason, ["policy.dropout", "policy.augment"])
    if not optimiser.iterations:
        reasons |= _because("optimiser.iterations=0", OF_GRPO)
    if optimiser.schedule == "constant":
        reasons["optimiser.lr_warmup"] = "optimiser.schedule=constant"
    return reasons
