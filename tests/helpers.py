"""Small tables for the tests, made in memory. Simulated, and only for testing."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch.nn.functional import one_hot

from knobwise.agents import Controller, OptimiserConfig, PolicyConfig, distillation_trainer
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.problem import Problem
from knobwise.common.errors import InputError
from knobwise.envs import BeamTable, BudgetConfig, ProfileTable, default_budgets
from knobwise.envs.demonstrations.settings import FIELDS
from knobwise.envs.tables.profile_table import Knob, median_of
from knobwise.experiments.settings import beams
from knobwise.testbeds.canvases import builtin

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and torch finds none: not run"
)


def small_table(samples=60, seed=0, holes=0.0, features=True, **changes):
    """3 × 2 × 2 configurations; accuracy and latency depend on two hidden traits that the features
    show."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2))
    cells = samples, len(grid)
    size = grid.float() @ torch.tensor([2.0, 1.0, 1.0])
    hard, large = torch.rand(2, samples, 1, generator=generator)
    noise = 1 + 0.05 * torch.rand(cells, generator=generator)
    latency = (4 + 2 * size) * (0.7 + large) * noise
    right = torch.sigmoid(size - 8 * hard + 2)
    accuracy = (torch.rand(cells, generator=generator) < right).float()
    mask = torch.rand(cells, generator=generator) >= holes
    mask[torch.arange(samples), torch.arange(samples) % len(grid)] = True
    blocks = features or {}
    if features is True:
        noise = torch.randn(samples, 3, generator=generator)
        image = torch.cat([large, noise], 1)
        blocks = {"image_features": image, "language_features": torch.cat([hard, noise], 1)}
    knobs = (
        Knob("max_crops", (2, 6, 10)),
        Knob("top_k", (4, 8)),
        Knob("num_active_blocks", (12, 16)),
    )
    fields = {"name": "small", "knobs": knobs, "configurations": grid, "features": blocks}
    cells = (values.masked_fill(~mask, torch.nan) for values in (accuracy, latency))
    return table_of(*cells, **fields | changes)


def gappy_table():
    """90 samples with a feature that is heavy-tailed, and one that is missing in some places."""
    table = small_table(90)
    image = table.features["image_features"]
    image[:, 1] = image[:, 1].mul(3).exp()
    image[::4, 2] = torch.nan
    return table


def table_of(accuracy, latency_ms, features=None, **changes):
    """A table of one knob with these cells, measured once or, [N, C, R], repeatedly; NaN where not
    profiled."""
    a, ms = torch.as_tensor(accuracy), torch.as_tensor(latency_ms)
    repeats = ms if ms.ndim == 3 else None
    if features is None:
        features = {}
    elif not isinstance(features, dict):
        features = {"x": features}
    n, c = a.shape
    fields = {
        "name": "by hand",
        "knobs": (Knob("size", tuple(range(c))),),
        "configurations": torch.arange(c).unsqueeze(1),
        "accuracy": a,
        "latency_ms": ms if repeats is None else median_of(repeats),
        "mask": ~a.isnan(),
        "sample_ids": tuple(map(str, range(n))),
        "features": features,
        "repeats_ms": repeats,
    }
    return ProfileTable(**fields | changes)


def repeated(table, most=4, seed=0, jitter=0.1):
    """The table with 1 to `most` measurements of each cell, which vary by a factor; some cell has
    `most`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*table.latency_ms.shape, most)
    count = torch.randint(1, most + 1, shape[:2], generator=generator).masked_fill(~table.mask, 0)
    count[tuple(table.mask.nonzero()[0])] = most
    factors = (jitter * torch.randn(shape, generator=generator)).exp()
    measured = table.latency_ms.unsqueeze(-1) * factors.where(
        torch.arange(most) < count.unsqueeze(-1), torch.nan
    )
    return replace(table, latency_ms=median_of(measured), repeats_ms=measured)


def looked_at(table, first_look_ms=3.0):
    """Return the table as decisions by features meet it: every configuration but the first two pays
    for the look."""
    paid = torch.full_like(table.latency_ms, first_look_ms).where(table.mask, 0.0)
    paid[:, :2] = 0.0
    return replace(table, latency_ms=table.latency_ms + paid, first_look_ms=paid)


def two_kinds(samples, shown, seed=0):
    """Two kinds of samples: one needs configuration 1, the other 2; the needed one is fast and the
    other is slow."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.rand(samples, generator=generator) < 0.5
    ones = torch.ones(samples)
    accuracy = torch.stack([0.3 * ones, kind.float(), 1 - kind.float()], 1)
    slow = torch.stack([ones, torch.where(kind, 1.0, 4.0), torch.where(kind, 4.0, 1.0)], 1)
    latency = 10 * slow * (1 + 0.05 * torch.rand(samples, 3, generator=generator))
    x = torch.randn(samples, 2, generator=generator)
    if shown:
        x[:, 0] = kind * 2.0 - 1
    return table_of(accuracy, latency, x)


