"""What the guard should deploy where few cells of a profile were measured, and what GRPO alone
learns there.

Cells are drawn, and policies trained and judged, as in `sparse.py`: imitation of a teacher; GRPO
alone (`policy=grpo`, two folds, all configurations weighed in place of draws) on completed beliefs,
as `train` does it; and GRPO alone on `measured` cells, weighted by their probabilities. Each
decides

- *free*, at every budget;
- *apart*: with static at the budgets where it is not better by itself, with the guard's confidence;
- *pooled*: it decides as well where it is not worse, with this confidence, if its mean gain over
  all budgets is better.

How they are compared was fixed before the runs:

- Profiles built-in, SmolLM2 and RapidOCR (on which imitation is behind static), a 16th and a
  quarter of the cells, `DRAWS` draws; the seed of the split is the draw modulo 3.
- The pooled guard becomes that of sparse profiles if, for what is deployed by default, imitation,
  its gain over apart, the mean over all profiles and shares, has a 95 % interval above 0, and if on
  no profile and share it is below static by an interval below 0 where apart is not.
- GRPO alone learns from measured cells in place of beliefs if its gain over beliefs, the mean over
  all profiles and shares, both free, has an interval above 0.

The first came out, and `knobwise.agents.calibration.guard.pools_budgets` follows it; the second did
not.

    python experiments/studies/sparse_guard.py run FOLDER [PROFILE …]
    python experiments/studies/sparse_guard.py table FOLDER
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.guard import GuardRow, deployed_at
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.policy import Array, Policy, choices_of, inputs_of_rows
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import ControllerSetup, controller_trainer
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.tables.splits import cluster_numbers
from knobwise.experiments.settings.choices import COLD_OPTIMISER, GRPO, SAMPLED
from knobwise.experiments.studies.sparse import (
    POLICY,
    SPLITS,
    TUNED,
    Case,
    CheckedRewards,
    Imitation,
    judged,
    profile_named,
)
from knobwise.experiments.studies.sparse_tables import TITLES, Draws, rows_of, words_of

SHARES = (Fraction(1, 16), Fraction(1, 4))
DRAWS = 3
LEARNERS = ("imitation", "grpo", "grpo measured")
GUARDS = ("free", "apart", "pooled")
ALONE = replace(GRPO, fold_networks=POLICY.fold_networks, drift=POLICY.drift)
EXACT = replace(SAMPLED, objective="exact")


def grpo_alone(problem: Problem, budgets_ms: Tensor, measured_only: bool) -> ControllerSetup:
    """Train GRPO alone, and return its setup with the weights that are deployed."""
    trainer = controller_trainer(
        problem, policy=ALONE, loss=EXACT, optimiser=COLD_OPTIMISER, budgets_ms=budgets_ms
    )
    setup: ControllerSetup = trainer.setup
    if measured_only:
        assert problem.beliefs is not None
        setup.env.rewards = CheckedRewards(problem.beliefs, measured_only=True)
    trainer.run()
    return setup


def guarded(setup: ControllerSetup, budgets_ms: Tensor) -> dict[str, DeployedController]:
    """Return what is deployed by each guard."""
    calibrated = calibrate_controller(setup, budgets_ms)
    gains = held_out_gains(setup, budgets_ms)
    clusters = cluster_numbers(setup.facts, setup.held_out.rows)

    def deployed(pooled: bool) -> DeployedController:
        decides = deployed_at(gains, clusters, pooled=pooled)
        rows: list[GuardRow] = [
            {**row, "deployed": each}
            for row, each in zip(calibrated.calibration.guard, decides, strict=True)
        ]
        calibration = replace(calibrated.calibration, guard=rows)
        return DeployedController(calibrated.controller, calibrated.teacher, calibration).eval()

    return {"apart": deployed(pooled=False), "pooled": deployed(pooled=True)}


def held_out_gains(setup: ControllerSetup, budgets_ms: Tensor) -> Tensor:
    """Return doubly robust estimates of the gain of each held-out sample over static, [n, B]."""
    problem = setup.problem
    rows = setup.held_out.rows
    chosen = torch.stack([setup.held_out_log_probs(limit).argmax(-1) for limit in budgets_ms], 1)
    by_static = []
    for fit, hold in zip(*setup.folds, strict=True):
        features, mask = inputs_of_rows(problem, hold)
        static = fit_static(problem.cells, fit)
        by_static.append(choices_of(static, features, budgets_ms.double().numpy(), mask))
    unread = torch.zeros(len(budgets_ms), dtype=torch.bool)
    # static reads no features, so it does not wait for them
    policy, static_utility = (
        problem.outcomes(Decisions(rows, choices, budgets_ms, reads=reads)).utility.double()
        for choices, reads in ((chosen, ~unread), (torch.cat(by_static), unread))
    )
    return policy - static_utility


def utilities(case: Case) -> dict[str, Tensor]:
    """Return the utility of each test sample by every learner and guard, float [n]; `rows`, int64
    [n]; and the share of budgets where the policy decides, by learner and guard."""
    whole = profile_named(case.profile)
    split = whole.split(seed=case.draw % SPLITS)
    budgets_ms = default_budgets(whole)
    problem = case.problem(whole, split)
    setups = {
        "imitation": Imitation(problem, budgets_ms, TUNED["imitation"]).setup,
        "grpo": grpo_alone(problem, budgets_ms, measured_only=False),
        "grpo measured": grpo_alone(problem, budgets_ms, measured_only=True),
    }
    policies: dict[str, Policy] = {"static": fit_static(problem.cells, split.fitted)}
    results: dict[str, Tensor] = {"rows": split.test}
    for learner, setup in setups.items():
        by_guard = guarded(setup, budgets_ms)
        policies[f"{learner}/free"] = DeployedController(setup.controller).eval().decider
        for name, deployed in by_guard.items():
            policies[f"{learner}/{name}"] = deployed.decider
            by_budget = [float(row["deployed"]) for row in deployed.calibration.guard]
            results[f"{learner}/{name}/share"] = torch.tensor(by_budget).mean()
    for name, policy in policies.items():
        results[name] = judged(policy, whole, split.test, budgets_ms)
    return results


def run(folder: Path, profiles: list[str]) -> None:
    """Run all cases that the folder does not hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for draw, share, profile in itertools.product(range(DRAWS), SHARES, profiles):
        case = Case(profile, share, draw)
        path = case.path(folder)
        if path.exists():
            continue
        began = time.perf_counter()
        results = utilities(case)
        means = {name: round(float(x.double().mean()), 4) for name, x in results.items()}
        print(path.stem, round(time.perf_counter() - began), "s", means, flush=True)
        arrays = {name: values.numpy() for name, values in results.items()}
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        path.with_suffix(".part").rename(path)


