"""The settings of `knobwise train experiment=selector…`, for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knobwise.agents.selector.settings import RewardModelConfig, SelectorConfig
from knobwise.agents.training.settings import StageConfig
from knobwise.common.checks import a_seed, at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import GROUPS, DemonstrationRewardConfig
from knobwise.experiments.settings.tracking import Training
from knobwise.losses.settings import SelectorLossConfig
from knobwise.profiling.demonstrations.settings import VLMTaskConfig
from knobwise.profiling.endpoint.settings import NAME as ENDPOINT
from knobwise.profiling.endpoint.settings import EndpointOptions

if TYPE_CHECKING:
    from knobwise.envs.demonstrations.beam_table import BeamTable

T = TypeVar("T")


@dataclass
class BuiltinBeams:
    """The beams that come with knobwise: digits, frames and textures, answered by a small
    in-context learner."""

    format: str = "builtin"
    """The reader."""
    variant: str = "careless"
    """`careless`: six of ten annotators are careless, which imitation cannot detect; `careful`:
    none is."""


@dataclass
class BeamFiles:
    """Recorded beams of another system. Without a model to answer new sequences, training and
    judging replay the records."""

    format: str = "files"
    """The reader."""
    path: str = MISSING
    """Beams: JSON in either format, or a `.safetensors` that `BeamTable.save` wrote, with the
    embeddings inside."""
    embeddings: str | None = None
    """For JSON: embeddings of the candidates; the row is the index in the data set."""
    query_embeddings: str | None = None
    """Embeddings of the queries; None if they are the same."""
    model: str | None = None
    """The model that was recorded, which answers new sequences: a Hugging Face model (a folder, or
    a name on the hub), smollm2, openai, or module:Class; None replays the records. Each seed that
    is trained at the same time (`jobs`) loads its own."""
    vlm: VLMTaskConfig = field(default_factory=VLMTaskConfig)
    """The items of `model`, as they were recorded, and how it runs; embeddings are those of the
    beams."""
    served: EndpointOptions = field(default_factory=EndpointOptions)
    """With beams.model=openai: how it is asked, as in `knobwise profile`; `max_usd` holds for each
    seed and call."""
    train: float = 0.8
    """Share of the queries to fit on."""
    validation: float = 0.1
    """Share to choose the epoch on; the rest is the test part."""
    split_seed: int = 0
    """Seed of the split."""

    def __post_init__(self) -> None:
        a_seed("beams.split_seed", self.split_seed)
        usual = language_task() if isinstance(self, SmollmBeams) else VLMTaskConfig()
        if self.model is None and self.vlm != usual:
            raise InputError("beams.vlm: is for beams.model, the model that answers new sequences")
        if self.model != ENDPOINT and self.served != EndpointOptions():
            raise InputError(f"beams.served: is for beams.model={ENDPOINT}; leave it out")
        if self.served.messages is not None:
            raise InputError("beams.served.messages: demonstrations are the messages; leave it out")
        for name in ("embeddings", "query_embeddings", "image_columns"):
            if getattr(self.vlm, name):
                raise InputError(f"beams.vlm.{name}: the beams hold their embeddings; leave it out")


def language_task() -> VLMTaskConfig:
    """Give the settings by which SmolLM2 was asked when its beams were recorded: no chat template,
    float32."""
    return VLMTaskConfig(chats=False, dtype="float32", batch_size=16)


@dataclass
class SmollmBeams(BeamFiles):
    """Beams of SmolLM2, a pretrained language model, which come with knobwise: 837 short questions
    of 20 kinds, each answered after up to 24 pairs of demonstrations (docs/demonstrations.md)."""

    format: str = "smollm2"
    """The reader."""
    path: str = "smollm2"
    """The beams that come with knobwise."""
    vlm: VLMTaskConfig = field(default_factory=language_task)
    """How `model` runs; its items come with knobwise too."""
    train: float = 0.55
    """Share of the queries to fit on."""
    validation: float = 0.1
    """Share to choose the epoch on; the rest, 293 queries, is the test part."""


@dataclass
class StoredEncoder:
    """The embeddings that come with the beams."""

    format: str = "stored"
    """The reader."""


@dataclass
class ClipLora:
    """v2_lora: a CLIP model embeds picture and question of each item, and learns along with the
    selector, by LoRA."""

    format: str = "clip"
    """The reader."""
    model: str | None = None
    """CLIP model with its processor: a folder, or a name on the Hugging Face hub."""
    data: str | None = None
    """Items, a table such as JSON lines: id, image, question, answers. For beams in JSON,
    item i is query i; in a `.safetensors`, queries are named by the ids of their items."""
    bank: str | None = None
    """File of the candidates, an item for each, in the order of their embeddings; None if they are
    those of `data`."""


BEAMS = {"builtin": BuiltinBeams, "files": BeamFiles, "smollm2": SmollmBeams}
"""The choices of the group `beams`, by name."""
ENCODERS = {"stored": StoredEncoder, "clip": ClipLora}
"""The choices of the group `encoder`, by name."""


@dataclass
class Variant:
    """One way to post-train the supervised selector. None takes the run's value."""

    live: bool = False
    """Draw from the policy while it learns and score the draws; otherwise replay recorded
    sequences."""
    reward_model: dict[str, Any] | None = None
    """Draw from the policy while it learns, and score the draws by a learned reward. The value
    lists changes to the run's `reward_model`, {} for none; null means no learned reward. GRPO then
    uses only `shuffled` of `reward`."""
    own_draws: int = 8
    """In replay, how many sequences of the SFT policy are drawn, scored and recorded for each query
    beforehand; needs a scorer."""
    rounds: int = 1
    """In replay, how often that is done, from the second time on with the policy of the round
    before."""
    groups: str = "without_beams"
    """In replay, the recorded sequences in a group: all, without_beams (none that was found with
    the answer in view), own (the policy's draws) or beams."""
    warmup: bool = True
    """Start from RCE; otherwise from supervised fine-tuning."""
    epochs: int | None = None
    """Passes over the training queries, in each round."""
    keep: str | None = None
    """The epoch that is judged: best (on validation), last, or best_kl. Controls take the last."""
    collected: int | None = None
    """Queries whose old log-probs are computed at once."""
    reward: dict[str, Any] = field(default_factory=dict)
    """Changes to the reward, for RCE too."""
    loss: dict[str, Any] = field(default_factory=dict)
    """Changes to the loss."""
    hidden: list[str] = field(default_factory=list)
    """Blocks of the embeddings that are hidden from the selector; supervised fine-tuning and RCE
    are then repeated without them, as hidden_sft and hidden_rce."""

    def __post_init__(self) -> None:
        one_of("groups", self.groups, GROUPS)
        at_least("own_draws", self.own_draws, 0)
        at_least("rounds", self.rounds, 1)
        if self.live and self.reward_model is not None:
            raise InputError(
                "live=true answers every draw, so no reward_model is needed; leave out one of them"
            )


