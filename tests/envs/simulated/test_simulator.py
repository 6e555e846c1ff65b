import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from torch import Tensor

from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets, log_ms
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.simulated.kinds import BASE_MS, KINDS, Kind, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.experiments.command_line.compose import field_docs, read_settings
from knobwise.experiments.settings.profiles import SimulatedProfile, read_profile

EFFECTS = ("difficulty", "accuracy_interaction", "accuracy_noise", "size", "latency_interaction", "latency_noise")
PLAIN = Kind("Nothing but compute.", 3, (Knob("level", (1, 2, 3)),), **dict.fromkeys(EFFECTS, 0.0))  # type: ignore[arg-type]
SIZES = (1000, 1300, 300, 800, 600, 600, 150, 600, 500, 600, 800), (12, 82, 37, 24, 24, 24, 24, 24, 10, 24, 240)
SHAPES = dict(zip(KINDS, zip(*SIZES, strict=True), strict=True))


def made(kind: str, samples: int | None = None, seed: int = 0) -> ProfileTable:
    return simulate(SimulatedConfig(kind, samples, seed))


def simulated(monkeypatch: pytest.MonkeyPatch, samples: int | None = None, **changes: object) -> ProfileTable:
    """A table of the plain kind with some of its parameters changed."""
    monkeypatch.setitem(KINDS, "plain", Kind(**{**vars(PLAIN), **changes}))  # type: ignore[arg-type]
    return made("plain", samples)


def kurtosis(values: Tensor) -> float:
    """3 for a normal variable."""
    values = values[values.isfinite()].double()
    centred = values - values.mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def residuals(table: ProfileTable) -> Tensor:
    """Log-latencies without the means of configurations and samples."""
    logs = log_ms(table.latency_ms)
    logs = logs - logs.nanmean(0)
    return logs - logs.nanmean(1, keepdim=True)


def headroom(table: ProfileTable) -> float:
    """Utility of the oracle less that of budget-aware static on the test part, mean over the default budgets."""
    split, budgets = table.split(), default_budgets(table)
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    choosers = Oracle(table, split.test), BudgetAwareStatic(table, split.train)
    oracle, static = (float(judge(c, table, split.test, budgets, rewards).utility.mean()) for c in choosers)
    return oracle - static


def explained(table: ProfileTable, model: Any) -> float:
    """Share of the variance of accuracy and log-latency within a configuration that a regressor of scikit-learn
    predicts on the test part, mean over the two and over every eighth configuration."""
    split, columns = table.split(), slice(0, None, 8)
    normalised = FeatureNormaliser.fit(table, split.train)(table.features)
    scores = []
    for measured in (table.accuracy[:, columns], log_ms(table.latency_ms[:, columns])):
        filled = torch.where(measured.isnan(), measured[split.train].nanmean(0), measured)
        model.fit(normalised[split.train].numpy(), filled[split.train].numpy())
        scores.append(float(model.score(normalised[split.test].numpy(), filled[split.test].numpy())))
    return sum(scores) / 2


def test_accuracy_and_latency_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    table = simulated(monkeypatch, base=0.0, gain=2.0, latency_range=math.log(4))
    # saturating(p) = 1 − exp(−3p) over its largest value at p = 0, ½, 1: 0, .817574, 1, of mean .605858
    expected = [1 / (1 + math.exp(-2 * (q - 0.605858))) for q in (0, 0.817574, 1)]
    assert table.accuracy.tolist() == [pytest.approx(expected, abs=1e-5)] * 3
    assert table.latency_ms.tolist() == [pytest.approx([BASE_MS, 2 * BASE_MS, 4 * BASE_MS])] * 3


