from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import small_table, table_of
from torch import Tensor

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.training.augmentation import Augmentation
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import AugmentationConfig, OptimiserConfig, PolicyConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import BalanceConfig
from knobwise.envs.tables.profile_table import ProfileTable

QUICK = OptimiserConfig(warmup_iterations=4, iterations=3, contexts=16, minibatch=8, evaluate_every=2)


def two_blocks(samples: int = 6) -> ProfileTable:
    """Block x of two columns, the second with a missing value, and y of one; the last two samples are of data set b."""
    table = table_of([[0.0, 1.0]] * samples, [[1.0, 2.0]] * samples)
    x = torch.arange(2.0 * samples).view(samples, 2)
    x[0, 1] = torch.nan
    blocks = {"x": x, "y": torch.arange(1.0 * samples).unsqueeze(1)}
    return replace(table, features=blocks, datasets=("a",) * (samples - 2) + ("b",) * 2)


def augmentation(table: ProfileTable, **config: Any) -> tuple[Augmentation, Tensor]:
    normaliser = FeatureNormaliser.fit(table, torch.arange(table.num_samples))
    return Augmentation(AugmentationConfig(**config), table, normaliser), normaliser(table.features)


def test_noise_has_the_deviation_asked_for_and_outcomes_stay() -> None:
    table = two_blocks()
    augment, _ = augmentation(table, noise=0.3)
    row, x = torch.zeros(4000, 2, dtype=torch.int64), torch.ones(4000, 2, 4)
    measured = {"accuracy": torch.rand(4000, 2, 2)}
    noisy, same = augment(x, row, measured)
    assert (noisy - x).std().item() == pytest.approx(0.3, abs=0.01)
    assert (noisy - x).mean().item() == pytest.approx(0, abs=0.01)
    torch.testing.assert_close((noisy - x).view(-1, 4).T.corrcoef(), torch.eye(4), atol=0.05, rtol=0)
    assert torch.equal(same["accuracy"], measured["accuracy"])


def test_a_block_is_hidden_whole_with_what_says_that_it_has_holes() -> None:
    table = two_blocks()
    augment, _ = augmentation(table, drop=0.25)
    hidden = augment(torch.ones(4000, 1, 4), torch.zeros(4000, 1, dtype=torch.int64), {})[0].squeeze(1) == 0
    # columns: two of x, one of y, the indicator of the hole in x
    assert torch.equal(hidden[:, 0], hidden[:, 1])
    assert torch.equal(hidden[:, 0], hidden[:, 3])
    assert hidden[:, 0].float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert hidden[:, 2].float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (hidden[:, 0] & hidden[:, 2]).float().mean().item() == pytest.approx(0.0625, abs=0.015)


def test_samples_are_mixed_with_others_of_their_data_set_and_outcomes_with_them() -> None:
    table = two_blocks(8)
    augment, _ = augmentation(table, mix=0.5)
    row = torch.stack([torch.randperm(8) for _ in range(3)], 1)
    number = row.unsqueeze(-1).double()
    seen = set()
    for _ in range(20):
        x, measured = augment(number, row, {"a": 10 * number})
        torch.testing.assert_close(measured["a"], 10 * x)  # the same partner in the same share
        low, high = torch.where(row < 6, 0, 6), torch.where(row < 6, 5, 7)
        assert ((low <= x.squeeze(-1)) & (x.squeeze(-1) <= high)).all()
        seen |= {(int(a), int(b)) for a, b in zip(row.flatten(), augment._partners(row).flatten(), strict=True)}
    assert (x != number).any()
    partners = augment._partners(row)
    taken = row.gather(0, partners)
    assert torch.equal(taken < 6, row < 6)
    # all but the last of each data set in the random order got another one
    assert (taken != row).sum(0).tolist() == [6, 6, 6]


def test_a_cell_counts_where_both_have_it() -> None:
    table = two_blocks(4)
    augment, _ = augmentation(replace(table, datasets=()), mix=1.0)
    row = torch.arange(4).unsqueeze(1)
    cells = torch.tensor([[torch.nan, 1.0], [0.5, 1.0], [0.5, 1.0], [0.5, 1.0]]).unsqueeze(1)
    mixed = augment(torch.zeros(4, 1, 4), row, {"a": cells})[1]["a"]
    assert 1 <= int(mixed.isnan().sum()) <= 2
    assert (mixed[:, :, 1] == 1).all()


