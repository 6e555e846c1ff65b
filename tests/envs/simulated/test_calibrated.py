import functools
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from calibration import PUBLISHED, calibration_report

from knobwise.common.errors import InputError
from knobwise.envs.simulated.calibrated import (
    BLOCK_LOSS,
    DATA_SETS,
    GRIDS,
    TIERS,
    CalibratedConfig,
    blocks_lost,
    calibrated_records,
    simulate_calibrated,
)

NARROW: dict[str, Any] = {"image_width": 6, "language_width": 9}


@functools.cache
def records(grid: str, samples: int = 300) -> pl.DataFrame:
    return calibrated_records(CalibratedConfig(grid=grid, samples=samples))


@functools.cache
def report(grid: str) -> dict[str, tuple[float, float]]:
    return calibration_report(records(grid, {"240": 1000, "tiers": 6000}[grid]))


RELATIVE = {
    "prefill min": 0.10,
    **{f"prefill {name}": 0.015 for name in ("p5", "p25", "p50", "p75", "p95", "mean")},
    "prefill std": 0.04,
    "prefill max": 0.40,  # of 720,000 records instead of 1,638,588, and the largest of few stalls
    "decode CV inside a configuration": 0.03,
    **{f"step mean of a configuration, {end}": 0.01 for end in ("least", "most")},
    "prefill estimator R²": 0.03,
    "prefill estimator MAPE": 0.10,
    "removing 1–4 blocks: mean loss": 0.02,
    "removing 1–4 blocks: std of loss": 0.08,
    "removing block 0": 1e-9,
    "removing the best single block": 0.20,
    "removing the best pair": 0.40,  # published as .024–.054
}


def test_published_numbers_over_the_240_configurations() -> None:
    numbers = report("240")
    assert {name: numbers[name][0] for name in RELATIVE} == {name: PUBLISHED[name] for name in RELATIVE}
    for name, tolerance in RELATIVE.items():
        assert numbers[name][1] == pytest.approx(numbers[name][0], rel=tolerance), name


def test_published_numbers_of_the_tiers() -> None:
    for name, tolerance in (("prefill CV inside a configuration", 0.05), ("prefill estimator R²", 0.03)):
        published, simulated = report("tiers")[name]
        assert simulated == pytest.approx(published, rel=tolerance)
    assert set(PUBLISHED) <= set(report("tiers")) | set(report("240"))


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_ends_of_the_pareto_front(dataset: str) -> None:
    front = {name: values for name, values in report("tiers").items() if name.startswith(f"{dataset} ")}
    assert f"{dataset} worst accuracy (low 4 12)" in front
    assert any(name.startswith(f"{dataset} best accuracy ({DATA_SETS[dataset].best_tier}") for name in front)
    for name, (published, simulated) in front.items():
        if " accuracy " in name:
            assert simulated == pytest.approx(published, abs=0.02)
        elif " latency_ms " in name or name.endswith("tokens mean"):
            assert simulated == pytest.approx(published, rel=0.02)
        else:
            assert simulated == published
            assert name.endswith(("least", "most"))
    for name, (published, simulated) in report("240").items():  # the same configurations stand in the other grid
        if name.startswith(f"{dataset} ") and "latency_ms" in name:
            assert simulated == pytest.approx(published, rel=0.03)


def test_vision_tokens_are_up_to_five_percent_fewer_than_144_for_each_crop_and_one_more() -> None:
    share = records("240")["num_vision_tokens"] / ((records("240")["max_crops"] + 1) * 144)
    assert 0.948 < share.min() < 0.96  # type: ignore[operator]
    assert 0.99 < share.max() <= 1  # type: ignore[operator]
    for tier, (least, most) in TIERS.items():
        crops = records("tiers").filter(tier=tier)["num_vision_tokens"] / 144 - 1
        assert crops.is_between(0.95 * (least + 1) - 1.01, most).all()
        assert set(range(least, most + 1)) == set(crops.ceil().cast(pl.Int64))


def test_the_first_token_comes_with_the_prefill_and_no_step_depends_on_its_position() -> None:
    rows = records("tiers")
    decode = (rows["num_output_tokens"] - 1) * rows["step_ms"]
    assert (rows["decode_ms"] - decode).abs().max() < 1e-3  # type: ignore[operator]
    assert (rows["latency_ms"] - rows["vision_ms"] - rows["prefill_ms"] - rows["decode_ms"]).abs().max() < 1e-3  # type: ignore[operator]
    assert abs(np.corrcoef(rows["num_output_tokens"], rows["step_ms"])[0, 1]) < 0.02
    assert rows["vision_ms"].min() > 0  # type: ignore[operator]


def test_removing_blocks_by_hand() -> None:
    a, b = BLOCK_LOSS[3], BLOCK_LOSS[9]
    assert blocks_lost(()) == 0
    assert blocks_lost((3, 9)) == pytest.approx(0.627 * (1 - (1 - a / 0.627) * (1 - b / 0.627)))
    assert blocks_lost((0, 1, 2, 3)) == pytest.approx(0.627)  # nothing is left to lose
    assert BLOCK_LOSS.argmax() == 0