@pytest.mark.parametrize("bend", [0.0, 1.0])
def test_effects_have_the_standard_deviations_that_they_are_given(bend: float, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = (Knob("model", tuple("abcdefgh")),)
    plain = {"samples": 20_000, "knobs": knobs, "gain": 0.0, "latency_range": 0.0, "bend": bend}

    def spread(name: str, value: float) -> float:
        table = simulated(monkeypatch, **plain, **{name: value})  # type: ignore[arg-type]
        effect = log_ms(table.latency_ms) if name.startswith(("size", "latency")) else table.accuracy.logit()
        return float(effect.double().var(0).mean().sqrt())  # over samples, root mean square over configurations

    for name in EFFECTS:
        assert spread(name, 0.5) == pytest.approx(0.5, rel=0.03)


def test_an_interaction_favours_no_configuration_over_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    table = simulated(monkeypatch, samples=5000, accuracy_interaction=1.0, gain=0.0)
    logits = table.accuracy.logit()
    assert logits.mean(1).std() < 1e-4  # the vectors of the configurations are centred
    assert logits.mean(0) == pytest.approx(PLAIN.base, abs=0.1)


def test_labels_are_draws_with_the_probability_that_a_quality_states(monkeypatch: pytest.MonkeyPatch) -> None:
    quality, labels = (simulated(monkeypatch, samples=20_000, labels=drawn) for drawn in (False, True))
    assert set(labels.accuracy.unique().tolist()) == {0.0, 1.0}
    assert labels.accuracy.mean(0) == pytest.approx(quality.accuracy.mean(0), abs=0.02)


def test_hidden_and_signal_are_what_features_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the variance of a linear effect that a linear regression on many clean features explains."""
    plain = {"samples": 4000, "size": 1.0, "bend": 0.0, "blocks": (("x", 30),), "informative": 1.0}

    def share(**changes: float) -> float:
        table = simulated(monkeypatch, **{**plain, **changes})
        x = torch.nn.functional.normalize(table.features["x"].double() - table.features["x"].double().mean(0), dim=0)
        y = log_ms(table.latency_ms[:, :1].double())
        y = y - y.mean()
        return float(1 - (y - x @ torch.linalg.lstsq(x, y).solution).square().sum() / y.square().sum())

    assert share(hidden=0.0, signal=1.0) > 0.97
    assert share(hidden=0.4, signal=1.0) == pytest.approx(0.6, abs=0.05)
    assert share(hidden=0.0, signal=0.0) < 0.03
    assert 0.1 < share(hidden=0.0, signal=0.2) < 0.9


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), samples=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_the_same_config_gives_the_same_table(kind: str, samples: int, seed: int) -> None:
    table, state = made(kind, samples, seed), torch.get_rng_state()
    again = made(kind, samples, seed)
    assert table.digest == again.digest != made(kind, samples, seed + 1).digest
    assert torch.equal(state, torch.get_rng_state())
    assert table.num_samples == samples
    assert {name: block.shape for name, block in table.features.items()} == {
        name: (samples, width) for name, width in KINDS[kind].blocks
    }
    for k, knob in enumerate(table.knobs):  # no value is without a configuration
        assert table.configurations[:, k].unique().tolist() == list(range(len(knob.values)))


@settings(max_examples=8, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), fewer=st.integers(1, 40), more=st.integers(0, 40))
def test_more_samples_leave_the_first_ones_as_they_are(kind: str, fewer: int, more: int) -> None:
    small, large = made(kind, fewer), made(kind, fewer + more)
    both = small.mask & large.mask[:fewer]
    assert torch.equal(small.accuracy[both], large.accuracy[:fewer][both])
    assert torch.equal(small.latency_ms[both], large.latency_ms[:fewer][both])
    for name, block in small.features.items():
        assert torch.equal(block.nan_to_num(-1), large.features[name][:fewer].nan_to_num(-1))
    assert torch.equal(small.configurations, large.configurations)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sizes_names_and_questions(kind: str) -> None:
    table = made(kind)
    assert (table.num_samples, table.num_configurations) == SHAPES[kind]
    assert table.name == f"simulated-{kind}"
    assert "not measured" in table.notes[0]
    assert KINDS[kind].question.endswith("?")
    assert all(len(part) for part in table.split())
    is_label = (table.accuracy[table.mask] == 0) | (table.accuracy[table.mask] == 1)
    assert bool(is_label.all()) == (kind in ("router", "noisy_labels", "wide_knobs"))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"portfolio"}))
def test_more_compute_helps_on_average_and_not_always(kind: str) -> None:
    table = made(kind)
    accuracy, latency = table.accuracy.nanmean(0), log_ms(table.latency_ms).nanmean(0)
    assert torch.corrcoef(torch.stack([accuracy, latency]))[0, 1] > 0.5
    worse = table.accuracy[:, latency.argmax()] < table.accuracy[:, latency.argmin()]
    same_for_all = kind in ("no_headroom", "low_headroom")
    assert worse.float().mean() < 0.02 if same_for_all else 0.05 < worse.float().mean() < 0.4


def test_what_is_missing_and_how_features_look() -> None:
    sizes = {kind: math.prod(made(kind).knob_sizes) for kind in ("encoder", "wide_knobs")}
    assert sizes == {"encoder": 120, "wide_knobs": 240}
    for kind, parameters in KINDS.items():
        table = made(kind)
        assert 1 - table.mask.double().mean() == pytest.approx(parameters.unprofiled, abs=0.01)
        joined = torch.cat(list(table.features.values()), 1)
        missing = joined.isnan().double()
        assert float(missing.mean()) == pytest.approx(parameters.missing, abs=0.01)
        assert int((missing.sum(0) > 0).sum()) == (joined.shape[1] // 3 if parameters.missing else 0)
        tails = [kurtosis(column) for column in joined.T]
        assert max(tails) > 10
        assert sum(tail < 4 for tail in tails) > len(tails) / 3
    assert set(made("wide_knobs").features) == {"image_features", "language_features"}


def test_heavy_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    table = simulated(monkeypatch, samples=20_000, latency_noise=1.0, tail=0.5)  # ProfileTable checks it too
    assert table.latency_ms.isfinite().all()
    assert kurtosis(made("heavy_tails").latency_ms) > 500
    assert kurtosis(residuals(made("heavy_tails"))) > 15
    portfolio = made("portfolio").latency_ms
    assert portfolio[portfolio.isfinite()].quantile(0.99) > 100 * portfolio[portfolio.isfinite()].quantile(0.1)
    for kind in ("router", "few_samples", "unattainable"):
        assert kurtosis(residuals(made(kind))) < 6


@pytest.mark.parametrize("seed", [0, 1])
def test_headroom(seed: int) -> None:
    gains = {kind: headroom(made(kind, seed=seed)) for kind in KINDS if kind != "wide_knobs"}
    assert gains["no_headroom"] < 0.06
    assert gains["no_headroom"] < gains["low_headroom"] < 0.13
    assert all(gain > 0.2 for kind, gain in gains.items() if not kind.endswith("headroom"))


def test_what_the_features_tell() -> None:
    kinds = ("router", "encoder", "weak_features", "no_headroom")
    share = {kind: explained(made(kind), Ridge(alpha=100)) for kind in kinds}
    assert min(share["router"], share["encoder"]) > 0.25
    assert share["no_headroom"] < 0.02
    assert share["no_headroom"] < share["weak_features"] < 0.15


def test_lines_and_trees_each_have_a_kind_that_suits_them() -> None:
    def lead_of_trees(kind: str) -> float:
        forest = RandomForestRegressor(20, min_samples_leaf=4, max_features=1 / 3, random_state=0)
        return explained(made(kind), forest) - explained(made(kind), Ridge(alpha=100))

    assert lead_of_trees("encoder") < -0.05
    assert lead_of_trees("wide_knobs") > 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_budgets_that_cannot_be_kept_and_budgets_that_can(seed: int) -> None:
    """The share of feasible requests that the configuration which keeps a budget most often keeps."""

    def kept(kind: str) -> Tensor:
        table = made(kind, seed=seed)
        budgets = default_budgets(table)
        met = table.latency_ms.unsqueeze(-1) <= budgets
        feasible = met.any(1)
        assert (feasible.double().mean(0) > 0.7).all()
        return (met & feasible.unsqueeze(1)).sum(0).amax(0) / feasible.sum(0)

    assert (kept("unattainable")[:4] < 0.9).all()
    assert (kept("no_headroom") > 0.98).all()


def test_as_a_profile_of_the_command_line() -> None:
    words = ["profile=simulated", "profile.kind=few_samples", "profile.seed=3", "profile.samples=20"]
    profile = read_settings("inspect", words).profile
    assert isinstance(profile, SimulatedProfile)
    assert read_profile(profile).digest == made("few_samples", 20, 3).digest
    assert all(kind in field_docs(SimulatedProfile)["kind"] for kind in KINDS)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"seed": -1}, {"kind": "easy"}])
def test_a_mistake_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"profile.{next(iter(wrong))}") as caught:
        simulate(SimulatedConfig(**wrong))  # type: ignore[arg-type]
    if "kind" in wrong:
        assert all(kind in str(caught.value) for kind in KINDS)