@pytest.mark.parametrize(
    "config",
    [{"noise": -1.0}, {"drop": 1.0}, {"mix": -0.1}],
)
def test_a_mistake_is_named(config: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"augmentation.{next(iter(config))}"):
        AugmentationConfig(**config)


def test_what_it_is_not_for() -> None:
    table = small_table()
    for policy, words in (
        (PolicyConfig(structure="additive"), "is for policy.structure=utility"),
        (PolicyConfig(structure="utility", retrieval=5), "does not go with policy.retrieval"),
    ):
        with pytest.raises(InputError, match=words):
            ControllerTrainer(table, table.split(), policy=policy, augmentation=AugmentationConfig(noise=0.1))


def trained(**more: Any) -> ControllerTrainer:
    table = small_table(60, holes=0.2)
    table = replace(table, datasets=("a",) * 50 + ("b",) * 10)
    policy = PolicyConfig(structure="utility", members=2, hidden=8, dropout=0.1)
    trainer = ControllerTrainer(table, table.split(), policy=policy, optimiser=QUICK, seed=1, **more)
    trainer.run()
    return trainer


def test_off_it_changes_nothing_and_on_it_does() -> None:
    plain = trained().agent.state_dict()
    off = trained(augmentation=AugmentationConfig(), balance=BalanceConfig()).agent.state_dict()
    assert all(torch.equal(plain[name], off[name]) for name in plain)
    for more in (
        {"augmentation": AugmentationConfig(noise=0.1)},
        {"augmentation": AugmentationConfig(drop=0.2)},
        {"augmentation": AugmentationConfig(mix=0.4)},
        {"balance": BalanceConfig(by="dataset")},
        {"balance": BalanceConfig(by="configuration", power=0.5)},
    ):
        other = trained(**more).agent.state_dict()
        assert any(not torch.equal(plain[name], other[name]) for name in plain), more
        assert all(value.isfinite().all() for value in other.values() if value.is_floating_point())


def test_every_sample_is_regressed_with_its_own_features() -> None:
    """Noise too small to matter leads, by the other way through the network, to the same controller."""
    table = small_table(60, holes=0.2)
    policy = PolicyConfig(structure="utility", members=2, hidden=8, dropout=0.0)
    whole = replace(QUICK, minibatch=16, warmup_lr=1e-2)
    states = []
    for noise in (0.0, 1e-9):
        augmented = AugmentationConfig(noise=noise)
        trainer = ControllerTrainer(table, table.split(), policy=policy, optimiser=whole, augmentation=augmented)
        assert (trainer.augmentation is None) == (noise == 0)
        states.append(trainer.run().state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=2e-4, rtol=1e-3, equal_nan=True)


def test_what_is_not_trained_on_has_no_part_in_the_balance() -> None:
    """Of b one sample in twenty is trained on, and eight are judged."""
    parts = tuple("train" if i < 19 or i == 50 else "validation" if i < 25 else "test" for i in range(60))
    table = replace(small_table(60), datasets=("a",) * 50 + ("b",) * 10, parts=parts)
    policy = PolicyConfig(structure="utility", hidden=8)
    trainer = ControllerTrainer(table, table.split(), policy=policy, balance=BalanceConfig(by="dataset"))
    assert (trainer.env.contexts(4000)[0] == 50).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_of_a_balanced_training_every_data_set_is_seen_alike() -> None:
    trainer = trained(balance=BalanceConfig(by="dataset"))
    rows, _ = trainer.env.contexts(4000)
    assert (rows >= 50).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_what_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Any) -> None:
    config, balance = AugmentationConfig(noise=0.1, drop=0.1, mix=0.4), BalanceConfig(by="dataset", power=0.5)
    whole = trained(augmentation=config, balance=balance).agent.state_dict()
    table = replace(small_table(60, holes=0.2), datasets=("a",) * 50 + ("b",) * 10)
    policy = PolicyConfig(structure="utility", members=2, hidden=8, dropout=0.1)

    def new() -> ControllerTrainer:
        return ControllerTrainer(
            table,
            table.split(),
            policy=policy,
            optimiser=QUICK,
            seed=1,
            balance=balance,
            augmentation=config,
            folder=tmp_path,
        )

    class Stop(Exception):
        pass

    class Log:
        def log(self, metrics: Any, step: int) -> None:
            if step == 4:
                raise Stop

    first = new()
    first.log = Log()
    with pytest.raises(Stop):
        first.run()
    again = new()
    assert again.resume(tmp_path / "last.pt")
    assert again.iteration > 0
    again.run()
    state = again.agent.state_dict()
    assert all(torch.equal(whole[name], state[name]) for name in whole)
