"""The teacher: a network and experts that predict outcomes, weighted by how well each does.

Every member predicts accuracy and latency of each configuration, from which follows what the
configuration is worth under a limit; the weighted mean decides. It knows whole configurations,
which makes it a good teacher, and takes a millisecond, which is why it is not deployed.

The members are fitted in folds. A teacher of a fold has the parts that were fitted without it, so
that what it teaches about the fold's samples is not what was measured of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.deployed.arrays import Array, Arrays
from knobwise.agents.teacher.experts import Expert, Experts, MeasuredRows
from knobwise.agents.teacher.network import WIDEST, OutcomeNetwork
from knobwise.agents.teacher.outcomes import HOPELESS, Prediction, pick
from knobwise.agents.teacher.weights import HeldOutScores, stack_weights, weights_of_folds
from knobwise.envs.bandit.budgets import subsample
from knobwise.envs.bandit.rule_choice import as_rule
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.profile_table import ProfileTable

LEARNED = ("latency_offset", "latency_variance", "accuracy_logits")
"""Buffers that `knobwise update` sets after training."""
NARROWEST = 0.5
"""The least factor on a predicted spread of what is learned after training."""
AT_ONCE = 1024
"""Requests that are predicted together."""


class MemberPredictions(NamedTuple):
    """The predictions of a teacher's members for n requests, whatever limits these have.

    Attributes:
        weights: of K members, float [K, 1, 1].
        members: their predictions, [K, n, C].
        rule: of the budget, see `Controller`.
    """

    weights: Tensor
    members: Prediction
    rule: Rule

    def mean(self, values: Tensor) -> Tensor:
        """Return the weighted mean over the members: [K, n, C] → [n, C]."""
        return (self.weights * values).sum(0)

    @property
    def log_latency(self) -> Tensor:
        """The mean of ln ms, [n, C]."""
        return self.mean(self.members.log_latency)

    def score(self, limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the expected utility (mean budgets: accuracy − λ·latency) of each configuration,
        [n, C], under limits [n].

        Where no configuration inside the mask is likely to be on time, a faster one scores higher.
        """
        of_members = self.members.score(limits, self.rule)
        score = self.mean(of_members)
        if not self.rule.late:
            return score
        likely = self.mean(self.rule.likely(of_members, self.members, limits))
        if mask is not None:
            likely = likely.masked_fill(~mask, 0.0)
        # [n, 1], beside scores [n, C]
        hopeless = likely.amax(1, keepdim=True) < HOPELESS
        return torch.where(hopeless, -self.log_latency, score)

    def moments(self) -> Prediction:
        """Compute expected accuracy, and mean and standard deviation of ln ms, of the mixture of
        all members, [n, C] each."""
        accuracy, log_latency, spread = self.members
        mean = self.log_latency
        variance = self.mean(spread**2 + log_latency**2) - mean**2
        return Prediction(self.mean(accuracy.clamp(0, 1)), mean, variance.clamp_min(1e-6).sqrt())

    def drifted(self, offset: Tensor) -> MemberPredictions:
        """Return the mixture for a machine where ln ms is off by `offset`, [n, C]."""
        log_latency = self.members.log_latency + offset
        return self._replace(members=self.members._replace(log_latency=log_latency))

    def choose(self, limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the best configurations under limits [n] inside the mask, int64 [n]."""
        return pick(self.score(limits, mask), self.log_latency, mask)


def concatenate_predictions(predictions: Sequence[Prediction]) -> Prediction:
    """Join predictions along their first axis."""
    return Prediction(
        accuracy=torch.cat([prediction.accuracy for prediction in predictions]),
        log_latency=torch.cat([prediction.log_latency for prediction in predictions]),
        spread=torch.cat([prediction.spread for prediction in predictions]),
    )


class Teacher(nn.Module):
    """Predicts outcomes by M networks side by side and by experts; its own decisions are those of a
    `Policy`.

    Args:
        network: M networks side by side, which count alike.
        normaliser: of the features.
        experts: beside the network.
        weights: float [1 + experts], the network's first.
        rule: of the budget, see `Controller`.
    """

    informed = True
    weights: Tensor
    latency_offset: Tensor
    latency_variance: Tensor
    accuracy_logits: Tensor

    def __init__(
        self,
        network: OutcomeNetwork,
        normaliser: FeatureNormaliser,
        experts: Sequence[Expert] = (),
        weights: Tensor | None = None,
        rule: Rule | str = DEADLINES,
    ) -> None:
        super().__init__()
        self.network = network
        self.normaliser = normaliser
        self.experts = nn.ModuleList(experts)
        self.register_buffer("weights", torch.ones(1) if weights is None else weights.float())
        self.rule = as_rule(rule)
        # what was learned after training, see `knobwise update`, [C] each
        count = network.outcome_head.bias.shape[-1] // 3
        for name in LEARNED:
            self.register_buffer(name, torch.zeros(count))

    @classmethod
    def for_table(
        cls,
        table: ProfileTable,
        rows: Tensor,
        config: PolicyConfig,
        normaliser: FeatureNormaliser,
        network_rows: Tensor,
        rule: Rule | str = DEADLINES,
    ) -> Teacher:
        """Return a fresh network without experts, at the means of these rows (int64 [n]).

        Each network is fitted on `network_rows`, bool [M, n].
        """
        network_rows = subsample(network_rows.T).T
        rows = subsample(rows)
        x = normaliser.of_rows(table, rows)
        bins = 0 < normaliser.width <= WIDEST
        network = OutcomeNetwork(normaliser.width, table.num_configurations, config, bins)
        network.start_from(x, table.accuracy[rows], table.latency_ms[rows], network_rows)
        return cls(network, normaliser, rule=rule)

    @property
    def networks(self) -> int:
        """The number of networks side by side."""
        return len(self.network.outcome_head.bias)

    def mixture(self, x: Tensor) -> MemberPredictions:
        """Predict from normalised features [n, width]."""
        share, *of_experts = self.weights.tolist()
        weights = []
        predictions = []
        if share > 0:
            # the networks count alike
            weights += [share / self.networks] * self.networks
            predictions.append(self.network(x.expand(self.networks, -1, -1)).predicted())
        for weight, expert in zip(of_experts, self.experts, strict=True):
            if weight > 0:
                weights.append(weight)
                predicted = expert(x)
                # [n, C] or [C] → [1, n, C]
                predictions.append(
                    Prediction(
                        accuracy=predicted.accuracy.expand(1, len(x), -1),
                        log_latency=predicted.log_latency.expand(1, len(x), -1),
                        spread=predicted.spread.expand(1, len(x), -1),
                    )
                )
        members = self._moved(concatenate_predictions(predictions))
        return MemberPredictions(x.new_tensor(weights).reshape(-1, 1, 1), members, self.rule)

    def _moved(self, prediction: Prediction) -> Prediction:
        """Apply what `knobwise update` learned after training: logits of accuracy shift, ln ms
        shifts and gets more variance."""
        if not any(getattr(self, name).any() for name in LEARNED):
            return prediction
        accuracy = prediction.accuracy
        if self.accuracy_logits.any():
            accuracy = (accuracy.clamp(0.01, 0.99).logit() + self.accuracy_logits).sigmoid()
        variance = prediction.spread.square()
        # members may be surer than all of them together, whose spread an update narrows
        moved = (variance + self.latency_variance).maximum(NARROWEST**2 * variance)
        return prediction._replace(
            accuracy=accuracy,
            log_latency=prediction.log_latency + self.latency_offset,
            spread=moved.sqrt(),
        )

    @torch.no_grad()
    def expected_utility(self, x: Tensor, limits: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return the expected utilities under several limits of each request: the distillation
        targets before the softmax.

        Args:
            x: normalised features [n, width].
            limits: [n, V].
            offsets: of ln ms, [n, V, C]; None for no drift.

        Returns:
            Float [n, V, C]; under a mean budget accuracy − latency/limit.
        """
        parts = []
        for rows, still in self._mixtures(x):
            columns = []
            for column, limit in enumerate(limits[rows].unbind(1)):
                # `still` predicts for a machine without drift
                mixture = still if offsets is None else still.drifted(offsets[rows, column])
                columns.append(mixture.score(limit))
            parts.append(torch.stack(columns, 1))
        return torch.cat(parts)

    def _mixtures(self, x: Tensor) -> Iterator[tuple[slice, MemberPredictions]]:
        """Predict from normalised features [n, width], for `AT_ONCE` requests at a time.

        Yields the rows that a prediction is for, and the prediction.
        """
        for first in range(0, max(len(x), 1), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            yield rows, self.mixture(x[rows])

    @torch.no_grad()
    def moments(self, x: Tensor) -> Prediction:
        """Predict the outcomes of every configuration from features [n, width]."""
        return concatenate_predictions([mixture.moments() for _, mixture in self._mixtures(x)])

    @torch.no_grad()
    def choose(self, features: Arrays, limits: Array, mask: Array | None = None) -> Array:
        """Choose for n requests, see `Policy.choose`."""
        return self._chosen(features, torch.tensor(limits, dtype=torch.float32)[:, None], mask)[
            :, 0
        ]

    @torch.no_grad()
    def choose_each(self, features: Arrays, limits: Array, mask: Array) -> Array:
        """Choose for n requests under each of B limits: int64 [n, B]."""
        return self._chosen(
            features, torch.tensor(limits, dtype=torch.float32).expand(len(mask), -1), mask
        )

    def _chosen(self, features: Arrays, limits: Tensor, mask: Array | None) -> Array:
        """Choose under limits [n, B], inside the mask bool [n, C]: int64 [n, B]."""
        blocks = {name: torch.as_tensor(block) for name, block in features.items()}
        x = self.normaliser(blocks, len(limits))
        # without a mask everything is allowed
        allowed = torch.ones(len(limits), len(self.latency_offset), dtype=torch.bool)
        if mask is not None:
            allowed = torch.as_tensor(mask)
        parts = []
        for rows, mixture in self._mixtures(x):
            may = allowed[rows]
            parts.append(torch.stack([mixture.choose(b, may) for b in limits[rows].unbind(1)], 1))
        return torch.cat(parts).numpy()

    def chosen(self) -> dict[str, Any]:
        """Return the weights and settings chosen on held-out samples, in plain values."""
        settings = {expert.name: expert.settings for expert in self.experts}
        weights = dict(zip(["network", *settings], self.weights.tolist(), strict=True))
        return {"weights": weights, "settings": settings}

    def plain(self) -> dict[str, Any]:
        """Pack network, experts, weights and what updates learned into plain values, the part of a
        checkpoint that `restored` reads."""
        return {
            "network": self.network.state_dict(),
            "experts": [expert.plain() for expert in self.experts if isinstance(expert, Expert)],
            "weights": self.weights,
            "learned": {name: getattr(self, name) for name in LEARNED},
        }

    @classmethod
    def restored(cls, plain: Mapping[str, Any], controller: Controller) -> Teacher:
        """Return the teacher of a controller that `plain` describes, in eval mode."""
        state = plain["network"]
        normaliser = controller.normaliser
        bins = state["edges"].shape[1] > 0
        count = len(controller.configurations)
        network = OutcomeNetwork(normaliser.width, count, controller.config, bins)
        network.load_state_dict(state)
        experts = [Expert.restored(expert) for expert in plain["experts"]]
        teacher = cls(network, normaliser, experts, plain["weights"], controller.rule)
        for name in LEARNED:
            getattr(teacher, name).copy_(plain["learned"][name])
        return teacher.eval()


# -- fitting ---------------------------------------------------------------------------------------


class FittedTeacher(NamedTuple):
    """A teacher of all samples, and for each fold one that was fitted without it.

    Attributes:
        teacher: of all samples.
        of_folds: for each fold the teacher that was fitted without its samples.
        rows: int64 [n], the samples.
        folds: for each fold the positions of its samples in `rows`, int64.
    """

    teacher: Teacher
    of_folds: list[Teacher]
    rows: Tensor
    folds: list[Tensor]


@torch.no_grad()
def fit_teacher(
    table: ProfileTable,
    rows: Tensor,
    network: Teacher,
    config: PolicyConfig,
    limits: Tensor,
    seed: int,
    *,
    experts: Experts | None = None,
) -> FittedTeacher:
    """Fit the experts and weigh all members, all out of fold.

    A member that is worth more alone than with the others, by more than chance, decides alone.

    Args:
        rows: int64 [n], what the networks were fitted on in folds (`folds_of` with the
            same seed).
        network: a teacher without experts, of at least two networks.
        limits: float [B] that utility is averaged over, see `Controller`.
        seed: of folds and trees.
        experts: fitted on the same rows and features, for the same limits, in as many folds; None
            fits those of `config`.
    """
    rule = network.rule
    normaliser = network.normaliser
    families = config.experts if normaliser.width else ()
    if experts is None:
        budgets_ms = rule.deadlines(limits)
        experts = Experts.fit(
            table,
            rows,
            budgets_ms,
            families,
            seed,
            normaliser=normaliser,
            folds=network.networks,
            rule=rule,
        )
    fitted = experts.of_families(families)
    measured = experts.measured
    folds = [torch.from_numpy(hold) for _, hold in measured.folds]
    # weights from predictions out of fold
    unseen = _held_out(network, table, measured.rows, folds)
    predictions = [unseen, *(family.out_of_fold for family in fitted)]
    known = HeldOutScores.of_predictions(predictions, measured, limits, rule)
    weights, of_folds = _weights(known, measured)
    # the teacher of all samples
    all_experts = [family.expert for family in fitted]
    teacher = Teacher(network.network, normaliser, all_experts, weights, rule)
    # and one for each fold, with the parts that have not seen it
    teachers = []
    for fold, weights_of_fold in enumerate(of_folds):
        experts_of_fold = [family.of_folds[fold] for family in fitted]
        inner = _network_alone(network.network, fold)
        teachers.append(Teacher(inner, normaliser, experts_of_fold, weights_of_fold, rule).eval())
    return FittedTeacher(teacher.eval(), teachers, measured.rows, folds)


def _held_out(
    teacher: Teacher, table: ProfileTable, rows: Tensor, folds: list[Tensor]
) -> Prediction:
    """Predict the outcomes of each sample by the network that was not fitted on it, [n, C]."""
    x = teacher.normaliser.of_rows(table, rows)
    # each sample was held out of one network
    unseen_by = torch.empty(len(rows), dtype=torch.int64)
    for fold, held in enumerate(folds):
        unseen_by[held] = fold
    predicted = teacher.network(x.expand(teacher.networks, -1, -1)).predicted()
    each = torch.arange(len(rows))
    return Prediction(
        accuracy=predicted.accuracy[unseen_by, each],
        log_latency=predicted.log_latency[unseen_by, each],
        spread=predicted.spread[unseen_by, each],
    )


def _weights(known: HeldOutScores, measured: MeasuredRows) -> tuple[Tensor, list[Tensor]]:
    """Return the weights fitted on all samples, and for each fold those fitted on the others."""
    of_folds, joined = weights_of_folds(known, measured.folds)
    # one member may be better than all together
    best = known.better_alone(joined, measured.clusters)
    if best is None:
        return stack_weights(known), of_folds
    alone = torch.eye(len(known.scores), dtype=torch.float64)[best]
    return alone, [alone] * len(of_folds)


def _network_alone(network: OutcomeNetwork, index: int) -> OutcomeNetwork:
    """Return one of the M networks side by side, alone."""
    alone = copy.deepcopy(network)
    # every parameter has the networks first
    for parameter in alone.parameters():
        parameter.data = parameter.data[[index]]
    return alone
