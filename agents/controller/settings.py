"""The settings of a controller's network, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError

EXPERTS = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting")
"""The families of `knobwise.agents.predictors.regressors`."""


@dataclass
class PolicyConfig:
    """The network."""

    structure: str = "independent"
    """`utility` predicts accuracy and latency of every configuration; `independent` is a categorical for each knob (see
    `knobwise.agents.controller.networks`)."""
    members: int = 1
    """Number of networks. A single one is fitted on the training samples and stopped on the validation samples. Of
    several, each is fitted on all of these samples but a fold; they stop together, judged on their folds, and decide
    together."""
    experts: tuple[str, ...] = ()
    """Predictors stacked with a `utility` network of several members: any of ridge, kernel_ridge, knn, random_forest,
    gradient_boosting. Without any the network decides alone, which is faster."""
    guard: bool = True
    """Whether a `utility` network of several members decides inside a guard (`knobwise.agents.stack.guard`, under mean
    budgets `knobwise.agents.stack.priced_policy`)."""
    level: float = 0.95
    """Share of the feasible requests whose budget the guard keeps."""
    level_cost: float = 0.1
    """Share of the gain over budget-aware static that keeping the level may cost; if it costs more, the level is not
    enforced and the report says so. 1 keeps the level at any cost."""
    confidence: float = 0.8
    """One-sided confidence that the guard requires for the policy to be better than budget-aware static."""
    deploy: str = "auto"
    """What is deployed of a `utility` network of several members: `auto`, a student, one small network taught by it and
    its experts (`knobwise.agents.serving.distillation`); `teacher`, the trained policy itself, as of any other."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 2
    """Number of hidden layers."""
    dropout: float = 0.6
    """Dropout in the hidden layers during the warm-up; draws, log-probs and decisions never use it."""
    budget_encoding: str = "sinusoidal"
    """How a network reads the standardised log-budget: `sinusoidal`, by sines and cosines;
    `linear`, as the number alone, one input whatever `budget_width` is."""
    budget_width: int = 9
    """Width of the sinusoidal encoding: an odd one is the number itself and pairs of sine and
    cosine, an even one such as 32 is pairs alone; 1 is the number alone."""
    project: int = 0
    """Number of principal components that all normalised features are projected onto before the
    first layer; 0 for none. They are fitted on the training samples, scaled to unit variance, and
    not trained. Experts in the policy read them too, baselines do not."""
    dataset_input: bool = False
    """Whether the data set of a request is an input too, as a feature block `dataset` with a column
    for each data set of the profile."""

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> PolicyConfig:
        """Return the settings in a checkpoint; of an even width earlier versions left one out."""
        even = "budget_encoding" not in plain and plain["budget_width"] % 2 == 0
        return cls(**plain | {"budget_width": plain["budget_width"] - even})

    def __post_init__(self) -> None:
        one_of("policy.structure", self.structure, ("utility", "independent"))
        for expert in self.experts:
            one_of("policy.experts", expert, EXPERTS)
        one_of("policy.budget_encoding", self.budget_encoding, ("linear", "sinusoidal"))
        if self.budget_encoding == "linear":
            self.budget_width = 1
        at_least("policy.project", self.project, 0)
        key = "structure" if self.structure != "utility" else "members"
        if self.experts and (key == "structure" or self.members < 2):
            raise InputError(
                f"policy.{key}={getattr(self, key)}: policy.experts ({', '.join(self.experts)}) need "
                "policy.structure=utility and policy.members of at least 2; policy.experts=[] leaves them out"
            )
        one_of("policy.deploy", self.deploy, ("auto", "teacher"))
        for name in ("level", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"policy.{name}={getattr(self, name)}: must be between 0 and 1")
        if not 0 <= self.level_cost <= 1:
            raise InputError(f"policy.level_cost={self.level_cost}: must be in [0, 1]")
        for name in ("members", "hidden", "layers", "budget_width"):
            at_least(f"policy.{name}", getattr(self, name), 1)
        if not 0 <= self.dropout < 1:
            raise InputError(f"policy.dropout={self.dropout}: must be in [0, 1)")
