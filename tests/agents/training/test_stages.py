"""Stages by hand: when one ends, its learning rate, and one of one's own in a `Trainer`."""

from dataclasses import replace

import pytest
import torch
from helpers import BRIEF, Lines, input_error, small_table, trainer_on
from torch import nn

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Stage, Validation
from knobwise.agents.training.trainer import Trainer
from knobwise.envs import ConfigBandit
from knobwise.losses.kl_control import weight_control

SETTINGS = OptimiserConfig(contexts=32, minibatch=16, epochs=2, evaluate_every=4)
TABLE = small_table(60)


class Reinforce(Stage):
    """Log-odds of the configurations, the same for every request; gradients of the log-probability
    of what was drawn, times its reward."""

    name = "REINFORCE"
    stored = ("row", "action", ("next", "reward"))

    def __init__(self, policy, iterations=20, lr=0.1, settings=SETTINGS, **others):
        super().__init__(policy, settings, iterations=iterations, lr=lr, **others)
        self.done = []

    def prepare(self, share, watched):
        super().prepare(share, watched)
        self.done.append((share, watched))

    def collect(self, contexts):
        self.done.append("collect")
        shape = contexts["row"].unsqueeze(1).shape
        logits = self.module.weight[:, 0].expand(len(contexts), -1)
        return contexts.set("action", logits.softmax(-1).multinomial(shape[1], replacement=True))

    def loss(self, minibatch):
        self.done.append(len(minibatch))
        log_probs = self.module.weight[:, 0].log_softmax(-1)[minibatch["action"]]
        reward = minibatch["next", "reward"]
        loss = -(log_probs * (reward - reward.mean())).mean()
        return minibatch.empty()[0].set("loss_own", loss).set("entropy", -log_probs.detach().mean())

    def after(self, outputs):
        super().after(outputs)
        self.done.append(sorted(outputs.keys()))

    def metrics(self, data):
        return {"Reward_Mean": float(data["next", "reward"].mean())}


def policy():
    torch.manual_seed(0)
    return nn.Linear(1, TABLE.num_configurations, bias=False)


def make_trainer(*stages, log=None, settings=SETTINGS):
    """They learn one policy, which is judged by the utility that it expects of all samples."""
    agent = stages[0].module
    utility = (TABLE.accuracy * (TABLE.latency_ms <= 12)).mean(0)

    @torch.no_grad()
    def validate(logged):
        score = float(agent.weight[:, 0].softmax(-1) @ utility)
        return Validation(score, {"Utility": score} if logged else {})

    with seeded(0, "cpu"):
        env = ConfigBandit(
            TABLE,
            batch_size=32,
            group_size=1,
            action="configuration",
            observe_features=False,
            unprofiled="error",
            seed=0,
        )
        return Trainer(
            agent,
            stages,
            env,
            table=TABLE,
            settings=settings,
            shape=(32,),
            reads=["row", "budget_ms"],
            validate=validate,
            judged_by="utility",
            identity="by hand",
            trained_on="otherwise",
            provenance=lambda _: {},
            log=log,
        )


def test_a_stage_of_ones_own_trains():
    log = Lines()
    trainer = make_trainer(Reinforce(policy()), log=log)
    agent = trainer.run()
    first, *_ = log.values("Val/Utility")
    assert trainer.state.best.score > first + 0.02
    assert trainer.validate(False).score == pytest.approx(trainer.state.best.score)
    assert agent is trainer.agent
    assert trainer.state.finished
    assert [at for at, _ in trainer.state.scores] == [0, 4, 8, 12, 16, 20]
    assert [score for _, score in trainer.state.scores] == log.values("Val/Utility")
    for name in ("Loss", "Reward_Mean", "Entropy", "Grad_Norm", "LR"):
        assert len(log.values(f"Train/{name}")) == 5, name
    assert not log.values("Train/Reward_Spread")  # it has no unit of rewards