def portfolio(samples):
    """37 solvers without an order, times over orders of magnitude, skewed features of which some
    are missing, holes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def some(share, *shape):
        return torch.rand(*shape, generator=generator) < share

    hardness = normal(samples, 4)
    better, slower = (hardness @ normal(4, 74)).chunk(2, 1)
    noise = normal(samples, 37)
    holes = some(0.05, samples, 37)
    features = torch.cat([hardness, normal(samples, 20)], 1)
    features[:, 1::3] = features[:, 1::3].mul(1.5).exp()
    features[:, ::3][some(0.2, samples, 8)] = torch.nan
    latency_ms = (3 + 1.2 * slower + 0.3 * noise).exp().masked_fill(holes, torch.nan)
    return table_of((0.7 * better).sigmoid().masked_fill(holes, torch.nan), latency_ms, features)


def otherwise(table, rows):
    """A copy of the table in which the outcomes and features of these rows are others."""
    other = copy.deepcopy(table)
    other.accuracy[rows] = 1 - other.accuracy[rows]
    other.latency_ms[rows] = other.latency_ms[rows].flip(1) * 3
    for block in other.features.values():
        block[rows] *= -7
    return other


class MatchScorer:
    """A scorer: right where each of the query's two wishes is met by a demonstration, and none by a
    liar.

    Query i wishes for kinds w₁(i) and w₂(i); candidate j is of kind k(j), and may be a liar.
    """

    def __init__(self, wishes, kinds, liar):
        self.wishes, self.kinds, self.liar = wishes, kinds, liar

    def __call__(self, queries, demonstrations):
        candidates = demonstrations.clamp_min(0)
        honest = (demonstrations >= 0) & ~self.liar[candidates]
        kinds = torch.where(honest, self.kinds[candidates], -1)
        met = (kinds.unsqueeze(-1) == self.wishes[queries].unsqueeze(1)).any(1).float()
        right = met.prod(-1)
        met = met.mean(-1)
        probability = (0.05 + 0.9 * right) * (0.5 + 0.5 * met)
        return {
            "logprob_score": probability.log(),
            "vqa_gt_prob": probability,
            "vqa_correct": right,
            "vqa_acc_score": met,
            "vqa_rel_score": probability,
        }

    def vote(self, queries, demonstrations):
        return self(queries, demonstrations)["vqa_correct"]


def small_beams(queries=40, pool=8, seed=0, kinds=3):
    """Queries that wish for one or two kinds, a bank with liars, and six recorded sequences of two
    for each: two that were found by looking at the answer, four at random."""
    generator = torch.Generator().manual_seed(seed)
    bank = 4 * pool
    wishes = torch.randint(kinds, (queries, 2), generator=generator)
    kind = torch.arange(bank) % kinds
    liar = torch.rand(bank, generator=generator) < 0.4
    places = torch.rand(queries, bank, generator=generator).argsort(1)[:, :pool]
    scorer = MatchScorer(wishes, kind, liar)
    every = torch.cartesian_prod(torch.arange(pool), torch.arange(pool))
    every = every[every[:, 0] != every[:, 1]]
    rows = torch.arange(queries).repeat_interleave(len(every))
    tried = scorer(rows, places[:, every].flatten(0, 1))
    tried = {name: values.view(queries, -1) for name, values in tried.items()}
    shape = queries, len(every)
    best = tried["vqa_gt_prob"] + 1e-3 * torch.rand(shape, generator=generator)
    at_random = torch.rand(shape, generator=generator)
    result = torch.cat([best.topk(2).indices, at_random.topk(4).indices], 1)
    fields = {name: values.gather(1, result) for name, values in tried.items()}
    fields["beam_score"] = fields["vqa_gt_prob"] - 0.025
    wanted = (one_hot(wishes, kinds).sum(1) > 0).float()
    table = BeamTable(
        name="small beams",
        query_ids=tuple(map(str, range(queries))),
        pool=places,
        sequences=every[result],
        fields=fields,
        found_by=torch.tensor([0, 0, 3, 3, 3, 3]).expand(queries, -1).contiguous(),
        round=torch.zeros(queries, 6, dtype=torch.int64),
        queries=torch.cat([wanted, torch.zeros(queries, 1)], 1),
        candidates=torch.cat([one_hot(kind, kinds), liar.unsqueeze(1)], 1).float(),
        blocks={"image": (0, kinds), "liar": (kinds, kinds + 1)},
    )
    return table, scorer


def five_beams():
    """Five queries with short and empty pools, one without recorded sequences; the outcomes count
    up, so that each reward tells which sequence it belongs to."""
    none = [-1] * 3
    sequences = torch.tensor(
        [
            [[0, 1, -1], [2, -1, -1], [3, 1, 0], [1, 0, -1]],
            [[0, -1, -1], none, none, none],  # one candidate
            [none] * 4,  # no candidate
            [none] * 4,  # candidates, no sequence
            [[2, 1, -1], [0, 2, -1], none, none],
        ]
    )
    exists = sequences[..., 0] >= 0
    counted = torch.arange(1.0, 21.0).reshape(5, 4)
    fields = {name: (counted + 20 * number) / 200 for number, name in enumerate(FIELDS)}
    fields["vqa_correct"] = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(5, 4)
    pools = [[4, 0, 2, 6], [1, -1, -1, -1], [-1] * 4, [3, 5, -1, -1], [6, 1, 0, -1]]
    found_by = [[0, 2, 4, 4], [3, -1, -1, -1], [-1] * 4, [-1] * 4, [0, 4, -1, -1]]
    return BeamTable(
        name="five",
        query_ids=tuple("abcde"),
        pool=torch.tensor(pools),
        sequences=sequences,
        fields={name: field.where(exists, torch.nan) for name, field in fields.items()},
        found_by=torch.tensor(found_by),
        round=torch.tensor([[0, 0, 1, 2], [0] * 4, [0] * 4, [0] * 4, [0, 2, 0, 0]]),
        queries=torch.eye(5),
        candidates=torch.arange(35.0).reshape(7, 5).cos(),
    )


class Lines(list[tuple[int, dict[str, float]]]):
    """A log that keeps what it gets."""

    def log(self, metrics, step):
        self.append((step, dict(metrics)))

    def values(self, name):
        """All that was logged under this name."""
        return [metrics[name] for _, metrics in self if name in metrics]


class Always:
    """Chooses one configuration for every request, and keeps the limits it was asked for."""

    def __init__(self, configuration, name=""):
        self.configuration, self.name = configuration, name

    def choose(self, features, limits, mask=None):
        self.limits = limits
        return np.full(len(limits), self.configuration)


def arrays(table, rows=slice(None)):
    """The features of these rows, as a policy reads them in NumPy; of all rows by default."""
    return {name: block.numpy() for name, block in table.blocks(rows).items()}


def some_configurations(table, kept):
    """The table with these of its configurations alone."""
    cells = {name: getattr(table, name)[:, kept] for name in ("accuracy", "latency_ms", "mask")}
    return replace(table, configurations=table.configurations[kept], **cells)


def driven_apart(table, config, rows=None, constraint="deadline", by=0.3):
    """A controller for the table (or some rows of it) that was not trained; all its weights
    differ."""
    torch.manual_seed(0)
    rows = torch.arange(table.num_samples) if rows is None else rows
    controller = Controller.for_table(table, rows, config, constraint).eval()
    for p in controller.parameters():
        p.data += by * torch.randn_like(p)
    return controller


WITH_TEACHER = PolicyConfig(
    teacher=True,
    fold_networks=2,
    experts=("ridge",),
    hidden=8,
    teacher_hidden=8,
    dropout=0.0,
    teacher_dropout=0.0,
)
"""A small policy that a teacher teaches."""
BRIEF = OptimiserConfig(
    teacher_iterations=4,
    pretrain_iterations=8,
    iterations=4,
    contexts=32,
    minibatch=32,
    evaluate_every=4,
)
"""A training of a second."""


def trainer_on(table, policy=WITH_TEACHER, constraint="deadline", **settings):
    """A training of a second on a table, or a problem, which has not begun."""
    options = {
        "policy": policy,
        "optimiser": BRIEF,
        "budget": BudgetConfig(constraint=constraint),
    } | settings
    split = None if isinstance(table, Problem) else table.split()
    return distillation_trainer(table, split, **options)


def trained(table, policy=WITH_TEACHER, constraint="deadline", **settings):
    """A finished training."""
    trainer = trainer_on(table, policy, constraint, **settings)
    trainer.run()
    return trainer


def watch(student, look):
    """Look at every batch before it is learned from, None where none was collected; return what was
    seen in each iteration."""
    seen = {}

    def watched(stage):
        minibatches = stage.minibatches

        def passed(buffer):
            # in later passes it has been learned from
            if student.state.iteration not in seen:
                collected = stage.collects or student.evaluates
                seen[student.state.iteration] = look(buffer[:] if collected else None)
            return minibatches(buffer)

        return passed

    for stage in student.stages:
        stage.minibatches = watched(stage)
    return seen


def batches_of(student):
    """Train; the contexts that every iteration collected."""
    seen = watch(student, lambda data: None if data is None else data.clone())
    student.run()
    return [batch for batch in seen.values() if batch is not None]


def rows_of_networks(setup):
    """The rows that each network learns from; behind the folds there is one of all samples."""
    fitted = setup.folds[0]
    return fitted if setup.networks == 1 else [*fitted, setup.fitted]


def deployed(table, policy=WITH_TEACHER, budgets_ms=None, constraint="deadline", **settings):
    """What a short training deploys, with everything that is calibrated for it."""
    budgets_ms = default_budgets(table) if budgets_ms is None else budgets_ms
    return calibrate_controller(trained(table, policy, constraint, **settings).setup, budgets_ms)


def network_alone(controller, number):
    """One of the networks side by side as a controller of its own, in eval mode."""
    plain = controller.plain()
    plain["policy"] |= {"teacher": False, "experts": (), "fold_networks": 1}
    for name, _ in controller.named_parameters():
        plain["state"][name] = plain["state"][name][number : number + 1]
    return Controller.restored(plain)


def equal_states(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def input_error(fault=""):
    """A block in which a mistake of a user is refused, and what is at fault named."""
    return pytest.raises(InputError, match=fault)


def close(result, wanted, within=None):
    """Compare a tensor with another one or a list, as torch does or within a distance; NaN is
    itself."""
    tolerances = {} if within is None else {"rtol": 0, "atol": within}
    torch.testing.assert_close(result, torch.as_tensor(wanted), equal_nan=True, **tolerances)


def identical(result, wanted):
    """Compare tensors (also with arrays and lists of numbers), sequences of tensors or TensorDicts to
    the last bit; NaN is itself."""
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    if isinstance(result, TensorDictBase):
        result = result.to_dict()
        wanted = wanted.to_dict()
    elif not isinstance(wanted, type(result)):
        result = torch.as_tensor(result)
        wanted = torch.as_tensor(wanted)
        exact["check_dtype"] = False
    torch.testing.assert_close(result, wanted, **exact)


class Harmful:
    """Prints when it is unpickled."""

    def __reduce__(self):
        return print, ("this must not run",)


def few_demonstrations(patch, train=600, test=200):
    """Leave the built-in data of the selector its first queries."""
    load = builtin.builtin_demonstrations

    def loaded(variant="careless"):
        data = load(variant)
        few = data.train.select(torch.arange(train)), data.test.select(torch.arange(test))
        return data._replace(train=few[0], test=few[1])

    patch.setattr(builtin, "builtin_demonstrations", loaded)
    patch.setattr(beams, "builtin_demonstrations", loaded)
