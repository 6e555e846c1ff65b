"""The settings of a controller and of its teacher, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from knobwise.common.checks import at_least, one_of, positive
from knobwise.common.errors import InputError

EXPERTS = (
    "ridge",
    "kernel_ridge",
    "gaussian_process",
    "knn",
    "random_forest",
    "gradient_boosting",
)
"""The families of `knobwise.agents.teacher.regressors`."""


OUTSIDE_THE_NETWORK = (
    "augment",
    "dropout",
    "guard",
    "promise",
    "sharpness",
    "teacher",
    "experts",
    "teacher_hidden",
    "teacher_dropout",
)
"""Settings that the network's weights do not depend on. A training may change them and still start
from a checkpoint."""


@dataclass
class PolicyConfig:
    """The policy: a light network with a head for each knob, with or without a teacher."""

    teacher: bool = False
    """Whether the heads are distilled from a policy that predicts accuracy and latency of every
    configuration; otherwise they learn from rewards alone."""
    experts: tuple[str, ...] = ()
    """Predictors beside the teacher's network: ridge, kernel_ridge, gaussian_process, knn,
    random_forest, gradient_boosting. Without any the network teaches alone, which is faster."""
    fold_networks: int = 1
    """Cross-validation folds. With 1, a single network is fitted on the training samples and scored
    on the validation samples. With k > 1, k fold networks choose the stopping point and the
    guard's decisions; one more network, fitted on all samples, is deployed."""
    guard: bool = True
    """Fall back to static at budgets where the policy did not beat it on held-out samples (under
    mean budgets to the static mix)."""
    promise: float | None = None
    """The share of requests that is promised to be on time at each budget, such as 0.95: the most
    accurate rule that keeps it on samples held back for the proof is deployed, in the place of the
    guard. None promises nothing, and utility decides."""
    hidden: int = 256
    """Width of the hidden layers; 0 picks one small enough that a decision is a small part of the
    tightest budget."""
    layers: int = 2
    """Number of hidden layers."""
    dropout: float | None = 0.6
    """Dropout in the hidden layers where a loss is computed (`knobwise.losses.dropping_out`): that
    of the warm-up, and that of GRPO if `loss.dropout` says so. Draws, noted log-probs and decisions
    never use it, whatever the mode of the modules. None: by the number of features, see
    `regularised`."""
    teacher_hidden: int = 96
    """Width of the hidden layers of the teacher's network."""
    teacher_dropout: float = 0.2
    """Dropout in the hidden layers of the teacher's network."""
    drift: float = 0.0
    """Scale of simulated per-knob latency drift in training (ln ms), so that the policy can use a
    tracker's per-knob offsets. 0: it sees only the overall slowdown."""
    augment: float | None = 0.0
    """Standard deviation of Gaussian noise on standardised features, drawn anew wherever a network
    drops out, and in half of what the heads imitate; 0 for none. Experts, draws, validation, test
    and decisions never see it; without features it has no effect. None: by the number of features,
    see `regularised`."""
    utility_head: bool = False
    """Add a head that predicts accuracy and latency of each configuration and adds its expected
    utility to the logits. Without it the knobs are independent, as in the original. Under a mean
    budget there is none."""
    sharpness: float = 40.0
    """Inverse temperature s of the distillation target softmax(s · expected utility); the utility
    head uses the same s."""
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

    @property
    def networks_trained(self) -> int:
        """The number of networks that are trained side by side."""
        return self.fold_networks + (self.fold_networks > 1)

    def __post_init__(self) -> None:
        for expert in self.experts:
            one_of("policy.experts", expert, EXPERTS)
        one_of("policy.budget_encoding", self.budget_encoding, ("linear", "sinusoidal"))
        if self.budget_encoding == "linear":
            self.budget_width = 1
        if self.experts and not self.teacher:
            raise InputError(
                f"policy.experts ({', '.join(self.experts)}): need policy.teacher=true; "
                "policy.experts=[] leaves them out"
            )
        if self.teacher and self.fold_networks < 2:
            raise InputError(
                f"policy.fold_networks={self.fold_networks}: policy.teacher=true needs at least 2, "
                "so that the teacher is judged on samples that it was not fitted on"
            )
        if self.promise is not None and not 0 < self.promise < 1:
            raise InputError(
                f"policy.promise={self.promise}: must be between 0 and 1, such as 0.95; null "
                "promises nothing"
            )
        for name in ("fold_networks", "layers", "teacher_hidden", "budget_width"):
            at_least(f"policy.{name}", getattr(self, name), 1)
        for name in ("hidden", "project"):
            at_least(f"policy.{name}", getattr(self, name), 0)
        if not 0 <= (self.augment or 0) < float("inf"):
            raise InputError(f"policy.augment={self.augment}: must be 0 or a positive number")
        for name in ("dropout", "teacher_dropout"):
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise InputError(f"policy.{name}={getattr(self, name)}: must be in [0, 1)")
        positive("policy.sharpness", self.sharpness)


MANY_FEATURES = 100
"""From so many features on a network is regularised more."""
FEW, MANY = (0.1, 0.0), (0.3, 0.3)
"""Dropout and the noise on features for few and for many features, where GRPO starts cold."""


def regularised(config: PolicyConfig, features: int) -> PolicyConfig:
    """Return the settings with the dropout and the noise that suit the number of features, where
    they name none.

    The more features, the easier a network learns samples by heart. With `FEW` and with `MANY`
    GRPO alone closes .48 and .21 of the gap from static to the oracle with 6 features (poppler),
    .72 and .69 with 46 (a portfolio of solvers, qbf16), and .10 and .18 with 288 (built-in), on
    test samples of three splits, by experiments/studies/grpo_parts.py.
    """
    dropout, augment = MANY if features >= MANY_FEATURES else FEW
    return replace(
        config,
        dropout=dropout if config.dropout is None else config.dropout,
        augment=augment if config.augment is None else config.augment,
    )


SIZES = (64, 96, 128, 192, 256)
"""Widths to choose from."""
SHARE = 0.003
"""The share of the smallest budget that a decision may take, where a wider network is chosen."""
BASE_US = 30.0
"""What a decision of a small network takes behind a model, by rule of thumb, in µs."""
WEIGHTS_PER_US = 2500
"""Number of further weights that take a further µs."""


def hidden_for(inputs: int, count: int, utility_head: bool, budget_us: float) -> int:
    """Return the width of two hidden layers for `count` configurations and a smallest budget in µs.

    It is the largest of `SIZES` whose decision takes at most `SHARE` of the budget by a rule of
    thumb, or the smallest of them.
    """
    outputs = count * (1 + 2 * utility_head)
    chosen = SIZES[0]
    for hidden in SIZES:
        weights = hidden * (inputs + hidden + outputs)
        if BASE_US + weights / WEIGHTS_PER_US <= SHARE * budget_us:
            chosen = hidden
    return chosen
