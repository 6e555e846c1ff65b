import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, input_error

from knobwise.testbeds.simulated.calibrated import (
    BLOCK_LOSS,
    DATA_SETS,
    GRIDS,
    TOTAL_BLOCKS,
    SimulatedConfig,
    blocks_lost,
    simulate,
)

_ALL = ("text_vqa", "coco_vqa", "okvqa")
NARROW = {"image_width": 6, "language_width": 9}


@functools.cache
def drawn(grid, latency, samples=1000):
    return simulate(SimulatedConfig(_ALL, samples, grid, latency, image_width=0, language_width=0))


def latencies(grid, latency):
    """All samples × configurations, in ms."""
    return drawn(grid, latency).latency_ms.double().numpy()


def test_published_times_over_the_240_configurations():
    prefill = latencies("240", "prefill")
    quantiles = np.quantile(prefill, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    assert quantiles == pytest.approx([102.3, 119.7, 135.0, 151.7, 175.3], rel=0.015)
    assert prefill.mean() == pytest.approx(136.3, rel=0.015)
    assert prefill.std() == pytest.approx(22.2, rel=0.04)
    assert prefill.min() == pytest.approx(68.7, rel=0.10)
    # of 720,000 records instead of 1,638,588, and the largest of few stalls
    assert prefill.max() == pytest.approx(607.7, rel=0.40)


def test_published_spread_of_prefill_inside_a_configuration_of_the_tiers():
    prefill = latencies("tiers", "prefill")
    assert (prefill.std(0) / prefill.mean(0)).mean() == pytest.approx(0.18, rel=0.05)


def test_published_steps():
    """An answer takes (tokens − 1) steps; a step takes 36 to 48 ms, whatever the length of the
    answer."""
    decode = latencies("240", "total") - latencies("240", "vision_prefill")
    for dataset, times in zip(_ALL, np.split(decode, 3), strict=True):
        step = times.mean(0) / (DATA_SETS[dataset].tokens[0] - 1)
        assert (step.min(), step.max()) == pytest.approx((36, 48), rel=0.06)


def test_published_lengths_of_answers():
    for known in DATA_SETS.values():
        mean, least, most = known.tokens
        lengths = np.arange(least, most + 1)
        assert np.average(lengths, weights=known.ratio**lengths) == pytest.approx(mean, abs=1e-12)


def test_published_losses_without_blocks():
    blocks = range(TOTAL_BLOCKS)
    removals = [blocks_lost(s) for r in range(1, 5) for s in itertools.combinations(blocks, r)]
    assert np.mean(removals) == pytest.approx(0.235, rel=0.02)
    assert np.std(removals) == pytest.approx(0.20, rel=0.08)
    assert blocks_lost((0,)) == pytest.approx(0.627)
    assert min(removals[:TOTAL_BLOCKS]) == pytest.approx(0.031, rel=0.20)
    pairs = map(blocks_lost, itertools.combinations(blocks, 2))
    assert 0.024 < min(pairs) < 0.054


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_ends_of_the_pareto_front(dataset):
    published, table = DATA_SETS[dataset], drawn("tiers", "total", 6000)
    rows = torch.tensor([name == dataset for name in table.datasets])
    accuracy, ms = table.accuracy[rows].mean(0), table.latency_ms[rows].mean(0)
    worst, best = int(ms.argmin()), int(accuracy.argmax())
    assert list(table.configuration(worst).values()) == ["low", 4, 12]
    assert table.configuration(best)["tier"] == published.best_tier
    for column, wanted in ((worst, published.worst), (best, published.best)):
        assert float(accuracy[column]) == pytest.approx(wanted[0], abs=0.02)
        assert float(ms[column]) == pytest.approx(wanted[1], rel=0.02)


def test_removing_blocks_by_hand():
    a, b = BLOCK_LOSS[3], BLOCK_LOSS[9]
    assert blocks_lost(()) == 0
    assert blocks_lost((3, 9)) == pytest.approx(0.627 * (1 - (1 - a / 0.627) * (1 - b / 0.627)))
    assert blocks_lost((0, 1, 2, 3)) == pytest.approx(0.627)  # nothing is left to lose
    assert BLOCK_LOSS.argmax() == 0


@pytest.mark.parametrize("grid", GRIDS)
def test_a_config_gives_one_table(grid):
    config = SimulatedConfig(grid=grid, samples=40, seed=3, **NARROW)
    table = simulate(config)
    assert table.digest == simulate(config).digest
    assert table.accuracy.shape == (3 * 40, np.prod(table.knob_sizes))
    assert table.name == "simulated-text_vqa+coco_vqa+okvqa"
    assert "simulated, not measured" in table.notes[0]
    widths = {name: block.shape[1] for name, block in table.features.items()}
    assert widths == {"image_features": 6, "language_features": 9}
    levels = torch.tensor([0, 0.3, 0.6, 0.9, 1])
    assert torch.isin(table.accuracy, levels).all()


def test_what_is_drawn_besides_changes_nothing():
    whole = simulate(SimulatedConfig(grid="27", samples=30, **NARROW))
    okvqa = SimulatedConfig(("okvqa",), 30, "27", image_width=0, language_width=4)
    alone = simulate(okvqa)
    assert (alone.name, alone.datasets) == ("simulated-okvqa", ())
    identical(alone.accuracy, whole.accuracy[60:])
    identical(alone.latency_ms, whole.latency_ms[60:])
    assert list(alone.features) == ["language_features"]
    other, both, prefill = (
        simulate(replace(okvqa, **change)).latency_ms
        for change in ({"seed": 1}, {"latency": "vision_prefill"}, {"latency": "prefill"})
    )
    assert not torch.equal(alone.latency_ms, other)
    assert (alone.latency_ms > both).all()
    assert (both > prefill).all()


def test_features_tell_sizes_and_as_much_of_the_rest_as_they_should():
    """Share of variance that least squares on the features explains in samples not fitted on."""

    def explained(signal):
        config = SimulatedConfig(
            ("text_vqa",), 3000, "27", image_width=150, language_width=150, signal=signal
        )
        table = simulate(config)
        x = torch.cat([torch.ones(3000, 1), *table.features.values()], 1).double()
        prefill, first, total = (
            simulate(replace(config, latency=stage)).latency_ms.double().mean(1)
            for stage in ("prefill", "vision_prefill", "total")
        )
        # lengths of texts with sizes of images, right answers, lengths of answers
        outcomes = prefill.log(), table.accuracy.double().mean(1), (total - first).log()
        y = torch.stack(outcomes, 1)
        left = y[2000:] - x[2000:] @ torch.linalg.lstsq(x[:2000], y[:2000]).solution
        return (1 - left.square().mean(0) / y[2000:].var(0)).tolist()

    nothing, half, all_of_it = explained(0.0), explained(0.5), explained(1.0)
    assert min(nothing[0], half[0]) > 0.9
    for outcome in (1, 2):
        assert nothing[outcome] < 0.02
        assert nothing[outcome] + 0.15 < half[outcome] < all_of_it[outcome] - 0.15
        assert all_of_it[outcome] < 0.9  # what is drawn of an outcome shows in no feature
    assert half[1] < 0.5


def test_data_sets_share_the_encoder_and_each_has_an_offset():
    config = SimulatedConfig(("text_vqa", "okvqa"), 2000, "27", image_width=40, language_width=0)
    first, second = simulate(config).features["image_features"].double().split(2000)
    # four latents in forty columns of noise: both spread in the same directions
    noise = 4 * torch.eye(40, dtype=torch.float64)
    spread = [(torch.cov(block.T) - noise).flatten() for block in (first, second)]
    assert torch.corrcoef(torch.stack(spread))[0, 1] > 0.95
    offset = first.mean(0) - second.mean(0)
    assert offset.std().item() == pytest.approx(0.5**0.5, rel=0.3)


def test_samples_differ_in_what_suits_them_and_agree_on_right_answers():
    table = simulate(SimulatedConfig(("text_vqa",), 500, "27", **NARROW))
    cheap, dear = table.accuracy[:, 0], table.accuracy[:, table.find(torch.tensor([2, 1, 2]))]
    assert 0.02 < (cheap > dear).float().mean() < 0.2
    assert dear.mean() > cheap.mean() + 0.2
    # what annotators agree on is the same for all right answers of a sample
    right = table.accuracy.amax(1, keepdim=True)
    assert torch.where(table.accuracy == 0, right, table.accuracy).std(1).max() == 0


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("datasets", wrong) for wrong in (("doc_qa",), (), ("okvqa", "okvqa"))),
        ("grid", "28"),
        ("latency", "decode"),
        ("samples", 0),
        ("image_width", -1),
        ("language_width", -1),
        ("seed", -1),
        ("signal", 1.5),
    ],
)
def test_a_mistake_is_named(option, wrong):
    with input_error(f"profile.{option}"):
        simulate(SimulatedConfig(**{option: wrong}))
