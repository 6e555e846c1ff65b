"""What `results.json` holds: a type for the whole and for each of its parts. docs/metrics.md says
what every name means.

A file may lack any key: some are of controllers, some of selectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

# it imports torch, which is slow to load
if TYPE_CHECKING:
    from knobwise.agents.calibration.guard import GuardRow

Interval = list[float]
"""The lower and the upper end, at 95 % confidence."""
Configuration = dict[str, bool | int | float | str]
"""The value of each knob."""


class ProfileFacts(TypedDict, total=False):
    """The profile, or the beams."""

    name: str
    digest: str
    samples: int
    configurations: int
    candidates: int


class CostFacts(TypedDict, total=False):
    """What is known of a further cost of the profile."""

    unit: str
    limit: float


class PolicyRow(TypedDict, total=False):
    """A policy at a budget or number of shots, or with its means over the budgets. For each further
    cost, such as usd, it also has `cost_usd_mean`, and with a limit `cost_usd_over`.

    Where not every cell was measured, `measured_decisions` says how many of the `decisions` were;
    where these are too few, every number that rests on them is None. Elsewhere both are None."""

    policy: str
    budget_ms: float | None
    shots: int
    queries: int
    accuracy: float | None
    accuracy_ci95: Interval | None
    accuracy_per_seed: list[float] | None
    accuracy_per_split: list[float] | None
    utility: float | None
    utility_ci95: Interval | None
    utility_per_seed: list[float] | None
    utility_per_split: list[float] | None
    utility_free: float | None
    reward: float | None
    gap_closed: float | None
    gap_closed_ci95: Interval | None
    attained: float | None
    latency_ms_mean: float | None
    latency_ms_mean_ci95: Interval | None
    latency_ms_p95: float | None
    satisfaction: float | None
    satisfaction_ci95: Interval | None
    satisfaction_feasible: float | None
    satisfaction_feasible_ci95: Interval | None
    infeasible: float | None
    effective_cells: float | None
    measured_decisions: int | None
    decisions: int | None
    decision_us_p50: float | None
    price: float | None
    worth_ms: float | None
    oracle_accuracy: float | None
    over_static: float | None
    over_static_ci95: Interval | None
    over_static_mix: float | None
    over_static_mix_ci95: Interval | None
    over_static_mix_at_budget: float | None
    over_static_mix_at_budget_ci95: Interval | None
    over_best_single: float | None
    over_best_single_ci95: Interval | None
    behind: float | None
    behind_ci95: Interval | None


class DatasetRow(PolicyRow, total=False):
    """The means of a policy on the samples of one data set."""

    dataset: str
    samples: int


class DifferenceRow(TypedDict, total=False):
    """The paired difference of two selectors at a number of shots."""

    policy: str
    against: str
    shots: int
    difference: float
    ci95: Interval


class ConfigurationRow(TypedDict, total=False):
    """The means of a configuration on the test samples."""

    label: str
    knobs: Configuration
    accuracy: float
    latency_ms: float
    utility: float


class UsageRow(TypedDict, total=False):
    """How often a policy sets a knob to a value at a budget."""

    policy: str
    budget_ms: float
    knob: str
    value: object
    share: float


class ReliabilityBin(TypedDict):
    """Decisions of similar predicted probability of being on time."""

    decisions: int
    expected_in_time: float
    in_time: float


class Attainable(TypedDict, total=False):
    """What looks learnable from the features."""

    gain: float
    gain_ci95: Interval
    oracle: float
    oracle_ci95: Interval
    samples: int
    learned: list[list[bool]]
    components: int


class CurvePoint(TypedDict, total=False):
    """What a quick policy attains with so many cells of each sample measured."""

    cells: int
    cost: float
    costs: dict[str, float]
    utility: float
    utility_ci95: Interval
    static: float
    behind: float
    behind_ci95: Interval


class GrpoGain(TypedDict, total=False):
    """What GRPO added to the deployed policy, mean over seeds; None without samples."""

    test: float | None
    test_ci95: Interval | None
    held_out: float | None
    held_out_ci95: Interval | None


class RuleFacts(TypedDict):
    """A rule of the user's own."""

    name: str
    numbers: dict[str, object]


class TrainingFacts(TypedDict, total=False):
    """How long a controller was trained."""

    warmup_iterations: int
    iterations: int
    method: str
    hidden: int
    patience: int
    ended_at: list[int]
    loss: str
    """The name of a loss of the user's own."""
    loss_settings: dict[str, object]
    """Its own settings."""


class RunFacts(TypedDict):
    """When a run was made, and by which code."""

    started: str
    seconds: float
    commit: str | None
    metrics_sha256: NotRequired[str]
    """Of `metrics.csv`, of which half is a table too."""


class Chosen(TypedDict, total=False):
    """What a seed chose on held-out samples."""

    iteration: int
    weights: dict[str, float]
    settings: dict[str, object]
    grpo: dict[str, float]


class DifficultyGroup(TypedDict):
    """Samples of similar difficulty, in means."""

    difficulty_ms: float
    policy_ms: float
    static_ms: float
    ci95: Interval


class Difficulty(TypedDict, total=False):
    """How the latency of the choice grows with the difficulty of a sample."""

    unanswered: int
    budget_ms: float | None
    setting: float
    setting_ci95: Interval | None
    correlation: float | None
    ci95: Interval | None
    static: float | None
    groups: list[DifficultyGroup]
    points: list[list[float]]


class Importance(TypedDict):
    """What is lost without a block of features, or one of its columns."""

    name: str
    column: str | int | None
    lost: float
    ci95: Interval


