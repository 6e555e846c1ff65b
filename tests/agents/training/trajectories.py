"""Reference trajectories: the loss and the norm of the gradient at every optimiser step of short
runs of fixed seed.

`test_trajectories.py` holds them against what the code gives today, so that
nobody changes the mathematics unawares. Where a change is meant, make them anew and commit them
with it:

    PYTHONPATH=.:tests python tests/agents/training/trajectories.py

Nothing in these runs depends on more than rounding: no dropout and no draws whose numbers come from
MKL (a build without it draws others), full batches where such draws are made beside, evaluations
far from a tie.
"""

import functools
import json
from pathlib import Path

import torch
from helpers import small_beams, small_table
from torch.optim.optimizer import register_optimizer_step_pre_hook

from knobwise.agents import (
    OptimiserConfig,
    PolicyConfig,
    Selector,
    SelectorConfig,
    StageConfig,
    distillation_trainer,
    selector_trainer,
)
from knobwise.envs import RewardConfig
from knobwise.losses.settings import LossConfig, SelectorLossConfig

FILE = Path(__file__).with_suffix(".json")
CONTROLLER = {
    "policy": {"hidden": 16, "dropout": 0.0},
    "loss": {"entropy_coeff": 0.02, "kl_to_ref_coeff": 0.2, "clip_epsilon": 0.2},
    "optimiser": {"pretrain_iterations": 10, "iterations": 10, "contexts": 32, "epochs": 3}
    | {"evaluate_every": 10, "patience": 0},
    "reward": {"kind": "utility", "miss": 0.2},
}
SELECTOR = {"lr": 2e-3, "queries": 8, "keep": "last"}
SETTINGS = {
    # a head over the knobs; RCE, then GRPO on draws, several passes so that the clip acts
    "controller sampled": {
        "policy": CONTROLLER["policy"],
        "loss": CONTROLLER["loss"]
        | {"objective": "sampled", "group_size": 6}
        | {"advantage": "zscore", "advantage_clip": 1.5},
        "optimiser": CONTROLLER["optimiser"]
        | {"minibatch": 16, "pretrain_lr": 1e-2, "lr": 1e-2, "clip_grad": 0.5},
        "reward": CONTROLLER["reward"],
    },
    # heads of two folds and of all samples; RCE, then GRPO over every configuration
    "controller exact": {
        "policy": CONTROLLER["policy"] | {"fold_networks": 2},
        "loss": CONTROLLER["loss"]
        | {"objective": "exact", "advantage": "centred", "entropy_coeff": 0.1},
        "optimiser": CONTROLLER["optimiser"]
        | {"minibatch": 32, "pretrain_lr": 5e-3, "lr": 5e-3, "clip_grad": 0.2},
        "reward": CONTROLLER["reward"],
    },
    # two networks that predict, without bins and with them, are imitated; then GRPO on draws
    "controller taught": {
        "policy": CONTROLLER["policy"]
        | {
            "teacher": True,
            "fold_networks": 2,
            "teacher_hidden": 16,
            "teacher_dropout": 0.0,
            "sharpness": 40.0,
        },
        "loss": CONTROLLER["loss"] | {"objective": "sampled", "group_size": 6},
        "optimiser": CONTROLLER["optimiser"]
        | {"teacher_iterations": 10, "minibatch": 32, "pretrain_lr": 5e-3, "lr": 5e-3},
        "reward": CONTROLLER["reward"],
    },
    "selector RCE": {"config": SELECTOR | {"epochs": 4, "clip_grad": 20.0}, "loss": {}},
    # from the end of RCE, away from the reference; old log-probs of four steps, so the clip acts
    "selector GRPO": {
        "config": SELECTOR | {"epochs": 5, "collected": 32, "lr_warmup": 0.2, "clip_grad": 15.0},
        "loss": {"advantage": "zscore", "kl_to_ref_coeff": 0.1, "clip_epsilon": 0.2},
    },
}
"""The settings of each run, by group: what the formulae do is all at work, and none of it
saturates."""
RUNS = tuple(SETTINGS)


def steps_of(trainer):
    """Train; of every optimiser step the loss, and the norm of the gradient that the optimiser was
    given."""
    losses = []
    norms = []

    def noted(loss, minibatch):
        out = loss(minibatch)
        losses.append(sum(float(value.detach()) for value in out.values() if value.requires_grad))
        return out

    def about_to_step(optimiser, *_):
        gradients = [
            p.grad
            for group in optimiser.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))

    for stage in trainer.stages:
        stage.loss = functools.partial(noted, stage.loss)
    hook = register_optimizer_step_pre_hook(about_to_step)
    try:
        trainer.run()
    finally:
        hook.remove()
    return [list(step) for step in zip(losses, norms, strict=True)]


def controller(settings):
    """A controller on a small table with holes."""
    table = small_table(60, holes=0.2)
    kinds = {
        "policy": PolicyConfig,
        "loss": LossConfig,
        "optimiser": OptimiserConfig,
        "reward": RewardConfig,
    }
    return steps_of(
        distillation_trainer(
            table, table.split(), **{k: kinds[k](**values) for k, values in settings.items()}
        )
    )


def selector(stage, settings):
    """A selector on small recorded beams; GRPO starts from a short RCE, and its reference is where
    that started."""
    table, _ = small_beams(40)
    torch.manual_seed(0)
    fresh = Selector.fitted(
        SelectorConfig(width=16, heads=2, dropout=0.0), table.queries, table.candidates
    )

    def trainer(stage, start, settings):
        loss, config = SelectorLossConfig(**settings["loss"]), StageConfig(**settings["config"])
        return selector_trainer(
            stage, table, table.split(0.8, 0.1), start, reference=fresh, loss=loss, config=config
        )

    start = fresh if stage == "rce" else trainer("rce", fresh, SETTINGS["selector RCE"]).run()
    return steps_of(trainer(stage, start, settings))


def trajectory(name, settings=None):
    """Loss and gradient norm of every step of a run, float64 [steps, 2]; with other settings when
    they are given."""
    torch.set_num_threads(1)
    settings, (system, stage) = settings or SETTINGS[name], name.split()
    steps = controller(settings) if system == "controller" else selector(stage.lower(), settings)
    return torch.tensor(steps, dtype=torch.float64)


def main():
    """Write what the code gives today."""
    runs = []
    for name in RUNS:
        steps = ",\n".join(
            f"    [{loss:.7g}, {norm:.7g}]" for loss, norm in trajectory(name).tolist()
        )
        runs.append(f"  {json.dumps(name)}: [\n{steps}\n  ]")
    FILE.write_text("{\n" + ",\n".join(runs) + "\n}\n")


if __name__ == "__main__":
    main()
