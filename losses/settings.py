"""The settings of the losses, each with its meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knobwise import losses
from knobwise.common.checks import at_least, band, one_of, positive, share
from knobwise.common.errors import InputError

OBJECTIVES = ("exact", "sampled", "ppo")


def check_clip(value: Any) -> None:
    """Refuse what is neither an ε nor a pair of them."""
    pair = value if isinstance(value, (list, tuple)) else [value, value]
    numbers = [end for end in pair if isinstance(end, (int, float)) and 0 <= end < math.inf]
    if len(pair) != 2 or len(numbers) != 2:
        raise InputError(
            f"loss.clip_epsilon={value}: must be a number from 0 on, or two of them, of the lower "
            "and of the upper end, such as [0.2,0.28]"
        )


@dataclass
class GRPOConfig:
    """The settings of a loss that controller and selector share."""

    group_size: int = 8
    """G, draws for each context."""
    advantage: str = "centred"
    """How the rewards r of a group become advantages: `centred` (r − mean, as in Dr. GRPO),
    `zscore` ((r − mean)/(max(std, floor) + ε), as in GRPO), `rank` (the share of the group that is
    worse − the share that is better), `unnormalised` (r), or a function of your own as module:name,
    of rewards and weights. Rewards are in units of `reward_spread`."""
    reward_spread: float | None = None
    """What all rewards are divided by before they become advantages or RCE's targets, so that β, η,
    τ, `advantage_clip` and the floor of z-scores mean the same in every unit of reward. None: how
    much they typically differ inside a group, measured on the training samples where a stage
    begins. 1: rewards stay as they are."""
    advantage_std_floor: float | None = None
    """The least standard deviation that z-scores divide by, in units of reward. None: 0.3 of
    the spread of rewards."""
    advantage_std_eps: float = 0.0
    """ε, added to the standard deviation that z-scores divide by, in units of reward."""
    advantage_clip: float | None = None
    """Advantages are cut to ± this. None: z-scores to ± 5, others not at all."""
    clip_epsilon: Any = 0.2
    """ε of PPO's clip, or [0.2, 0.28] for its lower and its upper end (DAPO). It acts from the
    second optimiser step on a batch on: with several passes (`optimiser.epochs`), or minibatches
    smaller than the batch."""
    entropy_coeff: float | None = 0.0
    """η, weight of the entropy."""
    kl_to_ref_coeff: float | None = None
    """β, weight of the k3 KL to the reference policy, over the draws of a group. None: 10 where the
    reference was distilled from a teacher of this reward, 1 from a teacher of another, 0 for heads
    without a teacher. After a short warm-up, lower it: a large β keeps GRPO from making up for
    that."""
    kl_band: tuple[float, float] | None = None
    """Lowest and highest KL to the reference policy, in nats, estimated from draws of the policy,
    also where a selector replays records. Above it β grows by half, below it β shrinks by a third;
    β stays within 0.001 and 10. None keeps β as it is."""

    def of_grpo(self) -> dict[str, Any]:
        """Return the settings that `GRPOLoss` and `ExactGRPOLoss` take, by the same names.

        Their defaults are the same, but for what a stage of training knows: β after a teacher, η
        from a cold start, and the spread of rewards, which it sets itself.
        """
        names = "advantage advantage_clip advantage_std_floor advantage_std_eps"
        names += " clip_epsilon entropy_coeff kl_to_ref_coeff"
        return {name: getattr(self, name) for name in names.split()}

    def __post_init__(self) -> None:
        # the defaults are known, so that the command line starts without torch
        if self.advantage not in ("centred", "zscore") and ":" not in self.advantage:
            one_of("loss.advantage", self.advantage, (*losses.ADVANTAGES, "module:name"))
        at_least("loss.group_size", self.group_size, 1)
        check_clip(self.clip_epsilon)
        for name in (
            "entropy_coeff",
            "kl_to_ref_coeff",
            "advantage_std_floor",
            "advantage_std_eps",
        ):
            at_least(f"loss.{name}", getattr(self, name) or 0, 0)
        for name in ("advantage_clip", "reward_spread"):
            value = getattr(self, name)
            if value is not None:
                positive(f"loss.{name}", value)
        if self.advantage_std_floor == 0 and self.advantage_std_eps == 0:
            raise InputError(
                "loss.advantage_std_floor=0: z-scores of equal rewards would divide by 0; give "
                "loss.advantage_std_eps=1e-8 too"
            )
        band("loss.kl_band", self.kl_band)


@dataclass
class LossConfig(GRPOConfig):
    """The loss of the controller after the warm-up.

    The reference policy is the policy at the end of the warm-up.
    """

    dropout: bool | None = None
    """Whether the network drops out (`policy.dropout`, and the noise of `policy.augment`) in GRPO's
    loss too: old log-probs are without, new ones with it. None: where GRPO starts cold."""

    group_size: int = 16
    entropy_coeff: float | None = None
    """η, weight of the entropy. None: 0.3 where GRPO starts cold, which keeps the policy from
    settling before it has learned; else 0. Cold is without a warm-up
    (`optimiser.pretrain_iterations=0`) and without a checkpoint to start from (`init_from`)."""
    objective: str = "sampled"
    """`sampled`: GRPO over `group_size` draws; `exact`: in expectation over all configurations;
    `ppo`: TorchRL's ClipPPOLoss on as many draws, with the advantage reward − V, where V is what a
    value network expected of the context before. With advantage=zscore these are standardised over
    the draws of a step. Or a loss of your own as module:Class (also loss=module:Class), see
    `knobwise.losses.own`."""
    settings: Any = None
    """Settings of a loss of your own, by the names of its arguments, such as {power: 2}."""

    @property
    def is_own(self) -> bool:
        """True for a loss of the user's own."""
        return ":" in self.objective

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_own:
            one_of("loss.objective", self.objective, (*OBJECTIVES, "module:Class"))
            if self.settings:
                raise InputError(
                    f"loss.settings={self.settings}: are those of a loss of your own, "
                    "loss=module:Class; leave them out"
                )
        if not isinstance(self.settings, Mapping | None):
            raise InputError(
                f"loss.settings={self.settings}: must be values by name, such as {{power: 2}}"
            )
        if self.objective == "ppo":
            one_of("loss.advantage", self.advantage, ("centred", "zscore"))
            if self.kl_to_ref_coeff or self.kl_band is not None:
                raise InputError(
                    "loss.kl_to_ref_coeff, loss.kl_band: PPO has no reference policy; leave them "
                    "out"
                )