@dataclass
class SelectorRun(Training):
    """knobwise train experiment=selector: train selectors of demonstrations with several seeds,
    compare them with every simple policy on unseen queries and candidates, and report."""

    experiment: str = "selector"
    beams: Any = MISSING
    """Recorded sequences of demonstrations."""
    encoder: Any = MISSING
    """What embeds queries and candidates."""
    selector: SelectorConfig = field(default_factory=lambda: SelectorConfig(dropout=0.2))
    """The network."""
    reward: DemonstrationRewardConfig = field(default_factory=DemonstrationRewardConfig)
    """The reward of a recorded or scored sequence, in RCE and GRPO."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The learned reward of variants that have one."""
    loss: SelectorLossConfig = field(default_factory=SelectorLossConfig)
    """The loss that is minimised."""
    sft: StageConfig = field(default_factory=lambda: StageConfig(epochs=15, lr=1e-3))
    """Supervised fine-tuning on the sequences that `imitated` names."""
    imitated: str = "beams"
    """The recorded sequences that supervised fine-tuning learns from: all, without_beams (none that
    was found with the answer in view), own (draws of a policy) or beams."""
    rce: StageConfig = field(default_factory=lambda: StageConfig(epochs=2, lr=1e-4))
    """The warm-up before GRPO, on all recorded sequences."""
    grpo: StageConfig = field(default_factory=lambda: StageConfig(epochs=6, lr=3e-4, lr_warmup=0.1))
    """GRPO, unless a variant sets something else."""
    variants: dict[str, Any] = field(default_factory=dict)
    """The ways to post-train, by name; see
    `knobwise.experiments.settings.selector_options.Variant`. null leaves one out."""
    shots: int = 0
    """Number of demonstrations in a sequence that is drawn in training or validated; 0 takes what
    recorded sequences have: 2 if some have 2, else that of the longest. Recorded sequences of every
    length are learned from."""
    judged_shots: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """Numbers of demonstrations in a sequence to judge at."""
    jobs: int = 2
    """Seeds trained at the same time, each in a process with one thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("imitated", self.imitated, GROUPS)
        self.variants = {
            name: values for name, values in self.variants.items() if values is not None
        }

    @property
    def tags(self) -> list[str]:
        """See `Training`."""
        return [f"reward-{self.reward.mode}"]

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each variant: the run's settings, with the changes that it makes.

        Raises:
            InputError: an unknown key in a variant, or a value of the wrong type.
        """
        return {name: self._plan(f"variants.{name}", self.variants[name]) for name in self.variants}

    def _plan(self, where: str, values: dict[str, object]) -> Plan:
        """Return the plan of a variant with these changes."""
        variant = with_changes(Variant(), values, where)
        # what the variant does not set is the run's
        stage = {key: getattr(variant, key) for key in ("epochs", "keep", "collected")}
        stage = {key: value for key, value in stage.items() if value is not None}
        learned = None
        if variant.reward_model is not None:
            learned = with_changes(self.reward_model, variant.reward_model, f"{where}.reward_model")
        return Plan(
            variant,
            with_changes(self.grpo, stage, where),
            with_changes(self.reward, variant.reward, f"{where}.reward"),
            with_changes(self.loss, variant.loss, f"{where}.loss"),
            learned,
        )


def resolve_selector(config: SelectorRun, table: BeamTable) -> SelectorRun:
    """Return the settings with the reward's mode and the number of shots that follow from the
    beams."""
    lengths = table.recorded_lengths
    # pairs are what most beams hold
    usual = 2 if 2 in lengths else lengths[-1]
    reward = config.reward.resolved(table.fields)
    return replace(config, reward=reward, shots=config.shots or usual)


class Plan(NamedTuple):
    """A variant, with the settings that it takes from the run filled in."""

    variant: Variant
    stage: StageConfig
    reward: DemonstrationRewardConfig
    loss: SelectorLossConfig
    reward_model: RewardModelConfig | None


def with_changes(base: T, values: dict[str, object], where: str) -> T:
    """Return a dataclass with some values changed.

    Args:
        where: the section that error messages name.

    Raises:
        InputError: an unknown key, a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(base), OmegaConf.create(values))
        return cast(T, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, InputError) as error:
        raise InputError(f"{where}: {str(error).splitlines()[0]}") from error
