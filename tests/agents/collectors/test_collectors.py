"""Several processes that draw for one training."""

import pytest
import torch
from helpers import input_error, small_table

from knobwise.agents import LossConfig, OptimiserConfig, PolicyConfig, distillation_trainer
from knobwise.agents.collectors.processes import NumberedBandit

OPTIMISER = OptimiserConfig(
    pretrain_iterations=2, iterations=6, contexts=32, minibatch=16, evaluate_every=2
)
POLICY = PolicyConfig(hidden=8, fold_networks=3)


class Stops:
    """A log that interrupts the training in an iteration."""

    def __init__(self, at):
        self.at = at

    def log(self, metrics, step):
        if step == self.at:
            raise KeyboardInterrupt


def trainer(objective="sampled", optimiser=OPTIMISER, collectors=2, **settings):
    table = small_table(120)
    return distillation_trainer(
        table,
        table.split(),
        policy=POLICY,
        loss=LossConfig(objective=objective),
        optimiser=optimiser,
        collectors=collectors,
        **settings,
    )


def test_processes_draw_by_the_present_weights():
    training = trainer()
    setup = training.setup
    training.state.iteration = training.stages[-1].first
    stream = iter(training.collector)
    rows = []
    for _ in range(2):
        training.buffer.empty()
        next(stream)
        drawn = training.buffer[:].flatten(0, 1)
        keys = drawn["row"], drawn["budget_ms"]
        log_probs = setup.rows.of_controllers([setup.controller], *keys)[0]
        expected = log_probs.gather(1, drawn["configuration"])
        torch.testing.assert_close(drawn["action_log_prob"], expected)
        torch.testing.assert_close(
            drawn["next", "reward"],
            setup.env.rewards.all(*keys).gather(1, drawn["configuration"]),
        )
        rows.append(drawn["row"].clone())
        for parameter in setup.controller.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    stream.close()
    # one half of each batch from each process, and other contexts in the next one
    first, second = rows[0].chunk(2)
    assert not torch.equal(first, second)
    assert not torch.equal(*rows)


def test_contexts_follow_from_seed_process_and_number():
    table = small_table(120)

    def rows(first, seed="0 0"):
        bandit = NumberedBandit(table, batch_size=16, first=first, seed=seed)
        return [bandit.reset()["row"].tolist() for _ in range(3)]

    assert rows(0)[1:] == rows(1)[:2]
    assert rows(0) != rows(0, "0 1")


@pytest.mark.campaign
def test_a_stopped_training_ends_with_the_same_numbers(tmp_path):
    whole = trainer().run().state_dict()
    with pytest.raises(KeyboardInterrupt):
        trainer(folder=tmp_path, log=Stops(6)).run()
    rest = trainer(folder=tmp_path)
    assert rest.resume(tmp_path / "last.pt")
    assert rest.state.iteration > rest.stages[-1].first
    torch.testing.assert_close(rest.run().state_dict(), whole, rtol=0, atol=0)


def test_what_cannot_be_shared_is_refused():
    with input_error("collectors=2: loss.objective=exact"):
        trainer("exact")
    with input_error("collectors=3: optimiser.contexts=32"):
        trainer(collectors=3)