@dataclass
class SelectorLossConfig(GRPOConfig):
    """The loss of the selector. The reference policy is the one after supervised fine-tuning."""

    advantage: str = "zscore"
    kl_to_ref_coeff: float | None = 0.02
    """β, weight of k3 to the SFT policy, over the sequences of a group. On draws of the policy k3
    estimates the KL; on recorded sequences it only pulls their probabilities towards those of the
    SFT policy, and says nothing of how far the KL is."""
    temperature_band: tuple[float, float] | None = None
    """Lowest and highest KL to the SFT policy in GRPO, in nats, estimated from draws of the policy,
    both at temperature 1. Above it the temperature of the groups falls by a tenth, below it the
    temperature rises by a tenth; it stays within 0.5 and 2. None keeps it at 1."""
    curriculum: float = 0.0
    """Share of GRPO, at its beginning, in which only the best three sequences of each
    group are learned from. Advantages are still taken over the whole group."""
    min_positive: float = 0.0
    """Conditional GRPO: queries teach nothing if a smaller share of their group is positive."""
    positive_above: float | None = None
    """Which sequences are positive in conditional GRPO: those whose reward is above this number.
    None: those whose answer is right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        band("loss.temperature_band", self.temperature_band)
        share("loss.curriculum", self.curriculum)
        share("loss.min_positive", self.min_positive)
        if self.positive_above is not None:
            if not math.isfinite(self.positive_above):
                raise InputError(f"loss.positive_above={self.positive_above}: must be finite")
            if not self.min_positive:
                raise InputError(
                    f"loss.positive_above={self.positive_above}: has no effect without "
                    "loss.min_positive, the share that must be above it"
                )