@pytest.mark.parametrize("grid", GRIDS)
def test_table_and_records_are_one_draw(grid: str) -> None:
    config = CalibratedConfig(grid=grid, samples=40, seed=3, **NARROW)
    table, rows = simulate_calibrated(config), calibrated_records(config)
    assert table.digest == simulate_calibrated(config).digest
    assert rows.height == table.accuracy.numel() == 3 * 40 * int(np.prod(table.knob_sizes))
    assert table.name == "simulated-text_vqa+coco_vqa+okvqa"
    assert "simulated, not measured" in table.notes[0]
    widths = {name: block.shape[1] for name, block in table.features.items()}
    assert widths == {"image_features": 6, "language_features": 9}
    for row, column in ((0, 0), (57, 11), (119, table.num_configurations - 1)):
        sample = {"dataset": table.datasets[row], "sample_id": int(table.sample_ids[row])}
        cell = rows.filter(pl.lit(True), **sample, **table.configuration(column))
        assert cell["accuracy"].item() == pytest.approx(table.accuracy[row, column].item())
        assert cell["latency_ms"].item() == pytest.approx(table.latency_ms[row, column].item(), rel=1e-5)
    assert set(table.accuracy.unique().tolist()) <= {np.float32(level) for level in (0, 0.3, 0.6, 0.9, 1)}


def test_what_is_drawn_besides_changes_nothing() -> None:
    whole = simulate_calibrated(CalibratedConfig(grid="27", samples=30, **NARROW))
    alone = simulate_calibrated(CalibratedConfig(("okvqa",), grid="27", samples=30, image_width=0, language_width=4))
    assert (alone.name, alone.datasets) == ("simulated-okvqa", ())
    assert torch.equal(alone.accuracy, whole.accuracy[60:])
    assert torch.equal(alone.latency_ms, whole.latency_ms[60:])
    assert list(alone.features) == ["language_features"]
    okvqa: dict[str, Any] = {"datasets": ("okvqa",), "grid": "27", "samples": 30, **NARROW}
    other = simulate_calibrated(CalibratedConfig(**okvqa, seed=1))
    assert not torch.equal(alone.latency_ms, other.latency_ms)
    both, prefill = (
        simulate_calibrated(CalibratedConfig(**okvqa, latency=stage)).latency_ms
        for stage in ("vision_prefill", "prefill")
    )
    assert (alone.latency_ms > both).all()
    assert (both > prefill).all()


def test_features_tell_sizes_and_as_much_of_the_rest_as_they_should() -> None:
    """Share of variance that least squares on the features explains in samples not fitted on."""

    def explained(signal: float) -> dict[str, float]:
        config = CalibratedConfig(("text_vqa",), 3000, "27", image_width=150, language_width=150, signal=signal)
        table, rows = simulate_calibrated(config), calibrated_records(config)
        x = torch.cat([torch.ones(3000, 1), *table.features.values()], 1).double()
        first = rows.head(3000)
        outcomes = {
            "text": torch.from_numpy(first["num_language_tokens"].log().to_numpy().copy()),
            "accuracy": table.accuracy.double().mean(1),
            "length": torch.from_numpy(first["num_output_tokens"].cast(pl.Float64).log().to_numpy().copy()),
        }
        shares = {}
        for name, y in outcomes.items():
            fitted = torch.linalg.lstsq(x[:2000], y[:2000, None]).solution
            left = y[2000:] - (x[2000:] @ fitted).squeeze(1)
            shares[name] = 1 - float(left.square().mean() / y[2000:].var())
        return shares

    nothing, half, all_of_it = explained(0.0), explained(0.5), explained(1.0)
    assert min(nothing["text"], half["text"]) > 0.9
    for name in ("accuracy", "length"):
        assert nothing[name] < 0.02
        assert nothing[name] + 0.15 < half[name] < all_of_it[name] - 0.15
        assert all_of_it[name] < 0.9  # what is drawn of an outcome shows in no feature
    assert half["accuracy"] < 0.5


def test_data_sets_share_the_encoder_and_each_has_an_offset() -> None:
    config = CalibratedConfig(("text_vqa", "okvqa"), 2000, "27", image_width=40, language_width=0)
    first, second = simulate_calibrated(config).features["image_features"].split(2000)
    # four latents in forty columns of noise: both spread in the same directions
    spread = [torch.cov(block.T.double()) - 4 * torch.eye(40, dtype=torch.float64) for block in (first, second)]
    assert torch.corrcoef(torch.stack([part.flatten() for part in spread]))[0, 1] > 0.95
    offset = (first.mean(0) - second.mean(0)).double()
    assert offset.std().item() == pytest.approx(0.5**0.5, rel=0.3)


def test_samples_differ_in_what_suits_them_and_agree_on_right_answers() -> None:
    table = simulate_calibrated(CalibratedConfig(("text_vqa",), 500, "27", **NARROW))
    cheap, dear = table.accuracy[:, 0], table.accuracy[:, table.find(torch.tensor([2, 1, 2]))]
    assert 0.02 < (cheap > dear).float().mean() < 0.2
    assert dear.mean() > cheap.mean() + 0.2
    # what annotators agree on is the same for all right answers of a sample
    right = table.accuracy.amax(1, keepdim=True)
    assert torch.where(table.accuracy == 0, right, table.accuracy).std(1).max() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datasets": ("doc_qa",)}, "datasets.*text_vqa, coco_vqa, okvqa"),
        ({"datasets": ()}, "datasets"),
        ({"datasets": ("okvqa", "okvqa")}, "each once"),
        ({"grid": "28"}, "grid='28'.*240, 27, tiers"),
        ({"latency": "decode"}, "latency"),
        ({"samples": 0}, "samples=0: must be at least 1"),
        ({"image_width": -1}, "image_width"),
        ({"seed": -1}, "seed"),
        ({"signal": 1.5}, "signal"),
    ],
)
def test_a_mistake_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate_calibrated(CalibratedConfig(**change))  # type: ignore[arg-type]
