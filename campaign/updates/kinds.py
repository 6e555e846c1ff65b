"""Kinds of logs: sound ones, and those that somebody or something has poisoned."""

import torch

from campaign.updates.worlds import served


def configurations_with(**values):
    """The configurations with these knob values, bool [C]."""
    table = served().table
    configurations = map(table.configuration, range(table.num_configurations))
    return torch.tensor([values.items() <= each.items() for each in configurations])


def in_turn(*changes):
    """Several changes of a world, or of a log, one after the other."""

    def change(*about):
        for each in changes:
            each(*about)

    return change


# -- sound logs: the world changed, and the log tells the truth --------------------------------------


def slower(factor, **values):
    """A world in which configurations take `factor` times as long."""

    def change(world, random):
        factors = torch.where(configurations_with(**values), factor, 1.0)
        world.latency_ms = world.latency_ms * factors

    return change


def less_accurate(**values):
    """A world in which configurations, a random third without values, lose 70 % of their right
    answers."""

    def change(world, random):
        fell = configurations_with(**values)
        if not values:
            fell[random.permutation(len(fell))[len(fell) // 3 :]] = False
        gone = torch.from_numpy(random.random(world.accuracy.shape) < 0.7) & fell
        world.accuracy = world.accuracy.masked_fill(gone, 0.0)

    return change


MORE_CROPS = in_turn(slower(1.8, max_crops=6), slower(1.8, max_crops=10))
SOUND = {
    "nothing changed": None,
    "nothing changed, a tenth labelled": None,
    "1.6 times as slow": slower(1.6),
    "twice as fast": slower(0.5),
    "more crops 1.8 times as slow": MORE_CROPS,
    "more crops 1.8 times as slow, a tenth labelled": MORE_CROPS,
    "more crops 1.8 times as slow, no labels": MORE_CROPS,
    "more experts 1.7 times as slow": slower(1.7, top_k=8),
    "fewer experts 0.5 times as slow": slower(0.5, top_k=4),
    "all blocks 2 times as slow": slower(2.0, num_active_blocks=16),
    "more experts lose 70 % of right answers": less_accurate(top_k=8),
    "all blocks lose 70 % of right answers": less_accurate(num_active_blocks=16),
    "a third of the configurations lose 70 % of right answers": less_accurate(),
}
"""Name → a function that changes the world, or None."""


# -- which requests ----------------------------------------------------------------------------------


def everything(log):
    return log.choice >= 0


def chose(index):
    return lambda log: log.choice == index


def at_random(log):
    """Those of a random configuration."""
    return log.choice == int(torch.randint(12, ()))


def used(place):
    """Those of the configuration at this place by how often it was chosen, 0 for the most."""
    return lambda log: (
        log.choice == log.choice.bincount(minlength=12).argsort(descending=True)[place]
    )


def knob(**values):
    return lambda log: configurations_with(**values)[log.choice]


def drawn(share):
    return lambda log: log.draw(share)


def explored(log):
    return log.explored


def own(log):
    """Those for which the controller chose itself."""
    return ~log.explored


# -- what is done to their log -----------------------------------------------------------------------


def label(where, value, share=None):
    """Label these requests, or a random share of them."""

    def poison(log):
        marks = where(log)
        if share is not None:
            marks = marks & log.draw(share)
        log.label[marks] = value

    return poison


def unlabel(where):
    return label(where, torch.nan)


def replaced(name, value):
    """Replace a field by a function of the log."""
    return lambda log: setattr(log, name, value(log))


def flip(where):
    return replaced("label", lambda log: torch.where(where(log), 1 - log.label, log.label))


def timed(where, factor, on_time="as it was"):
    """Multiply the times of these requests, which are on time as they were, all, or by the new
    time."""

    def poison(log):
        marks = where(log)
        log.answer_ms[marks] *= factor
        if on_time == "all":
            log.met |= marks
        elif on_time == "anew":
            log.met = log.answer_ms <= log.limit_ms

    return poison


def uniform(log):
    """The chances of a uniform draw among what could be drawn."""
    possible = (log.propensity > 0).double()
    return possible / possible.sum(1, keepdim=True)


def hard(log):
    """The harder half of the requests."""
    mean = served().table.accuracy[log.rows].mean(1)
    return mean < mean.median()


few_labels = unlabel(lambda log: ~log.draw(0.1))
FEWER_LABELS = {
    "nothing changed, a tenth labelled": few_labels,
    "more crops 1.8 times as slow, a tenth labelled": few_labels,
    "more crops 1.8 times as slow, no labels": unlabel(everything),
}
"""What is done to the logs of sound kinds."""
POISONED = {
    # labels by configuration
    "the smallest configuration always right": label(chose(0), 1.0),
    "the smallest configuration always wrong": label(chose(0), 0.0),
    "the largest configuration always right": label(chose(11), 1.0),
    "the largest configuration always wrong": label(chose(11), 0.0),
    "the most chosen configuration flipped": flip(used(0)),
    "the most chosen configuration always wrong": label(used(0), 0.0),
    "the second most chosen configuration always right": label(used(1), 1.0),
    "the configuration chosen eighth most always right": label(used(7), 1.0),
    "a random configuration always right": label(at_random, 1.0),
    "half of the wrong answers of a random configuration right": label(at_random, 1.0, 0.5),
    # labels by knob
    "few experts always right": label(knob(top_k=4), 1.0),
    "few crops always right": label(knob(max_crops=2), 1.0),
    "many crops always wrong": label(knob(max_crops=10), 0.0),
    "more experts flipped": flip(knob(top_k=8)),
    "a grader that lets half of the wrong answers of few crops pass": label(
        knob(max_crops=2), 1.0, 0.5
    ),
    "a grader that lets a third of the wrong answers of few blocks pass": label(
        knob(num_active_blocks=12), 1.0, 1 / 3
    ),
    "a grader that fails half of the right answers of more experts": label(knob(top_k=8), 0.0, 0.5),
    "a grader that fails a third of the right answers of all blocks": label(
        knob(num_active_blocks=16), 0.0, 1 / 3
    ),
    # labels by how a request was served
    "explored answers always right": label(explored, 1.0),
    "explored answers always wrong": label(explored, 0.0),
    "explored answers flipped": flip(explored),
    "a grader that lets half of the wrong explored answers pass": label(explored, 1.0, 0.5),
    "labels of explored answers only, a third of the wrong ones right": in_turn(
        label(explored, 1.0, 1 / 3), unlabel(own)
    ),
    "answers of what the controller chose always wrong": label(own, 0.0),
    "late answers always wrong": label(lambda log: ~log.met, 0.0),
    "late answers always right": label(lambda log: ~log.met, 1.0),
    "answers faster than the median always right": label(
        lambda log: log.answer_ms < log.answer_ms.median(), 1.0
    ),
    "answers under the two smallest budgets always right": label(
        lambda log: log.limit_ms < served().budgets[2], 1.0
    ),
    # which requests have labels
    "only right answers labelled": unlabel(lambda log: log.label == 0),
    "only wrong answers labelled": unlabel(lambda log: log.label == 1),
    "of few crops only right answers labelled": unlabel(
        lambda log: (log.label == 0) & knob(max_crops=2)(log)
    ),
    "of many crops only wrong answers labelled": unlabel(
        lambda log: (log.label == 1) & knob(max_crops=10)(log)
    ),
    "labels of two configurations only, one always right": in_turn(
        label(used(3), 1.0), unlabel(lambda log: ~used(0)(log) & ~used(3)(log))
    ),
    "forty labels, those of explored answers right": in_turn(
        label(explored, 1.0), unlabel(lambda log: log.order() >= 40)
    ),
    # all labels
    "all labels flipped": flip(everything),
    "all labels tossed with a coin": replaced("label", lambda log: log.draw(0.5).double()),
    "all answers right": label(everything, 1.0),
    "all answers wrong": label(everything, 0.0),
    "labels of the request before": replaced("label", lambda log: log.label.roll(1)),
    "labels of any request": replaced("label", lambda log: log.label[log.order()]),
    "labels between 0.4 and 0.6": replaced("label", lambda log: 0.4 + 0.2 * log.label),
    "a fifth of the labels flipped": flip(drawn(0.2)),
    # times and rows
    "times in seconds": timed(everything, 1e-3),
    "a tenth of the time for the largest configuration, as if from a cache": timed(
        chose(11), 0.1, "all"
    ),
    "twice the time in the first half, which has passed": timed(
        lambda log: torch.arange(len(log.rows)) < len(log.rows) // 2, 2, "anew"
    ),
    "every answer on time": replaced("met", everything),
    "many crops never on time": replaced("met", lambda log: log.met & ~knob(max_crops=10)(log)),
    "twenty times the time for every tenth request": timed(drawn(0.1), 20, "anew"),
    "three times the time for the smallest configuration, on time all the same": timed(chose(0), 3),
    "each request logged five times, as few as 300": lambda log: log.take(
        torch.arange(300).repeat_interleave(5)
    ),
    "features of the request before": replaced(
        "features", lambda log: log.features.apply(lambda block: block.roll(1, 0))
    ),
    "chances that claim a uniform draw among what could be drawn": replaced("propensity", uniform),
    "labels of the easiest half of the requests only": unlabel(hard),
    "a tenth of the time for every fifth request, as if from a cache": timed(
        drawn(0.2), 0.1, "all"
    ),
}
"""Name → a function that changes the log of a world that has not changed."""
