"""A trained controller as people use it: features and a budget in, knob values out, with reasons on
request. This file needs no torch; a policy imports it for its network alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import ArrayLike

from knobwise.agents.deployed.arrays import Array, Arrays, configurations_of
from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.common.errors import InputError
from knobwise.envs.tables.columns import columns_of
from knobwise.serving.inputs import as_array, blocks_of

if TYPE_CHECKING:
    from torch import Tensor

    from knobwise.agents.calibration.deployed_controller import DeployedController
    from knobwise.agents.calibration.guard import GuardRow
    from knobwise.agents.training.checkpoint import Loaded
    from knobwise.envs.tables.profile_table import KnobValue

Numbers = Union[ArrayLike, "Tensor"]
Blocks = Mapping[str, Numbers] | Numbers | None
Configuration = dict[str, "KnobValue"]
UNLIKE = (
    "a text is unlike those of training, or a number is missing that all of these have, or outside "
    "their range"
)
"""What is said of a request by whose features the policy is not asked."""
EXACT = 1e-3
"""How exactly a change of the decision is located, in ln ms."""


@dataclass(frozen=True)
class Explanation:
    """A decision, the rule that made it, and what the policy expects of every configuration."""

    decision: Configuration
    reason: str
    expected: list[dict[str, Any]]
    """For each `configuration` the `probability` with which the policy draws it, the highest first;
    and as its teacher expects them, `accuracy` in 0 … 1, `latency_ms`, `on_time` (the probability)
    and `utility`, accuracy · on_time. Under a mean budget nothing is late, and utility is accuracy
    − price · latency. With a drift there is also `slower`: latency with it / without. A policy
    without a teacher has only the probability."""
    runner_up: dict[str, Any] | None
    """The first row of `expected` that was not chosen; None if there is only one configuration."""
    by_budget: list[tuple[float, Configuration]]
    """The decisions for this input over the budgets: the budget in ms from which on a decision
    holds, and its knob values. The choice changes at each but the first, exact to a thousandth. A
    controller for mean budgets knows only the budgets that it was calibrated for; where the static
    mix decides, the configuration that it takes more often is listed; at this budget the
    decision."""
    guard: GuardRow | None
    """The row of the calibrated budget nearest to this one, see `Guard.rows`; None without a
    guard."""
    without_drift: Configuration | None
    """The decision without the drift; None if there is none."""


class KnobPolicy:
    """Sets the knobs for each input under its budget.

    Args:
        loaded: the content of a checkpoint; or with `exported` a function that reads it, which
            needs torch, once somebody asks for the network.
        exported: the controller of that checkpoint, which decides until then.

    Attributes:
        unit: of budgets: ms, or that of a cost that is no time, such as USD. All that is called
            `…_ms` below is in it.
        features: the widths of the feature blocks that it reads, by name; empty if it sees the
            budget only.
        columns: what the block `features` holds, if its columns have names. A request may then have
            their values by name instead of the block.
        datasets: the columns of the block `dataset` if that is an input, else []. In a request 1
            marks its data set; all 0 is an unknown one.
        knobs, configurations: the values of each knob, and the knob values of each configuration.

    Raises:
        InputError: a checkpoint of a selector, or one from inside a training for mean budgets.
    """

    def __init__(
        self, loaded: Loaded | Callable[[], Loaded], exported: NumpyController | None = None
    ) -> None:
        self._loaded = loaded
        self._exported = exported
        self._agent: DeployedController | None = None
        decider = self.decider
        if not decider.header["limit"]:
            raise InputError(
                "the prices of mean budgets are not calibrated yet; let the training finish"
            )
        self.unit = decider.unit
        self.features = decider.feature_sizes
        self.columns = columns_of(decider.columns)
        self.datasets = decider.datasets
        self.knobs = decider.knobs
        self.configurations = configurations_of(decider)

    @property
    def loaded(self) -> Loaded:
        """The content of the checkpoint, whose network decides from the first use on.

        Raises:
            InputError: it cannot be read any more, or was replaced by another since.
        """
        if callable(self._loaded):
            loaded = self._loaded()
            agent = loaded.controller
            if self._exported is not None:
                if agent.decider.digest != self._exported.digest:
                    raise InputError("the checkpoint was replaced since; load the policy again")
                agent.decide_by(self._exported)
            self._loaded, self._agent = loaded, agent
        return self._loaded

    @property
    def agent(self) -> DeployedController:
        """The controller with its network; raises InputError as `loaded`."""
        loaded = self.loaded
        if self._agent is None:
            self._agent = loaded.controller
        return self._agent

    @property
    def decider(self) -> NumpyController:
        """The controller that decides, in NumPy."""
        if self._exported is not None and callable(self._loaded):
            return self._exported
        # whoever has the network may train it further
        return self.agent.decider

    @property
    def judged(self) -> dict[str, Any] | None:
        """How it did on test samples, as in `results.json`, if `knobwise.fit` trained it; else
        None."""
        return self.loaded.extra.get("judged")

    def __getstate__(self) -> dict[str, Any]:
        # a copy takes the network along, and makes its own decider
        return vars(self) | {"_loaded": self.loaded, "_agent": self._agent, "_exported": None}

    def __repr__(self) -> str:
        return (
            f"<KnobPolicy: {self.features or 'no features'} and a budget → "
            f"{len(self.configurations)} configurations of {', '.join(self.knobs)}>"
        )

    def decide(
        self,
        features: Blocks,
        budget_ms: Numbers,
        *,
        explain: bool = False,
        drift: Drift | None = None,
        between_ms: tuple[float, float] | None = None,
        deterministic: bool = True,
        seed: int | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> Any:
        """Decide for one input, or for n.

        Args:
            features: blocks [n, d] by name, or [d] for one input or for all alike: lists, NumPy or
                torch, NaN where a value is missing. A policy that reads one block takes it without
                its name, one without features None. Instead of the block `features` the values of
                its `columns` by name, for one input: numbers and text, None for what is missing.
                A text or a chat, a list of messages, for one input, instead of the block of a
                policy that was trained on texts.
                Names that the policy does not read are ignored.
            budget_ms: the time that an answer may take, in ms, or what it may cost, in `unit`, for
                all inputs or [n]; of a controller for mean budgets the mean over all inputs, one
                that it was calibrated for.
            explain: give an `Explanation`.
            drift: how latencies here differ from those predicted, as a `LatencyTracker` has it.
            between_ms: where an explanation looks for flips; None for a tenth of each budget and
                ten times it.
            deterministic: take the policy's most probable choice; if False draw from the policy.
                Where the guard falls back, static or the static mix decides as ever.
            seed: of the draws of this call, ≥ 0; None for others each time.
            limits: on further costs by name, such as {"usd": 0.002}, for all inputs, in place of
                those that it was trained with. Warns where no configuration is expected to keep
                them, so that the cheapest is taken, and where guard and static were calibrated at
                others.

        Returns:
            The knob values by name, or an `Explanation`; a list of n if any argument is for n.

        Raises:
            InputError: a block is missing, no numbers, infinite or of another shape, a budget is no
                number, or not positive, finite and calibrated, the drift is that of another
                controller, the seed is negative or given without draws, or a limit is not positive
                or on a cost that is not predicted.
        """
        random = None if deterministic else _generator(seed)
        if deterministic and seed is not None:
            raise InputError("decide: seed is for draws; give deterministic=False, or leave it out")
        arrays = blocks_of(features, self.decider)
        budgets = as_array("budget_ms", budget_ms)
        count = _number_of_inputs(arrays, budgets)
        if count == 0:
            return []
        blocks, each = _for_each(arrays, budgets, 1 if count is None else count)
        chosen = self._choose(blocks, each, drift=drift, random=random, cost_limits=limits)
        if note := self.decider.limits_note(blocks, limits):
            warnings.warn(note, stacklevel=2)
        results: list[Configuration | Explanation] = [
            dict(self.configurations[choice]) for choice in chosen
        ]
        if explain:
            for i, choice in enumerate(chosen):
                alone = {name: block[i : i + 1] for name, block in blocks.items()}
                results[i] = self._explanation(
                    alone,
                    each[i : i + 1],
                    choice=choice,
                    limits=limits,
                    drift=drift,
                    between_ms=between_ms,
                )
        return results[0] if count is None else results

    def choose(self, features: Arrays, limits: Array, mask: Array | None = None) -> Array:
        """Choose for n requests, see `knobwise.agents.evaluation.policy.Policy`."""
        return self._choose(features, limits, mask)

    def reads_features(self, limits: Array) -> Array:
        """Tell under which limits [n] the policy reads features, bool [n]."""
        return self.decider.reads_features(limits)

    def settled(self, budget_ms: float) -> DeployedController:
        """Return the controller for requests with this budget, see `NumpyController.settled`."""
        return self.agent.settled(budget_ms)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, which `knobwise.load` reads.

        Raises:
            InputError: it cannot be written.
        """
        self.loaded.save(path)

    def _choose(
        self,
        features: Arrays,
        limits: Array,
        mask: Array | None = None,
        decider: NumpyController | None = None,
        **options: Any,
    ) -> Array:
        """Choose for n requests by this or another decider, see `NumpyController.choose`. Raises
        InputError where it raises a ValueError, since NumPy's folder knows no errors of ours."""
        try:
            return (decider or self.decider).choose(features, limits, mask, **options)
        except ValueError as error:
            raise InputError(str(error)) from error

    def _explanation(
        self,
        blocks: Arrays,
        budgets: Array,
        *,
        choice: int,
        limits: Mapping[str, float] | None,
        drift: Drift | None,
        between_ms: tuple[float, float] | None,
    ) -> Explanation:
        """Explain one decision: blocks [1, d], budgets [1]."""
        numbers = self.agent.expected(blocks, budgets, limits, drift)
        expected: list[dict[str, Any]] = []
        for i, knobs in enumerate(self.configurations):
            row = {name: float(values[0, i]) for name, values in numbers.items()}
            expected.append({"configuration": dict(knobs), **row})
        # in the order of the configurations still
        decided = expected[choice]
        expected.sort(key=lambda row: -row["probability"])
        without_drift = None
        if drift is not None:
            (still,) = self._choose(blocks, budgets, cost_limits=limits)
            without_drift = dict(self.configurations[still])
        # the row of the guard; the mean offset acts on the budget, as `NumpyController` has it
        guard: GuardRow | None = None
        decider = self.decider
        if self.agent.calibration.guard and decider.calibrated is not None:
            (group,) = decider.calibrated.groups(budgets * decider.factor(drift))
            guard = self.agent.calibration.guard[group].copy()
        budget = float(budgets[0])
        low = budget / 10
        high = budget * 10
        if between_ms is not None:
            low, high = between_ms
        alone = {name: block[0] for name, block in blocks.items()}
        reason = self._reason(decided, expected, guard, alone, budget, drift, limits)
        if note := decider.limits_note(blocks, limits):
            reason += f"; {note}"
        return Explanation(
            decision=dict(decided["configuration"]),
            reason=reason,
            expected=expected,
            runner_up=next((row for row in expected if row is not decided), None),
            by_budget=self._by_budget(
                blocks, budgets, choice=choice, limits=limits, drift=drift, low=low, high=high
            ),
            guard=guard,
            without_drift=without_drift,
        )

    def _reason(
        self,
        row: dict[str, Any],
        expected: list[dict[str, Any]],
        guard: GuardRow | None,
        request: Arrays,
        budget_ms: float,
        drift: Drift | None,
        limits: Mapping[str, float] | None,
    ) -> str:
        """Return why a configuration was chosen for a request, blocks [d], under a budget."""
        if guard is not None and not guard["deployed"]:
            static = self.decider.budgets.static_words
            alike = "treats all inputs alike"
            within = self.decider.limits
            if within.logs(limits) is not None and within.read_features:
                alike = "reads features for the limits alone"
            reason = f"the guard lets {static} decide, which {alike}"
            mean = self.decider.mean
            if mean is not None and mean.mix:
                share = mean.share_of(budget_ms, self.configurations.index(row["configuration"]))
                reason += f": {100 * share:.3g}% of them get this configuration"
            return reason
        decider = self.decider
        if decider.promise is not None:
            promised = decider.promised(budget_ms, drift)
            assert promised is not None
            words = f"at least {100 * promised.share:g}% on time is promised"
            whole = np.array([budget_ms * decider.factor(drift)])
            for_all = decider.decides_by_static(request, budget_ms, drift)
            if not promised.share:
                words = "nothing can be promised here, where the policy is most often on time"
                if for_all:
                    words = "nothing can be promised here, so what is most often on time decides"
            elif decider.is_unlike(request):
                words = f"{UNLIKE}, so nothing is promised"
            elif not decider.promise.shares_at(whole)[0]:
                # the rule of a budget decides as soon as that is left which it plans with
                words = (
                    f"nothing is promised below {promised.budget_ms:.6g} {decider.unit}, of which "
                    "features and decisions take a part"
                )
            if for_all:
                return f"{words}; this configuration decides for all inputs"
            return f"{words}; it has the highest probability of those that are expected in time"
        if self.decider.is_unlike(request) and self.decider.static is not None:
            return f"{UNLIKE}, so budget-aware static decides"
        reason = "it has the highest probability"
        if row["probability"] < expected[0]["probability"]:
            reason = f"it was drawn from the policy, with probability {row['probability']:.1%}"
        if "utility" in row:
            # what limits forbid has no probability
            most = max(other["utility"] for other in expected if other["probability"] > 0)
            if row["utility"] < most - 1e-6:
                reason += ", although the teacher predicts higher utility for another configuration"
        return reason

    def _by_budget(
        self,
        blocks: Arrays,
        this_budget: Array,
        *,
        choice: int,
        limits: Mapping[str, float] | None,
        drift: Drift | None,
        low: float,
        high: float,
    ) -> list[tuple[float, Configuration]]:
        """Return decisions for one input [1, d], each with the budget from which on it holds.

        At `this_budget`, [1], which was asked for, a static mix made this choice, in its turn."""
        # nobody is answered, so no turn may be used up
        decider = self.decider.without_turns()
        budgets = decider.budgets.between(low, high, EXACT)
        repeated = {}
        for name, block in blocks.items():
            repeated[name] = np.broadcast_to(block, (len(budgets), block.shape[1]))
        limits_ms = budgets.astype(np.float32)
        chosen = self._choose(repeated, limits_ms, decider=decider, drift=drift, cost_limits=limits)
        if decider.mean is not None and decider.mean.mix:
            group = decider.mean.groups(budgets)
            mixed = ~decider.mean.deployed[group]
            chosen[mixed & (group == decider.mean.groups(this_budget))] = choice
        starts = np.flatnonzero(np.r_[True, chosen[1:] != chosen[:-1]])
        return [(float(budgets[i]), dict(self.configurations[chosen[i]])) for i in starts]


def _number_of_inputs(blocks: Arrays, budgets: Array) -> int | None:
    """Return for how many inputs blocks and budgets are; None where all are for a single one.

    Raises:
        InputError: they are for different numbers of inputs.
    """
    sizes = {*budgets.shape, *(len(block) for block in blocks.values() if block.ndim == 2)}
    if len(sizes) > 1:
        raise InputError(
            f"decide: features and budgets must be for equally many inputs, not {sorted(sizes)}"
        )
    return next(iter(sizes), None)


def _for_each(blocks: Arrays, budgets: Array, n: int) -> tuple[Arrays, Array]:
    """Return blocks [n, d] and budgets [n]: what is for one input is the same for all."""
    of_each = {}
    for name, block in blocks.items():
        of_each[name] = np.tile(block, (n, 1)) if block.ndim == 1 else block
    return of_each, budgets if budgets.ndim else budgets.repeat(n)


def _generator(seed: int | None) -> np.random.Generator:
    """Return a generator of draws. Raises InputError: the seed is no whole number from 0 on."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise InputError(f"decide: seed={seed!r}: must be a whole number from 0 on") from error
