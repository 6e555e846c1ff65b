"""The settings of the losses, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knobwise.common.checks import at_least, band, one_of, positive, share
from knobwise.common.errors import InputError

# a branch of `group_advantage` each; `GRPOConfig.advantage` explains them, and
# `experiments/conf/experiment/advantages.yaml` compares them
ADVANTAGES = ("zscore", "centred", "rank", "unnormalised")


@dataclass
class GRPOConfig:
    """The settings of a loss that controller and selector share."""

    group_size: int = 8
    """G, draws for each context."""
    advantage: str = "centred"
    """How the rewards r of a group become advantages: `centred` (r − mean, as in Dr. GRPO),
    `zscore` ((r − mean)/std, as in GRPO; the least std is 0.1), `rank` (the share of the group that
    is worse − the share that is better), `unnormalised` (r), or a function of your own as
    module:name, of rewards and weights."""
    advantage_clip: float = 5.0
    """Advantages are clipped to ± this."""
    clip_epsilon: float = 0.2
    """ε of PPO's clip, which acts where each batch is used several times (`optimiser.epochs`)."""
    entropy_coeff: float = 0.0
    """η, weight of the entropy."""
    kl_to_ref_coeff: float | None = None
    """β, weight of the k3 KL to the reference policy. None: 0.1 where a teacher taught the
    reference, 0 for heads that learn from rewards alone."""
    kl_band: tuple[float, float] | None = None
    """Lowest and highest KL to the reference policy, in nats. Above it β grows by half, below it β
    shrinks by a third; β stays within 0.001 and 10. None keeps β as it is."""

    def of_grpo(self) -> dict[str, Any]:
        """Return the settings that `GRPOLoss` takes."""
        names = "objective clip_epsilon entropy_coeff kl_to_ref_coeff advantage advantage_clip"
        return {name: getattr(self, name) for name in names.split() if hasattr(self, name)}

    def __post_init__(self) -> None:
        if ":" not in self.advantage:
            one_of("loss.advantage", self.advantage, (*ADVANTAGES, "module:name"))
        at_least("loss.group_size", self.group_size, 1)
        for name in ("clip_epsilon", "entropy_coeff", "kl_to_ref_coeff"):
            at_least(f"loss.{name}", getattr(self, name) or 0, 0)
        positive("loss.advantage_clip", self.advantage_clip)
        band("loss.kl_band", self.kl_band)


@dataclass
class LossConfig(GRPOConfig):
    """The loss of the controller after the warm-up.

    The reference policy is the policy at the end of the warm-up.
    """

    objective: str = "exact"
    """`exact`: GRPO in expectation over all configurations; `sampled`: over `group_size` draws;
    `ppo`: TorchRL's ClipPPOLoss on as many draws, with the advantage reward − V, where V is what a
    value network expected of the context before. With advantage=zscore these are standardised over
    the draws of a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss.objective", self.objective, ("exact", "sampled", "ppo"))
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
    """β, weight of the k3 KL to the SFT policy."""
    temperature_band: tuple[float, float] | None = None
    """Lowest and highest KL to the SFT policy in GRPO, in nats. Above it the temperature of the
    draws falls by a tenth, below it the temperature rises by a tenth; it stays within 0.5 and 2.
    None keeps it at 1."""
    curriculum: float = 0.0
    """Share of GRPO, at its beginning, in which only the best three sequences of each
    group are learned from. Advantages are still taken over the whole group."""
    min_positive: float = 0.0
    """Conditional GRPO: queries teach nothing if a smaller share of their group is right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        band("loss.temperature_band", self.temperature_band)
        share("loss.curriculum", self.curriculum)
        share("loss.min_positive", self.min_positive)
