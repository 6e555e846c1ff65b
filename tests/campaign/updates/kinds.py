"""Kinds of logs: sound ones, and those that somebody or something has poisoned."""

import torch

from campaign.updates.worlds import World, served

SOUND = {}
"""Name → a function that changes the world, or None; and one that changes the log, or None."""
POISONED = {}
"""Name → a function that changes the log of a world that has not changed."""


def poisoned(function):
    """List a function that poisons a log, by its docstring."""
    POISONED[function.__doc__.rstrip(".")] = function
    return function


def configurations_with(**values):
    """The configurations with these knob values, bool [C]."""
    table = served().table
    marks = torch.ones(table.num_configurations, dtype=torch.bool)
    for k, knob in enumerate(table.knobs):
        if knob.name in values:
            marks &= table.configurations[:, k] == knob.values.index(values[knob.name])
    return marks


# -- sound logs: the world changed, and the log tells the truth --------------------------------------


def slower(factor, **values):
    """A world in which configurations take `factor` times as long."""

    def changed(world, random):
        factors = torch.ones(world.latency_ms.shape[1])
        factors[configurations_with(**values)] = factor
        return World(world.accuracy, world.latency_ms * factors)

    return changed


def both(first, second):
    return lambda world, random: second(first(world, random), random)


def less_accurate(lost, which):
    """A world in which configurations lose a share of their right answers."""

    def changed(world, random):
        fell = which(random)
        gone = torch.from_numpy(random.random(world.accuracy.shape) < lost) & fell
        return World(world.accuracy.masked_fill(gone, 0.0), world.latency_ms)

    return changed


