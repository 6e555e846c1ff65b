"""Which samples a training that starts from a checkpoint may be judged on."""

from dataclasses import replace

import pytest
import torch
from helpers import BRIEF, input_error, small_table

from knobwise.agents.calibration.promise import HELD_BACK
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.training.controllers import controller_trainer
from knobwise.envs.tables.divisions import hold_back

TABLE = small_table(80)
SPLIT = TABLE.split()
ALONE = PolicyConfig(hidden=8, fold_networks=1)
FOLDS = replace(ALONE, fold_networks=2)
OPTIMISER = replace(BRIEF, pretrain_iterations=0, iterations=2)


def promising(table=TABLE, seed=0):
    """A problem with samples held back for a promise."""
    split, held_back = hold_back(table, table.split(), HELD_BACK, seed)
    return replace(Problem.from_table(table, split), calibration=held_back)


def trainer(problem, policy=ALONE, **settings):
    return controller_trainer(problem, policy=policy, optimiser=OPTIMISER, **settings)


def problem(split=SPLIT, table=TABLE):
    return Problem.from_table(table, split)


PROMISES = replace(ALONE, promise=0.9)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Checkpoints of networks without a promise, with one, and of two folds."""
    folder = tmp_path_factory.mktemp("starts")
    made = {"plain": (problem(), ALONE), "promise": (promising(), PROMISES)}
    made["folds"] = problem(), FOLDS
    paths = {}
    for name, (of, policy) in made.items():
        (folder / name).mkdir()
        trainer(of, policy, folder=folder / name).run()
        paths[name] = folder / name / "best.pt"
    return paths


def test_a_promise_is_not_tested_on_samples_that_the_start_has_learned(starts, tmp_path):
    with input_error(r"init_from=.*: has learned from 13 of the 13 .*policy\.promise=0\.9"):
        trainer(promising(), PROMISES, init_from=starts["plain"])
    # nor on those of an equal start that says less, nor on others than the start held back
    loaded = load_checkpoint(starts["promise"])
    del loaded.extra["proof"]
    save_checkpoint(tmp_path / "old.pt", loaded.agent, TABLE, loaded.extra)
    for path, seed in ((tmp_path / "old.pt", 0), (starts["promise"], 1)):
        with input_error(r"policy\.promise"):
            trainer(promising(seed=seed), PROMISES, init_from=path)


def test_a_promise_goes_on_with_the_samples_that_the_start_held_back(starts, capsys):
    first = load_checkpoint(starts["promise"]).extra
    again = trainer(promising(), PROMISES, init_from=starts["promise"])
    extra = again.provenance(again)
    assert extra["proof"] == first["proof"] == TABLE.fingerprints(again.setup.problem.calibration)
    assert set(extra["proof"]) < set(extra["seen"])
    # what was held back teaches nothing, so it may be judged on; and other samples prove anew
    trainer(problem(), init_from=starts["promise"])
    trainer(promising(small_table(80, seed=5)), PROMISES, init_from=starts["plain"])
    assert "init_from" not in "".join(capsys.readouterr())


def test_weights_are_not_chosen_on_samples_that_the_start_was_fitted_on(starts):
    trainer(problem(), init_from=starts["plain"])
    train, validation, _ = SPLIT
    swapped = SPLIT._replace(train=validation, validation=train[:7])
    with input_error("was fitted on 7 of the 7 samples"):
        trainer(problem(swapped), init_from=starts["plain"])
    # what the start was chosen on may be learned
    wider = SPLIT._replace(train=torch.cat([train, validation[2:]]), validation=validation[:2])
    trainer(problem(wider), init_from=starts["plain"])


def test_folds_that_are_divided_anew_are_refused(starts):
    trainer(problem(), FOLDS, init_from=starts["folds"], seed=3)
    fewer = SPLIT._replace(train=SPLIT.train[5:])
    with input_error("was fitted on .* of the .* samples"):
        trainer(problem(fewer), FOLDS, init_from=starts["folds"])


def test_where_rows_mean_other_samples_it_is_said(starts, capsys):
    back = torch.arange(79, -1, -1)
    cells = {name: getattr(TABLE, name)[back] for name in ("accuracy", "latency_ms", "mask")}
    features = {name: block[back] for name, block in TABLE.features.items()}
    backwards = replace(TABLE, **cells, features=features, sample_ids=TABLE.sample_ids[::-1])
    mirrored = type(SPLIT)(*(79 - rows for rows in SPLIT))
    trainer(problem(mirrored, backwards), init_from=starts["plain"])
    count = len(SPLIT.validation)
    assert f"has seen {count} of the samples" in "".join(capsys.readouterr())
