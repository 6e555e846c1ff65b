"""Faults that the log of a served model may have. Each takes a sound table and draws, and
returns the table with the fault; rows are in the order in which they were measured."""

from dataclasses import replace

import torch

from knobwise.envs.tables.profile_table import median_of


def measured_once(table, latency_ms, accuracy=None):
    """The table with these cells, each measured once; without those whose time is NaN."""
    mask = ~latency_ms.isnan()
    accuracy = table.accuracy if accuracy is None else accuracy
    changes = {"accuracy": accuracy.masked_fill(~mask, torch.nan), "mask": mask}
    return replace(table, latency_ms=latency_ms, repeats_ms=None, first_look_ms=None, **changes)


def uniform(draws, shape, low, high):
    return torch.from_numpy(draws.uniform(low, high, tuple(shape))).float()


def normal(draws, shape):
    return torch.from_numpy(draws.normal(size=tuple(shape))).float()


def retries_logged_twice(table, draws):
    """A few cells have a second row: a first attempt that was cut off, without an answer."""
    again = uniform(draws, table.mask.shape, 0, 1) < draws.uniform(0.02, 0.05)
    limit = 3 * table.latency_ms.nan_to_num().max()
    first = limit * uniform(draws, again.shape, 0.99, 1.01)
    repeats_ms = torch.stack([table.latency_ms, first.masked_fill(~again, torch.nan)], 2)
    repeats_ms = repeats_ms.masked_fill(~table.mask.unsqueeze(2), torch.nan)
    accuracy = table.accuracy * torch.where(again, 0.5, 1.0)
    return replace(measured_once(table, median_of(repeats_ms), accuracy), repeats_ms=repeats_ms)


def answers_from_a_cache(table, draws):
    """Some answers were cached: right as before, in a hundredth of the time."""
    cached = uniform(draws, table.mask.shape, 0, 1) < draws.uniform(0.02, 0.2)
    factor = uniform(draws, table.mask.shape, 0.005, 0.02)
    return measured_once(table, table.latency_ms * factor.where(cached, torch.tensor(1.0)))


def slow_first_rows(table, draws):
    """The first rows of each configuration were measured before the model was warm."""
    cold = torch.arange(table.num_samples) < draws.integers(1, 6)
    factor = uniform(draws, table.mask.shape, 5, 20)
    return measured_once(table, table.latency_ms * factor.where(cold[:, None], torch.tensor(1.0)))


def an_hour_more(table, draws):
    """The clock changed between the start and the end of some measurements."""
    shifted = uniform(draws, table.mask.shape, 0, 1) < 0.002
    shifted[draws.integers(table.num_samples), draws.integers(table.num_configurations)] = True
    return measured_once(table, table.latency_ms + 3.6e6 * shifted)


def answers_cut_at_a_length(table, draws):
    """Answers of a configuration end at a number of tokens: at one time, more or less, and wrong."""
    limits = table.latency_ms.nanquantile(1 - draws.uniform(0.05, 0.15), 0)
    late = table.latency_ms > limits
    ends = limits * uniform(draws, table.mask.shape, 1.0, 1.01)
    return measured_once(table, ends.where(late, table.latency_ms), table.accuracy * ~late)


def times_of_batches(table, draws):
    """Eight requests at a time were answered, and share an eighth of the time."""
    batch = torch.arange(table.num_samples) // 8
    same = (batch[:, None] == batch).float()
    known = table.latency_ms.nan_to_num()
    shared = same @ known / (same @ table.mask.float()).clamp_min(1)
    return measured_once(table, shared.masked_fill(~table.mask, torch.nan))


def silent_fallback(table, draws):
    """A configuration answered most requests as a cheaper one, since it did not fit in memory."""
    order = table.latency_ms.nanmean(0).argsort()
    slow = order[-1]
    fast = order[draws.integers(max(1, len(order) // 2))]
    fell = (uniform(draws, (table.num_samples,), 0, 1) < 0.6) & table.mask[:, fast]
    fell &= table.mask[:, slow]
    accuracy = table.accuracy.clone()
    accuracy[fell, slow] = accuracy[fell, fast]
    latency_ms = table.latency_ms.clone()
    jitter = normal(draws, [int(fell.sum())])
    latency_ms[fell, slow] = latency_ms[fell, fast] * (0.03 * jitter).exp()
    return measured_once(table, latency_ms, accuracy)


def an_outage(table, draws):
    """For a while the server answered with errors, which are quick and count as wrong."""
    count = int(table.num_samples * draws.uniform(0.03, 0.1))
    start = draws.integers(table.num_samples - count)
    rows = torch.arange(table.num_samples)
    failed = ((rows >= start) & (rows < start + count))[:, None]
    quick = 0.05 * table.latency_ms[table.mask].median()
    errors = (quick * uniform(draws, table.mask.shape, 0.7, 1.4)).where(table.mask, torch.nan)
    return measured_once(table, errors.where(failed, table.latency_ms), table.accuracy * ~failed)


def crashes_of_a_configuration(table, draws):
    """A configuration that is right more often than most fails at once for some requests."""
    order = table.accuracy.nanmean(0).argsort(descending=True)
    column = order[draws.integers(max(1, len(order) // 4))]
    failed = torch.zeros_like(table.mask)
    failed[:, column] = uniform(draws, (table.num_samples,), 0, 1) < draws.uniform(0.05, 0.2)
    errors = 0.01 * table.latency_ms[table.mask].median() * uniform(draws, failed.shape, 0.7, 1.4)
    latency_ms = errors.where(failed & table.mask, table.latency_ms)
    return measured_once(table, latency_ms, table.accuracy * ~failed)


def scored_against_the_next(table, draws):
    """The answers of one configuration were compared with the references of the next rows."""
    accuracy = table.accuracy.clone()
    # a configuration that is neither always right nor always wrong
    spread = accuracy.nan_to_num(0.5).std(0).numpy()
    column = int(draws.choice(spread.argsort()[-max(1, len(spread) // 2) :]))
    known = table.mask[:, column]
    accuracy[known, column] = accuracy[known, column].roll(int(draws.choice([-1, 1])))
    return measured_once(table, table.latency_ms, accuracy)


def another_version(table, draws):
    """From some sample on another version of the model answered, which is right less often."""
    later = torch.arange(table.num_samples) > draws.uniform(0.2, 0.8) * table.num_samples
    kept = uniform(draws, table.mask.shape, 0, 1) < 0.7
    return measured_once(table, table.latency_ms, table.accuracy * (kept | ~later[:, None]))


SERVED = {
    retries_logged_twice: "retried",
    answers_from_a_cache: "cached",
    slow_first_rows: "cold_start",
    an_hour_more: "wrong_clock",
    answers_cut_at_a_length: "cut_answers",
    times_of_batches: "batches",
    an_outage: "failed_requests",
    crashes_of_a_configuration: "failed_cells",
    scored_against_the_next: "shifted_scores",
    another_version: "other_version",
}
"""Fault → the check that should notice it."""
UNNOTICED = (silent_fallback,)
"""No check looks for these: a model that ends early on easy inputs looks like that."""