class TreeRule(TypedDict):
    """A leaf of the tree that imitates the policy."""

    when: list[tuple[str, str, float]]
    then: Configuration
    share: float
    alike: float


class Tree(TypedDict):
    """A small decision tree that imitates the policy."""

    fidelity: float
    ci95: Interval
    by_budget_alone: float
    beyond_budget: NotRequired[float]
    beyond_budget_ci95: NotRequired[Interval]
    """Results of before 0.2 do not have these two."""
    exact: float
    rules: list[TreeRule]


class Side(TypedDict):
    """What a policy chose for a sample, and what that costs and brings."""

    configuration: Configuration
    accuracy: float
    latency_ms: float


class SingleDecision(TypedDict):
    """A decision of the policy beside that of static."""

    sample_id: str
    dataset: str
    question: str | None
    budget_ms: float
    policy: Side
    static: Side
    gain: float


class BestAndWorst(TypedDict):
    """The decisions that gain most over static, and those that lose most."""

    best: list[SingleDecision]
    worst: list[SingleDecision]


class WhyExplained(BestAndWorst):
    """Why the deployed policy sets the knobs as it does."""

    samples: int
    reads: list[float]
    difficulty: Difficulty
    more_time: dict[str, float] | None
    importance: list[Importance]
    tree: Tree


class TrueCalls(TypedDict):
    """How often a variant called the answering model, by seed."""

    policy: str
    calls: list[int]
    recorded: int


class CalibrationBin(TypedDict):
    """Sequences of similar predicted reward."""

    policy: str
    drawn_by: str
    expected: float
    right: float


class PromiseFacts(TypedDict, total=False):
    """What was promised at a budget: of a seed's controller, or of single configurations; and what
    came of it on test samples."""

    split: int
    seed: int
    policy: str
    budget_ms: float
    promise: float
    kept: bool
    rule: str
    rule_ms: float
    held_out: float
    held_out_bound: float
    held_out_requests: int
    requests_needed: int
    expected_accuracy: float
    test: float
    test_ci95: Interval
    test_requests: int
    outside: float
    accuracy: float
    broken: bool


class MachineFacts(TypedDict):
    """What requests were served on: the load of the machine, and how much equal answers vary."""

    cpu: str
    torch: str
    threads: int
    load: float
    jitter: float | None


class SpeedFacts(TypedDict, total=False):
    """How many times as long as in the profile answers took, before the stream and during it."""

    before: float
    during: float
    during_ci95: Interval


class AgreementRow(TypedDict):
    """A number of a policy that served requests, and that of a replay of its decisions."""

    policy: str
    what: str
    live: float
    replay: float
    agrees: bool
    difference: float
    ci95: Interval


class OverheadFacts(TypedDict):
    """What the controller added to the model's own time."""

    inference_ms: float
    overhead_us: float
    decision_us_p50: float
    features_and_knobs_us_p50: float
    share: float
    share_p50: float


class ServedRow(TypedDict):
    """A request that the controller served, and what its tracker allowed for."""

    latency_ms: float
    budget_ms: float
    level: float
    spread: float
    residual: float


class KeptRow(TypedDict):
    """The share on time of the requests for which one was promised, in a part of a live stream."""

    policy: str
    window: int
    promise: float
    requests: int
    on_time: float
    ci95: Interval
    broken: bool


class LiveFacts(TypedDict, total=False):
    """How requests were served live."""

    kind: str
    requests: int
    model: str
    clock: str
    machine: MachineFacts
    speed: SpeedFacts
    agreement: list[AgreementRow]
    overhead: OverheadFacts
    decisions: dict[str, float]
    configurations: dict[str, Configuration]
    tracker: dict[str, float]
    ignored: dict[str, int]
    slowdown: float
    promises: list[KeptRow]
    timeline: list[ServedRow]


class RunResults(TypedDict, total=False):
    """The content of `results.json`."""

    experiment: str
    command: str
    sha256: list[str]
    run: RunFacts
    system: str
    sense: str
    profile: ProfileFacts
    split: str
    split_seeds: list[int]
    test_samples: int
    sampled: dict[str, list[int]]
    test_clusters: int | None
    test_queries: int
    test_digest: str
    test_candidates: int
    seeds: list[int]
    unit: str
    rule: RuleFacts
    costs: dict[str, CostFacts]
    budgets_ms: list[float]
    shots: list[int]
    trained_shots: int
    rows: list[PolicyRow]
    controls: list[PolicyRow]
    votes: list[PolicyRow]
    by_dataset: list[DatasetRow]
    differences: list[DifferenceRow]
    configurations: list[ConfigurationRow]
    knob_usage: list[UsageRow]
    static_hull: list[ConfigurationRow]
    reliability: list[ReliabilityBin]
    attainable: Attainable
    grpo_gain: GrpoGain
    guard: list[list[GuardRow]]
    promises: list[PromiseFacts]
    chosen: list[Chosen]
    validation_utility: list[float]
    validation_reward: list[float]
    training: TrainingFacts
    warnings: list[str]
    explanation: WhyExplained
    best_seed: int
    best_policy: str
    judged_by: str
    hidden: list[str]
    variants: list[str]
    reward_mode: str
    epochs: dict[str, list[int]]
    validation: dict[str, list[float]]
    true_calls: list[TrueCalls]
    calibration: list[CalibrationBin]
    live: LiveFacts


PolicyRows = Literal["rows", "controls", "votes"]
"""The keys of what has a row for each policy and condition."""
