"""What was not measured, predicted from features and knobs."""

from dataclasses import replace

import numpy as np
import torch
from helpers import close, small_table

from knobwise.agents.teacher import completion
from knobwise.agents.teacher.completion import Completion, knob_similarity, scaled_knobs
from knobwise.envs.tables.profile_table import Knob

NAN = float("nan")


def features_of(table):
    return torch.cat([*table.features.values()], 1).double().numpy()


def holed(values, share, seed=0):
    """The values without this share of them; each row keeps one at least."""
    generator = torch.Generator().manual_seed(seed)
    hole = torch.rand(values.shape, generator=generator) < share
    hole[torch.arange(len(values)), torch.arange(len(values)) % values.shape[1]] = False
    return values.masked_fill(hole, NAN), hole


def test_similarity_of_configurations_by_hand():
    table = small_table()
    similarity = knob_similarity(table)
    # the first two differ in the last of two values: exp(−1/(2·.5²)) = e⁻² for this knob
    one_knob = 0.8 + 0.2 * np.exp(-2)
    np.testing.assert_allclose(similarity[0, 1], 0.9 * one_knob)
    # first and last differ in all of their knobs, from one end of the range to the other
    np.testing.assert_allclose(similarity[0, -1], 0.9 * one_knob**3)
    np.testing.assert_allclose(np.diag(similarity), np.ones(12))
    # names are equal or not
    named = replace(table, knobs=(Knob("mode", ("a", "b", "c")), *table.knobs[1:]))
    np.testing.assert_allclose(knob_similarity(named)[0, 4], 0.9 * 0.8)
    truths = replace(table, knobs=(*table.knobs[:2], Knob("cache", (False, True))))
    np.testing.assert_allclose(knob_similarity(truths)[0, 1], 0.9 * 0.8)
    np.testing.assert_allclose(scaled_knobs(table)[[0, 4, 11]], [[0, 0, 0], [0.5, 0, 0], [1, 1, 1]])


def test_what_was_measured_stays():
    table = small_table(90)
    seen, hole = holed(table.accuracy, 0.6)
    completed = Completion(table, features_of(table)).complete(seen)
    close(completed[~hole], table.accuracy[~hole].double())
    assert completed.isfinite().all()
    assert torch.equal(completed, Completion(table, features_of(table)).complete(seen))


def test_the_process_solves_its_equations():
    """(K_samples ⊗ K_configurations + noise)·v = y, against a dense solution."""
    table = small_table(12)
    model = Completion(table, features_of(table))
    seen, hole = holed(table.latency_ms.log(), 0.5)
    known = ~hole.numpy()
    values = np.where(known, seen.nan_to_num().numpy() - 2, 0.0)
    similarity = knob_similarity(table)
    samples = model.kernel[:, np.argsort(model.points)] + completion.OF_SAMPLE * np.eye(12)
    dense = np.kron(samples, similarity)
    at = known.ravel()
    inside = dense[np.ix_(at, at)] + completion.NOISE * np.eye(at.sum())
    expected = dense[:, at] @ np.linalg.solve(inside, values.ravel()[at])
    found = model._process(values, known, similarity)
    assert np.abs(found.ravel() - expected).max() < 0.02


def test_a_few_cells_say_more_with_knobs_than_each_configuration_alone():
    table = small_table(300)
    truth = table.latency_ms.log()
    seen, hole = holed(truth, 0.9)
    completed = Completion(table, features_of(table)).complete(seen)
    alone = seen.nanmean(0).expand_as(truth)
    error = (completed - truth)[hole].square().mean()
    assert error < 0.25 * (alone - truth)[hole].square().mean()


def test_configurations_without_knobs_are_learned_from_what_they_answer():
    table = small_table(300)
    names = tuple(f"c{index:02}" for index in range(12))
    unnamed = replace(
        table, knobs=(Knob("model", names),), configurations=torch.arange(12).unsqueeze(1)
    )
    truth = table.latency_ms.log()
    seen, hole = holed(truth, 0.7)
    completed = Completion(unnamed, features_of(table)).complete(seen)
    alone = seen.nanmean(0).expand_as(truth)
    error = (completed - truth)[hole].square().mean()
    assert error < 0.4 * (alone - truth)[hole].square().mean()


def test_many_samples_and_cells_are_drawn_from(monkeypatch):
    monkeypatch.setattr(completion, "MAX_SAMPLES", 60)
    monkeypatch.setattr(completion, "MAX_CELLS", 200)
    table = small_table(150)
    seen, hole = holed(table.latency_ms.log(), 0.5)
    completed = Completion(table, features_of(table)).complete(seen)
    alone = seen.nanmean(0).expand_as(completed)
    truth = table.latency_ms.log()
    error = (completed - truth)[hole].square().mean()
    assert error < (alone - truth)[hole].square().mean()


def test_no_features_and_equal_values_are_no_error():
    table = small_table(20)
    seen, _ = holed(torch.ones(20, 12), 0.5)
    completed = Completion(table, np.zeros((20, 1))).complete(seen)
    close(completed, torch.ones(20, 12).double())
