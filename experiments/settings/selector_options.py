"""The settings of `knobwise train experiment=selector…`, for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knobwise.agents.selector.networks import SelectorConfig
from knobwise.agents.selector.settings import SelectorLossConfig, StageConfig
from knobwise.agents.training.settings import a_seed, training_seeds
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import GROUPS
from knobwise.envs.demonstrations.reward import DemonstrationRewardConfig
from knobwise.experiments.tracking.tracker import TrackingSettings


@dataclass
class BuiltinBeams:
    """The beams that come with knobwise: digits, frames and textures, answered by a small in-context learner."""

    format: str = "builtin"
    """Which reader."""
    variant: str = "careless"
    """`careless`: six of ten annotators are careless, which imitation does not see; `careful`: none is."""


@dataclass
class BeamFiles:
    """Recorded beams of any other system. There is no scorer, so training and judging replay what was recorded."""

    format: str = "files"
    """Which reader."""
    path: str = MISSING
    """Beams: JSON in either format, or a `.safetensors` that `BeamTable.save` wrote, with the embeddings inside."""
    embeddings: str | None = None
    """Embeddings of the candidates, row = index in the data set; for JSON."""
    query_embeddings: str | None = None
    """Embeddings of the queries; None when they are the same."""
    candidate_images: str | None = None
    """Which image each candidate shows, so that none shows the query's own."""
    trailing_query: str = "auto"
    """In the legacy format: `auto` drops the query's own id where it ends a row, `never` takes it for a candidate (of
    another data set, where the same number is another item)."""
    keep_fallback: bool = False
    """Keep sequences whose answer only a fallback could judge."""
    name: str | None = None
    """What the beams are called; None for the file's name."""
    train: float = 0.8
    """Share of the queries to fit on."""
    validation: float = 0.1
    """Share to choose the epoch on; the rest is the test part."""
    split_seed: int = 0
    """Of the split."""

    def __post_init__(self) -> None:
        a_seed("beams.split_seed", self.split_seed)


@dataclass
class Variant:
    """One way to post-train, from the same supervised selector. What is None is that of the run."""

    live: bool = False
    """Draw from the policy while it learns and have the scorer score it; otherwise replay recorded sequences."""
    own_draws: int = 8
    """In replay, how many sequences of the policy are drawn for each query, scored once and recorded beforehand; needs
    a scorer."""
    rounds: int = 1
    """In replay, how often that is done, each time from what was learned by then."""
    groups: str = "without_beams"
    """In replay, which recorded sequences make a group: all, without_beams (none that was found by looking at the
    answer), own (the policy's draws), beams."""
    warmup: bool = True
    """Start from RCE; otherwise from supervised fine-tuning."""
    epochs: int | None = None
    """Passes over the training queries, in each round."""
    lr: float | None = None
    """Learning rate."""
    keep: str | None = None
    """Which epoch is judged: the best on validation, or the last. For controls the last: nothing is chosen for them."""
    collected: int | None = None
    """Queries whose old log-probs are taken at once."""
    reward: dict[str, Any] = field(default_factory=dict)
    """What differs in the reward. RCE then learns from it too."""
    loss: dict[str, Any] = field(default_factory=dict)
    """What differs in the loss."""
    hidden: list[str] = field(default_factory=list)
    """Columns of the embeddings that the selector does not get to see, by the name of their block; supervised
    fine-tuning and RCE are then done again without them, as hidden_sft and hidden_rce."""

    def __post_init__(self) -> None:
        if self.groups not in GROUPS:
            raise InputError(f"groups={self.groups!r}: must be one of {', '.join(GROUPS)}")
        if self.own_draws < 0 or self.rounds < 1:
            raise InputError(f"own_draws={self.own_draws}, rounds={self.rounds}: need at least 0 and 1")


@dataclass
class SelectorRun:
    """knobwise train experiment=selector: train selectors of demonstrations with several seeds, judge them on queries
    and candidates never seen beside every simple way, report."""

    experiment: str = "selector"
    """Which experiment; the name of a file in conf/experiment."""
    beams: Any = MISSING
    """Group: builtin, files."""
    selector: SelectorConfig = field(default_factory=lambda: SelectorConfig(dropout=0.2))
    """The network."""
    reward: DemonstrationRewardConfig = field(default_factory=DemonstrationRewardConfig)
    """What a recorded or scored sequence is worth, in RCE and GRPO."""
    loss: SelectorLossConfig = field(default_factory=SelectorLossConfig)
    """What is minimised."""
    sft: StageConfig = field(default_factory=lambda: StageConfig(epochs=15, lr=1e-3))
    """Supervised fine-tuning on the sequences that beam search found."""
    rce: StageConfig = field(default_factory=lambda: StageConfig(epochs=2, lr=1e-4))
    """The warm-up before GRPO, on all recorded sequences."""
    grpo: StageConfig = field(default_factory=lambda: StageConfig(epochs=6, lr=3e-4, rise=0.1))
    """GRPO, where a variant says nothing else."""
    variants: dict[str, Any] = field(default_factory=dict)
    """What is post-trained, by name; see `knobwise.experiments.settings.selector_options.Variant`. null leaves one
    out.
    """
    shots: int = 2
    """Demonstrations in a sequence, in training."""
    judged_shots: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """Demonstrations in a sequence, in judging."""
    decoding: str = "greedy"
    """How sequences are chosen in judging: greedy or beam."""
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    """Group: auto, offline, online, disabled."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds; results are means over them."""
    jobs: int = 2
    """Seeds trained at the same time, each in a process with one thread."""
    name: str | None = None
    """Name of the run; None makes one from what was changed on the command line."""
    runs: str = "runs"
    """Folder of all runs."""
    device: str = "cpu"
    """cpu or cuda."""

    def __post_init__(self) -> None:
        training_seeds(self.seeds)
        self.variants = {name: values for name, values in self.variants.items() if values is not None}

    def variant(self, name: str) -> Variant:
        """The variant of this name, checked.

        Raises:
            InputError: an unknown key, a value of the wrong type.
        """
        return checked(Variant, self.variants[name], f"variants.{name}")

    def stage(self, variant: Variant, name: str) -> StageConfig:
        """How a variant is trained: as the run's GRPO, but for what it says."""
        said = {key: getattr(variant, key) for key in ("epochs", "lr", "keep", "collected")}
        known = {key: value for key, value in said.items() if value is not None}
        return cast(StageConfig, changed(self.grpo, known, f"variants.{name}"))

    def of(self, variant: Variant, name: str) -> tuple[DemonstrationRewardConfig, SelectorLossConfig]:
        """Reward and loss of a variant: those of the run, but for what it says."""
        return (
            changed(self.reward, variant.reward, f"variants.{name}.reward"),
            changed(self.loss, variant.loss, f"variants.{name}.loss"),
        )


def checked(kind: type[Any], values: Any, where: str) -> Any:
    """A dataclass of this kind with these values, which are said to stand at `where` when they are refused."""
    return changed(kind(), values, where)


def changed(base: Any, values: Any, where: str) -> Any:
    """A dataclass with some values changed.

    Raises:
        InputError: an unknown key, a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(base), OmegaConf.create(values))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InputError(f"settings: {where}: {str(error).splitlines()[0]}") from error
    except InputError as error:
        raise InputError(f"settings: {where}: {error}") from error


SELECTOR_GROUPS: dict[str, dict[str, Any]] = {"beams": {"builtin": BuiltinBeams, "files": BeamFiles}}