# -- the table -------------------------------------------------------------------------------------


def mean_of(results: Sequence[Mapping[str, Array]], name: str) -> float:
    """Return the mean over draws of the mean over samples, in percent."""
    return 100 * float(np.mean([each[name].mean() for each in results]))


def print_table(folder: Path) -> None:
    """Print gains over static in points by learner and guard, and what is pooled."""
    heads = [f"{learner}, {guard}" for learner in LEARNERS for guard in GUARDS]
    rows: list[list[str]] = [["profile", "share", "draws", "static", *heads]]
    compared = [(f"{learner}/pooled", f"{learner}/apart") for learner in LEARNERS]
    compared += [("grpo measured/free", "grpo/free")]
    compared += [(f"grpo/{guard}", f"imitation/{guard}") for guard in GUARDS]
    differences: dict[tuple[str, str], list[Array]] = {pair: [] for pair in compared}
    for profile, share in itertools.product(TITLES, SHARES):
        paths = [Case(profile, share, draw).path(folder) for draw in range(DRAWS)]
        results = [dict(np.load(path)) for path in paths if path.exists()]
        if not results:
            continue
        draws = Draws(profile, len(results))
        cells = []
        for learner, guard in itertools.product(LEARNERS, GUARDS):
            words = words_of(draws.gains_in(results, f"{learner}/{guard}", "static"))
            if guard != "free":
                words += f" at {mean_of(results, f'{learner}/{guard}/share'):.0f} %"
            cells.append(words)
        static = f"{mean_of(results, 'static'):.1f}"
        rows.append([TITLES[profile], str(share), str(len(results)), static, *cells])
        for pair, values in differences.items():
            values.append(draws.gains_in(results, *pair))
    print(rows_of(rows))
    for (way, reference), values in differences.items():
        print(f"{way} − {reference}: {words_of(np.mean(values, axis=0))}")


def main(words: list[str]) -> None:
    """Run a command, see the top."""
    torch.set_num_threads(1)
    match words:
        case ["run", folder, *profiles]:
            run(Path(folder), profiles or [*TITLES])
        case ["table", folder]:
            print_table(Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