def test_what_an_iteration_does_in_its_order():
    stage = Reinforce(policy(), iterations=5)
    make_trainer(stage).run()
    learned = ["collect", 16, 16, 16, 16]
    outputs = ["entropy", "grad_norm", "loss", "loss_own"]
    watched = [(0.0, True), *learned, outputs]
    others = [step for share in (0.2, 0.4, 0.6) for step in ((share, False), *learned)]
    assert stage.done == [*watched, *others, (0.8, True), *learned, outputs]


def test_each_stage_has_its_own_loss_optimiser_and_iterations():
    shared = policy()
    lengths = (3, 0, 6)
    stages = [Reinforce(shared, length) for length in lengths]
    trainer = make_trainer(*stages)
    assert [stage.first for stage in stages] == [0, 3, 3]
    optimisers = []
    for stage in stages:
        stage.start = lambda _: optimisers.append((trainer.state.iteration, trainer.optimiser))
    trainer.run()
    assert [stage.done.count("collect") for stage in stages] == list(lengths)
    # the one left out does not begin either
    (first, before), (last, after) = optimisers
    assert (first, last) == (0, 3)
    assert after is not before
    assert trainer.optimiser is not after
    # judged every 4 iterations, and where a stage ends
    assert [at for at, _ in trainer.state.scores] == [0, 3, 4, 8, 9]


@pytest.mark.parametrize(
    ("patience", "iteration", "scores", "past"),
    [
        # the best of its own was at 12; two evaluations later are 8 iterations
        (2, 16, {12: 0.5, 16: 0.4}, False),
        (2, 20, {12: 0.5, 16: 0.4, 20: 0.4}, True),
        # equal scores: the first counts
        (2, 20, {12: 0.5, 16: 0.5, 20: 0.5}, True),
        # what came before the stage is not its own
        (2, 20, {4: 0.9, 8: 0.9, 16: 0.4, 20: 0.3}, False),
        (2, 8, {0: 0.9, 4: 0.5, 8: 0.4}, False),
        (0, 400, {12: 0.5, 400: 0.1}, False),
    ],
)
def test_a_stage_is_past_its_peak_by_hand(patience, iteration, scores, past):
    stage = Reinforce(policy(), patience=patience)
    stage.first = 8
    assert stage.is_past_its_peak(iteration, [*scores.items()]) == past


def test_the_learning_rate_rises_and_falls_within_the_stage():
    stage = Reinforce(policy(), 100, 0.2, replace(SETTINGS, lr_warmup=0.5, schedule="cosine"))
    stage.first = 50
    rates = [stage.learning_rate(at) for at in (50, 70, 100, 150)]
    assert rates == pytest.approx([0.2 * 0.01 / 0.5, 0.2 * 0.21 / 0.5, 0.1, 0.0])
    stage.settings = replace(SETTINGS, schedule="constant")
    assert stage.learning_rate(50) == stage.learning_rate(149) == 0.2


def test_the_state_of_a_stage_is_its_unit_and_its_coefficients():
    stage, other = Reinforce(policy()), Reinforce(policy())
    for each, value in ((stage, 0.3), (other, 1.0)):
        each.kl_controls.append(weight_control(torch.tensor(value), (0.01, 0.1)))
    stage.reward_spread = 0.25
    other.load_state_dict(stage.state_dict())
    assert other.reward_spread == 0.25
    assert float(other.kl_controls[0].coefficient) == pytest.approx(0.3)


def test_a_training_that_another_version_stopped_is_refused(tmp_path):
    def trainer():
        brief = replace(BRIEF, pretrain_iterations=2, iterations=2)
        return trainer_on(TABLE, PolicyConfig(hidden=4), optimiser=brief, folder=tmp_path)

    trainer().run()
    path = tmp_path / "last.pt"
    content = torch.load(path, weights_only=True)
    del content["extra"]["training"]["stages"]
    torch.save(content, path)
    with input_error(r"last\.pt: .*name=") as refused:
        trainer().resume(path)
    assert "\n" not in str(refused.value)