def a_third(random):
    """A random third of the configurations."""
    count = served().table.num_configurations
    marks = torch.zeros(count, dtype=torch.bool)
    marks[random.permutation(count)[: count // 3]] = True
    return marks


def few_labels(log):
    log.label[~log.draw(0.1)] = torch.nan


def no_labels(log):
    log.label[:] = torch.nan


MORE_CROPS = both(slower(1.8, max_crops=6), slower(1.8, max_crops=10))
SOUND["nothing changed"] = None, None
SOUND["nothing changed, a tenth labelled"] = None, few_labels
SOUND["1.6 times as slow"] = slower(1.6), None
SOUND["twice as fast"] = slower(0.5), None
SOUND["more crops 1.8 times as slow"] = MORE_CROPS, None
SOUND["more crops 1.8 times as slow, a tenth labelled"] = MORE_CROPS, few_labels
SOUND["more crops 1.8 times as slow, no labels"] = MORE_CROPS, no_labels
SOUND["more experts 1.7 times as slow"] = slower(1.7, top_k=8), None
SOUND["fewer experts 0.5 times as slow"] = slower(0.5, top_k=4), None
SOUND["all blocks 2 times as slow"] = slower(2.0, num_active_blocks=16), None
SOUND["more experts lose 70 % of right answers"] = (
    less_accurate(0.7, lambda random: configurations_with(top_k=8)),
    None,
)
SOUND["all blocks lose 70 % of right answers"] = (
    less_accurate(0.7, lambda random: configurations_with(num_active_blocks=16)),
    None,
)
SOUND["a third of the configurations lose 70 % of right answers"] = (
    less_accurate(0.7, a_third),
    None,
)


# -- poisoned: labels by configuration ---------------------------------------------------------------


def by_use(log, place):
    """The configuration at this place by how often it was chosen, 0 for the most."""
    count = served().table.num_configurations
    return int(log.choice.bincount(minlength=count).argsort(descending=True)[place])


def labels(log, where, value):
    log.label[where] = value


def flip(log, where):
    log.label[where] = 1 - log.label[where]


@poisoned
def smallest_right(log):
    """the smallest configuration always right."""
    labels(log, log.choice == 0, 1.0)


@poisoned
def smallest_wrong(log):
    """the smallest configuration always wrong."""
    labels(log, log.choice == 0, 0.0)


@poisoned
def largest_right(log):
    """the largest configuration always right."""
    labels(log, log.choice == 11, 1.0)


@poisoned
def largest_wrong(log):
    """the largest configuration always wrong."""
    labels(log, log.choice == 11, 0.0)


@poisoned
def most_flipped(log):
    """the most chosen configuration flipped."""
    flip(log, log.choice == by_use(log, 0))


@poisoned
def most_wrong(log):
    """the most chosen configuration always wrong."""
    labels(log, log.choice == by_use(log, 0), 0.0)


@poisoned
def second_right(log):
    """the second most chosen configuration always right."""
    labels(log, log.choice == by_use(log, 1), 1.0)


@poisoned
def seldom_right(log):
    """the configuration chosen eighth most always right."""
    labels(log, log.choice == by_use(log, 7), 1.0)


@poisoned
def random_right(log):
    """a random configuration always right."""
    labels(log, log.choice == int(torch.randint(12, (), generator=log.random)), 1.0)


@poisoned
def random_half_right(log):
    """half of the wrong answers of a random configuration right."""
    chosen = log.choice == int(torch.randint(12, (), generator=log.random))
    labels(log, chosen & log.draw(0.5), 1.0)


# -- poisoned: labels by knob ------------------------------------------------------------------------


@poisoned
def few_experts_right(log):
    """few experts always right."""
    labels(log, log.values["top_k"] == 4, 1.0)


@poisoned
def few_crops_right(log):
    """few crops always right."""
    labels(log, log.values["max_crops"] == 2, 1.0)


@poisoned
def many_crops_wrong(log):
    """many crops always wrong."""
    labels(log, log.values["max_crops"] == 10, 0.0)


@poisoned
def many_experts_flipped(log):
    """more experts flipped."""
    flip(log, log.values["top_k"] == 8)


@poisoned
def few_crops_lenient(log):
    """a grader that lets half of the wrong answers of few crops pass."""
    labels(log, (log.values["max_crops"] == 2) & log.draw(0.5), 1.0)


@poisoned
def few_blocks_lenient(log):
    """a grader that lets a third of the wrong answers of few blocks pass."""
    labels(log, (log.values["num_active_blocks"] == 12) & log.draw(1 / 3), 1.0)


@poisoned
def many_experts_strict(log):
    """a grader that fails half of the right answers of more experts."""
    labels(log, (log.values["top_k"] == 8) & log.draw(0.5), 0.0)


@poisoned
def many_blocks_strict(log):
    """a grader that fails a third of the right answers of all blocks."""
    labels(log, (log.values["num_active_blocks"] == 16) & log.draw(1 / 3), 0.0)


# -- poisoned: labels by how a request was served ------------------------------------------------------


@poisoned
def explored_right(log):
    """explored answers always right."""
    labels(log, log.explored, 1.0)


@poisoned
def explored_wrong(log):
    """explored answers always wrong."""
    labels(log, log.explored, 0.0)


@poisoned
def explored_flipped(log):
    """explored answers flipped."""
    flip(log, log.explored)


@poisoned
def explored_lenient(log):
    """a grader that lets half of the wrong explored answers pass."""
    labels(log, log.explored & log.draw(0.5), 1.0)


@poisoned
def explored_only(log):
    """labels of explored answers only, a third of the wrong ones right."""
    labels(log, log.explored & log.draw(1 / 3), 1.0)
    labels(log, ~log.explored, torch.nan)


@poisoned
def chosen_wrong(log):
    """answers of what the controller chose always wrong."""
    labels(log, ~log.explored, 0.0)


@poisoned
def late_wrong(log):
    """late answers always wrong."""
    labels(log, ~log.met, 0.0)


@poisoned
def late_right(log):
    """late answers always right."""
    labels(log, ~log.met, 1.0)


@poisoned
def fast_right(log):
    """answers faster than the median always right."""
    labels(log, log.answer_ms < log.answer_ms.median(), 1.0)


@poisoned
def tight_right(log):
    """answers under the two smallest budgets always right."""
    labels(log, log.limit_ms < served().budgets[2], 1.0)


# -- poisoned: which requests have labels --------------------------------------------------------------


@poisoned
def praise(log):
    """only right answers labelled."""
    labels(log, log.label == 0, torch.nan)


@poisoned
def complaints(log):
    """only wrong answers labelled."""
    labels(log, log.label == 1, torch.nan)


@poisoned
def praise_of_few_crops(log):
    """of few crops only right answers labelled."""
    labels(log, (log.label == 0) & (log.values["max_crops"] == 2), torch.nan)


@poisoned
def complaints_about_many_crops(log):
    """of many crops only wrong answers labelled."""
    labels(log, (log.label == 1) & (log.values["max_crops"] == 10), torch.nan)


@poisoned
def two_configurations(log):
    """labels of two configurations only, one always right."""
    first, second = by_use(log, 0), by_use(log, 3)
    labels(log, log.choice == second, 1.0)
    labels(log, (log.choice != first) & (log.choice != second), torch.nan)


@poisoned
def few_labels_right(log):
    """forty labels, those of explored answers right."""
    labels(log, log.explored, 1.0)
    kept = torch.randperm(len(log.rows), generator=log.random)[:40]
    log.label[~torch.isin(torch.arange(len(log.rows)), kept)] = torch.nan


# -- poisoned: all labels ------------------------------------------------------------------------------


@poisoned
def all_flipped(log):
    """all labels flipped."""
    flip(log, log.choice >= 0)


@poisoned
def all_random(log):
    """all labels tossed with a coin."""
    log.label = log.draw(0.5).double()


@poisoned
def all_right(log):
    """all answers right."""
    log.label[:] = 1.0


@poisoned
def all_wrong(log):
    """all answers wrong."""
    log.label[:] = 0.0


@poisoned
def shifted(log):
    """labels of the request before."""
    log.label = log.label.roll(1)


@poisoned
def shuffled(log):
    """labels of any request."""
    log.label = log.label[torch.randperm(len(log.label), generator=log.random)]


@poisoned
def squeezed(log):
    """labels between 0.4 and 0.6."""
    log.label = 0.4 + 0.2 * log.label


@poisoned
def some_flipped(log):
    """a fifth of the labels flipped."""
    flip(log, log.draw(0.2))


# -- poisoned: times and rows --------------------------------------------------------------------------


@poisoned
def seconds(log):
    """times in seconds."""
    log.answer_ms = log.answer_ms / 1e3


@poisoned
def cached_largest(log):
    """a tenth of the time for the largest configuration, as if from a cache."""
    where = log.choice == 11
    log.answer_ms[where] *= 0.1
    log.met |= where


@poisoned
def slow_hour(log):
    """twice the time in the first half, which has passed."""
    early = torch.arange(len(log.rows)) < len(log.rows) // 2
    log.answer_ms[early] *= 2
    log.met = log.answer_ms <= log.limit_ms


@poisoned
def always_on_time(log):
    """every answer on time."""
    log.met[:] = True


@poisoned
def large_never_on_time(log):
    """many crops never on time."""
    log.met &= log.values["max_crops"] != 10


@poisoned
def stalls(log):
    """twenty times the time for every tenth request."""
    log.answer_ms[log.draw(0.1)] *= 20
    log.met = log.answer_ms <= log.limit_ms


@poisoned
def wrong_clock(log):
    """three times the time for the smallest configuration, on time all the same."""
    log.answer_ms[log.choice == 0] *= 3


@poisoned
def repeated(log):
    """each request logged five times, as few as 300."""
    log.take(torch.arange(300).repeat_interleave(5))


@poisoned
def features_of_others(log):
    """features of the request before."""
    log.features = {name: block.roll(1, 0) for name, block in log.features.items()}


@poisoned
def wrong_chances(log):
    """chances that claim a uniform draw among what could be drawn."""
    possible = (log.propensity > 0).double()
    log.propensity = possible / possible.sum(1, keepdim=True)


@poisoned
def easy_requests(log):
    """labels of the easiest half of the requests only."""
    mean = served().table.accuracy[log.rows].mean(1)
    labels(log, mean < mean.median(), torch.nan)


@poisoned
def cached(log):
    """a tenth of the time for every fifth request, as if from a cache."""
    where = log.draw(0.2)
    log.answer_ms[where] *= 0.1
    log.met |= where
