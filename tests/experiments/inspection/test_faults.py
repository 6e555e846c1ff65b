"""Faults of a profile: each is noticed on a small table, and a sound one raises no alarm."""

import ast
import inspect
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error, repeated, small_table, table_of, two_kinds
from rich.console import Console

from campaign.profiles.faults import (
    NOTICED_BY,
    a_latency,
    another_machine,
    features_shifted,
)
from campaign.profiles.written import (
    all_in_microseconds,
    numbered,
    value_on_another_machine,
    values_reversed,
)
from knobwise.envs.readers.long_table import long_frame, table_from_frame
from knobwise.envs.tables.columns import Column
from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.inspection.cell_checks import capped
from knobwise.experiments.inspection.checks import (
    CHECKS,
    FAULT,
    faults_of,
    findings_by_check,
    warnings_of,
)
from knobwise.experiments.inspection.facts import inspect_table
from knobwise.experiments.inspection.measured import (
    Finding,
    Measured,
    correlations,
    gaps_of,
    numbers_of,
    ridge_residuals,
)
from knobwise.experiments.report.inspection import print_inspection


def sound_table(seed=0, **options):
    """A small table whose features do not repeat each other."""
    table = small_table(250, seed=seed, **options)
    image, language = table.features.values()
    return replace(table, features={"x": torch.cat([image, language[:, :1]], 1)})


@pytest.fixture(scope="module")
def sound():
    return sound_table()


def test_equal_repeats_of_few_cells_say_nothing_of_the_timer(sound):
    once = torch.full_like(sound.latency_ms, torch.nan)
    repeats_ms = torch.stack([sound.latency_ms, once], -1)
    for cells, noticed in ((1, 0), (9, 0), (40, 1)):
        repeats_ms[:cells, 0, 1] = sound.latency_ms[:cells, 0]
        twice = replace(sound, repeats_ms=repeats_ms.clone())
        findings = findings_by_check(twice)["equal_repeats"]
        assert len(findings) == noticed
    assert "In 40 of 40 cells" in str(findings[0])


def with_repeats(factors, jitter=0.05, ordered=True, samples=480, seed=0):
    """Samples × 3 settings, measured once for each of these factors, in their order or by size."""
    draws = np.random.default_rng(seed)
    level = draws.uniform(0.7, 1.7, (samples, 1, 1)) * np.array([50.0, 100.0, 200.0])[:, None]
    times = level * np.exp(jitter * draws.standard_normal((samples, 3, len(factors)))) * factors
    times = times if ordered else np.sort(times)
    right = (draws.random((samples, 3)) < 0.7).astype(np.float32)
    return table_of(torch.from_numpy(right), torch.from_numpy(times).float())


@pytest.mark.parametrize(
    ("factors", "ordered", "said"),
    [
        ((1.4, 1, 1), True, "The first repeat of a cell takes 1.40 times"),
        ((1, 1.4, 1), True, "The second repeat of a cell takes 1.40 times"),
        ((1, 1, 0.7), True, "The third repeat of a cell takes 0.70 times"),
        ((1.25, 1), True, "The first repeat of a cell takes 1.25 times"),
        # sorted by size, or as if they were, only the gap shows it
        ((1, 1.25), True, "In each cell 1 of 2 repeats take 1.25 times"),
        ((1, 1, 2), False, "In each cell 1 of 3 repeats take 1."),
        ((1, 2, 2), False, "In each cell 2 of 3 repeats take 1."),
        ((1.05, 1, 1), True, ""),
        ((1, 1, 1), True, ""),
        ((1, 1, 1), False, ""),
    ],
)
def test_repeats_of_one_number_that_are_slower_throughout(factors, ordered, said):
    findings = findings_by_check(with_repeats(factors, ordered=ordered))["later_repeats"]
    assert len(findings) == bool(said)
    assert all(str(finding).startswith(said) for finding in findings)


NOISE = {
    "normal": lambda draws, shape: 0.3 * draws.standard_normal(shape),
    "heavy": lambda draws, shape: (0.1 * draws.standard_cauchy(shape)).clip(-9, 9),
    "two kinds": lambda draws, shape: 0.7 * (draws.random(shape) < 0.4),
    "rare": lambda draws, shape: 3.0 * (draws.random(shape) < 0.05) + 0.01 * draws.random(shape),
    "uniform": lambda draws, shape: draws.random(shape),
    "exponential": lambda draws, shape: draws.exponential(1, shape),
    # all settings of a sample were measured in one go
    "by sample": lambda draws, shape: (
        0.1 * draws.standard_normal(shape) + draws.standard_normal((shape[0], 1, shape[2]))
    ),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_random_repeats_raise_no_alarm(noise):
    for seed in range(120):
        draws = np.random.default_rng(seed)
        shape = (int(draws.choice([4, 12, 25, 100])), int(draws.choice([1, 3, 8])), 2 + seed % 4)
        times = 100 * np.exp(noise(draws, shape))
        if seed % 3 == 0:
            times[..., 1:][draws.random(shape)[..., 1:] < 0.1] = np.nan
        times = np.sort(times) if seed % 2 or seed % 3 == 0 else times
        table = table_of(torch.ones(shape[:2]), torch.from_numpy(times).float())
        assert findings_by_check(table)["later_repeats"] == [], seed


@pytest.mark.parametrize("seed", range(3))
def test_sound_tables_raise_no_alarm(seed):
    table = sound_table(seed)
    for sound in (table, sound_table(seed, holes=0.3), repeated(table)):
        assert faults_of(sound) == []


@pytest.mark.parametrize(
    "fault",
    [fault for fault in NOTICED_BY if fault is not another_machine],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_noticed_by_its_check(fault, sound):
    faulty = fault(sound, np.random.default_rng(1))
    noticed = {name for name, faults in findings_by_check(faulty).items() if faults}
    assert noticed & {*NOTICED_BY[fault].split(", ")}


def with_failures(cost, unit="ms", share=0.08, right=0.0):
    """300 samples × (small, large), of which some of large cost this, with this accuracy."""
    draws = np.random.default_rng(2)
    accuracy = draws.random((300, 1)) < [0.5, 0.9]
    costs = [80.0, 300.0] * draws.uniform(0.7, 1.4, (300, 2))
    failed = (draws.random((300, 2)) < share) & [False, True]
    accuracy = np.where(failed, right, accuracy)
    costs = np.where(failed, cost, costs)
    knobs = (Knob("model", ("small", "large")),)
    cells = (torch.from_numpy(values).float() for values in (accuracy, costs))
    return table_of(*cells, knobs=knobs, unit=unit), int(failed.sum())


@pytest.mark.parametrize(("unit", "costs"), [("ms", "latencies"), ("USD", "costs")])
def test_failures_that_cost_nothing_are_to_be_late_and_wrong(unit, costs):
    table, count = with_failures(0.0, unit)
    (said,) = [text for text in warnings_of(table) if f"{costs} are 0" in text]
    assert said.startswith(f"{count} {costs} are 0, all with model=large, where {count} ")
    assert "accuracy 0" in said
    # whoever leaves out what failed makes its configuration look better
    assert not any("eave out" in text for text in warnings_of(table))


def test_failures_at_once_are_named_whatever_the_unit():
    for unit in ("ms", "tokens"):
        table, count = with_failures(1.0, unit)
        (fault,) = findings_by_check(table)["failed_cells"]
        assert fault.what.startswith(f"{count} answers, all with model=large ")
        assert "accuracy 0" in fault.advice
        # quick answers that are right are none
        table, _ = with_failures(1.0, unit, right=1.0)
        assert findings_by_check(table)["failed_cells"] == []


def test_the_configuration_that_lacks_cells_is_named():
    table, _ = with_failures(1.0)
    cells = table.accuracy.clone(), table.latency_ms.clone()
    for values in cells:
        values[:30, 1] = torch.nan
    few = table_of(*cells, knobs=table.knobs)
    (fault,) = findings_by_check(few)["missing_configurations"]
    assert fault.what == "Of 30 cells that are missing, 30 are of model=large"
    # large was never tried on the data set of these samples
    other = replace(few, datasets=("a",) * 30 + ("b",) * 270)
    assert findings_by_check(other)["missing_configurations"] == []
    # which cells were drawn to be measured is no failure
    drawn = replace(few, sampling_weight=torch.ones(300, 2))
    assert findings_by_check(drawn)["missing_configurations"] == []


@pytest.mark.parametrize("seed", range(5))
def test_cells_that_are_missing_by_chance_name_no_configuration(seed):
    # some samples lack many cells, others none
    sound = small_table(300, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(300, 1, generator=generator) ** 3
    lost = torch.rand(300, 12, generator=generator) < share
    lost[:, 0] &= ~lost[:, 1:].all(1)
    cells = (v.masked_fill(lost, torch.nan) for v in (sound.accuracy, sound.latency_ms))
    table = table_of(*cells, knobs=sound.knobs, configurations=sound.configurations)
    assert findings_by_check(table)["missing_configurations"] == []


def test_answers_of_cost_0_that_are_right_did_not_fail():
    advice = {}
    for unit in ("ms", "USD"):
        table, _ = with_failures(0.0, unit, right=1.0)
        (fault,) = findings_by_check(table)["costs_of_zero"]
        advice[unit] = fault.advice
    assert "Leave out" in advice["ms"]
    assert "cache" in advice["USD"]


def test_a_free_configuration_and_a_coarse_timer_are_no_fault():
    table, _ = with_failures(0.0, "USD", share=2.0)
    assert findings_by_check(table)["costs_of_zero"] == []
    draws = np.random.default_rng(0)
    steps = torch.from_numpy(draws.integers(0, 40, (300, 3))).float()
    accuracy = torch.ones(300, 3)
    coarse = table_of(accuracy, 10 * steps)
    assert (coarse.latency_ms == 0).any()
    assert findings_by_check(coarse)["costs_of_zero"] == []
    # wrong answers in no time are not fast ones
    failed = table_of(accuracy * (steps > 0), 10 * steps)
    assert len(findings_by_check(failed)["costs_of_zero"]) == 1


def priced():
    """Accuracies and costs of 300 samples × 2 models, each of its own price for long inputs."""
    draws = np.random.default_rng(0)
    hard = draws.random((300, 1))
    accuracy = (hard < [0.5, 0.9]).astype(float)
    costs = [80.0, 300.0] * (0.5 + hard) * draws.uniform(0.7, 1.4, (300, 2))
    return draws, accuracy, costs


def checks_of(accuracy, costs, unit="tokens", features=None):
    """What is noticed, by check; nothing for most."""
    knobs = (Knob("model", ("small", "large")),)
    cells = (torch.from_numpy(values).float() for values in (accuracy, costs))
    table = replace(table_of(*cells, knobs=knobs, unit=unit), features=features or {})
    return {name: faults for name, faults in findings_by_check(table).items() if faults}


@pytest.mark.parametrize("unit", ["tokens", "USD"])
@pytest.mark.parametrize("flat", ["neither", "large", "both"])
def test_failures_of_cost_0_are_all_that_is_noticed(unit, flat):
    draws, accuracy, costs = priced()
    if flat != "neither":
        costs[:, 1] = 900.0
    if flat == "both":
        costs[:, 0] = 90.0
    assert checks_of(accuracy, costs, unit) == {}
    failed = (draws.random((300, 2)) < 0.08) & [False, True]
    noticed = checks_of(np.where(failed, 0, accuracy), np.where(failed, 0, costs), unit)
    assert set(noticed) == {"costs_of_zero"}
    (fault,) = noticed["costs_of_zero"]
    assert fault.what.startswith(f"{failed.sum()} ")
    assert "model=large" in fault.what


@pytest.mark.parametrize(("cost", "check"), [(0.0, "costs_of_zero"), (2.0, "failed_requests")])
def test_samples_that_fail_with_every_model_are_noticed_whatever_the_unit(cost, check):
    draws, accuracy, costs = priced()
    failed = draws.random((300, 1)) < 0.08
    cells = np.where(failed, 0, accuracy), np.where(failed, cost * draws.random((300, 2)), costs)
    for unit in ("tokens", "USD"):
        noticed = checks_of(*cells, unit)
        assert set(noticed) == {check}
        count = failed.sum() if check == "failed_requests" else 2 * failed.sum()
        assert noticed[check][0].what.startswith(f"{count} ")


def test_answers_cut_at_a_number_of_tokens_may_be_right():
    _, accuracy, costs = priced()
    cut = np.minimum(costs, 400)
    (fault,) = checks_of(accuracy, cut)["capped"]
    assert "accuracy 0" not in fault.advice
    (fault,) = checks_of(accuracy, cut, "ms")["capped"]
    assert "accuracy 0" in fault.advice


def test_a_price_that_the_input_fixes_is_no_outcome():
    draws, accuracy, _ = priced()
    prompt = 20 + 300 * draws.random((300, 1))
    features = {"x": torch.from_numpy(prompt).float()}
    assert checks_of(accuracy, prompt * [1, 4], features=features) == {}
    # the price of one model, which depends on its answer
    costs = prompt * draws.uniform(0.5, 2, (300, 2))
    leak = {"x": torch.from_numpy(np.log(costs).mean(1, keepdims=True)).float()}
    assert "copied_outcomes" in checks_of(accuracy, costs, features=leak)


@pytest.mark.parametrize("factor", [1e-5, 1e8])
def test_latencies_that_are_hardly_milliseconds_are_noticed(sound, factor):
    faults = findings_by_check(replace(sound, latency_ms=sound.latency_ms * factor))
    assert any("The median latency" in str(fault) for fault in faults["usual_time"])


def test_configurations_of_another_machine_are_noticed():
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(2))
    noise = 0.1 * torch.randn(60, 32)
    latency_ms = (grid.float() @ torch.tensor([0.4, 0.2, 0.1]) + noise).exp()
    knobs = Knob("a", (0, 1, 2, 3)), Knob("b", (0, 1, 2, 3)), Knob("c", (0, 1))
    table = table_of(torch.ones(60, 32), latency_ms, knobs=knobs, configurations=grid)
    assert not findings_by_check(table)["other_machine"]
    slower = torch.where(torch.rand(32) < 0.3, 2.0, 1.0)
    table = replace(table, latency_ms=latency_ms * slower)
    (fault,) = findings_by_check(table)["other_machine"]
    assert fault.what.startswith(f"{int((slower > 1).sum())} of 32")


def test_every_check_has_an_instance():
    named = {name for names in NOTICED_BY.values() for name in names.split(", ")}
    named.add("features_in_units")  # below
    assert named == {check.name for check in CHECKS if check.kind == FAULT}


def test_a_check_is_one_short_function_with_a_sentence():
    for check in CHECKS:
        (function,) = ast.parse(inspect.getsource(check.notices)).body
        # without comments and docstring
        body = [
            node
            for node in function.body
            if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Yield | ast.YieldFrom)
        ]
        lines = "\n".join(
            ast.get_source_segment(inspect.getsource(check.notices), node) for node in body
        ).splitlines()
        code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
        assert 0 < len(code) < 30, check.name
        assert check.sentence
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_what_is_certain_stands_before_what_is_likely(sound, capsys):
    latency = sound.latency_ms.clone()
    latency[3, 4] = 0.0
    flat = {"x": torch.cat([sound.features["x"], torch.ones(250, 1)], 1)}
    facts = inspect_table(replace(sound, latency_ms=latency * 20_000, features=flat))
    sure = {finding["sure"]: finding["text"] for finding in facts["findings"]}
    assert {*sure} == {"certain", "nearly certain", "perhaps"}
    assert {*sure.values()} <= {*facts["faults"], *facts["warnings"]}
    print_inspection(facts, Console(width=400))
    text = capsys.readouterr().out
    parts = ["\nCertain\n", sure["certain"], sure["nearly certain"], "\nLikely\n", sure["perhaps"]]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_only_a_measured_latency_among_the_features_is_refused(sound):
    draws = np.random.default_rng(0)
    with input_error(r"further\[0\]"):
        warnings_of(a_latency(sound, draws))
    for fault in NOTICED_BY.keys() - {a_latency}:
        assert isinstance(warnings_of(fault(sound, draws)), list), fault


def test_training_warns_where_there_are_no_features(sound):
    (warning,) = warnings_of(replace(sound, features={}))
    assert "profile.features" in warning
    assert warnings_of(sound) == []


def test_the_order_that_features_are_in_is_named(sound):
    shifted = features_shifted(sound, np.random.default_rng(0))
    (fault,) = findings_by_check(shifted)["order_of_features"]
    assert fault.sure == "nearly certain"


def test_tables_of_any_shape_are_looked_at():
    few = table_of([[1.0, 0.0]], [[5.0, 6.0]], torch.ones(1, 1))
    bare = replace(two_kinds(120, shown=True), features={})
    holes = small_table(60, holes=0.9)
    alone = table_of(torch.ones(30, 1), torch.arange(1.0, 31).unsqueeze(1), torch.ones(30, 2))
    never = replace(small_table(40), features={"x": torch.full((40, 2), torch.nan)})
    for table in (few, bare, holes, alone, never):
        assert all(isinstance(fault, Finding) for fault in faults_of(table))


def test_left_out_residuals_are_those_of_fits_without_the_sample():
    from sklearn.linear_model import Ridge

    table = small_table(30)
    measured = Measured(table)
    x = measured.u * measured.s
    y = np.random.default_rng(0).normal(size=(30, 1))
    wanted = []
    for penalty in (1e-4, 1e-2, 1.0):
        # the mean of all rows is kept, as in the formula
        fitted = Ridge(penalty * 30).fit(x[1:], y[1:])
        wanted.append(y[0, 0] - fitted.predict(x[:1]).item())
    assert np.abs(ridge_residuals(measured, y)[0, 0] - wanted).min() < 1e-6


def test_correlations_are_over_the_known_rows():
    x = np.array([[1.0], [2.0], [3.0], [9.0]])
    t = np.array([[2.0, 5.0], [4.0, 5.0], [6.0, 5.0], [np.nan, 5.0]])
    with np.errstate(all="ignore"):
        assert correlations(x, t) == pytest.approx(np.array([[1.0, 0.0]]))


def test_groups_a_thousand_apart_with_nothing_between():
    values = np.log([[1, 1], [2, 20], [1000, 400], [2000, 8000]])
    parted, smaller = gaps_of(values, 1)
    assert parted.tolist() == [True, False]
    assert smaller[:, 0].tolist() == [True, True, False, False]
    assert numbers_of(torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])).tolist() == [0, 1, 0]


def test_columns_that_repeat_or_never_vary_are_counted():
    x = torch.randn(40, 3)
    blocks = {"a": torch.cat([x, torch.ones(40, 2)], 1), "b": x[:, :1]}
    table = replace(small_table(40), features=blocks)
    found = findings_by_check(table)
    (constant,) = map(str, found["constant_features"])
    (same,) = map(str, found["repeated_features"])
    assert "2 of 5" in constant
    assert same.startswith("1 ")


def test_faults_name_the_columns_of_features(sound):
    names = ("tokens", "leak", "twin", "flat")
    tokens = sound.features["x"][:, :1]
    columns = [tokens, sound.latency_ms[:, 1:2], tokens, torch.ones_like(tokens)]
    faulty = replace(
        sound,
        features={"features": torch.cat(columns, 1)},
        columns=tuple(Column(name, None, False) for name in names),
    )
    found = findings_by_check(faulty)
    (constant,) = map(str, found["constant_features"])
    (same,) = map(str, found["repeated_features"])
    assert ("flat" in constant, "twin" in constant) == (True, False)
    assert ("twin" in same, "flat" in same) == (True, False)
    assert "leak" in str(found["copied_outcomes"][0])


def test_drift_is_noticed_in_the_order_of_the_times(sound):
    # by id, slow samples stand anywhere; by time, all from one on
    draws = np.random.default_rng(0)
    measured_at = draws.permutation(sound.num_samples)
    slow = torch.from_numpy(measured_at >= 150)[:, None]
    latency_ms = sound.latency_ms * torch.where(slow, 3.0, 1.0)
    slower = replace(sound, latency_ms=latency_ms, features={})
    frame = long_frame(slower)
    row = pl.col("sample_id").replace_strict(dict(zip(sound.sample_ids, measured_at, strict=True)))
    minute = pl.datetime(2026, 1, 31) + pl.duration(minutes=row)
    frame = frame.with_columns(at=minute.dt.to_string())
    drift = []
    for rows, time in ((frame.drop("at"), None), (frame, "at")):
        table = table_from_frame(rows, name="t", time=time)
        drift.append(findings_by_check(table)["later_samples"])
    by_id, (fault,) = drift
    assert by_id == []
    first = sound.sample_ids[int(np.flatnonzero(measured_at == 150)[0])]
    assert f"From sample {first} on" in str(fault)


@pytest.mark.parametrize(
    ("check", "named"),
    [("later_samples", "q150 on"), ("other_version", "q150 on"), ("cold_start", "before q9 ")],
)
def test_drift_is_noticed_in_the_order_of_numbered_names(sound, check, named):
    # readers sort names as text: q10 stands before q2
    number = np.array(sorted(range(sound.num_samples), key=lambda each: f"q{each}"))
    ids = tuple(f"q{each}" for each in number)
    late = torch.from_numpy(number >= 150)[:, None]
    early = torch.from_numpy(number < 9)[:, None]
    changed = {
        "later_samples": {"latency_ms": sound.latency_ms * torch.where(late, 3.0, 1.0)},
        "other_version": {"accuracy": torch.where(late, 0.0, sound.accuracy)},
        "cold_start": {"latency_ms": sound.latency_ms * torch.where(early, 30.0, 1.0)},
    }
    faulty = replace(sound, sample_ids=ids, **changed[check])
    (fault,) = findings_by_check(faulty)[check]
    assert named in fault.what
    # by these names nothing is wrong with the sound one
    assert findings_by_check(replace(sound, sample_ids=ids))[check] == []


def test_the_knob_whose_values_were_reversed_is_named(sound):
    for place, knob in enumerate(sound.knobs):
        faulty = values_reversed(sound, np.random.default_rng(0), place)
        (fault,) = findings_by_check(faulty)["reversed_values"]
        # the rows that were drawn
        count = int((np.random.default_rng(0).uniform(size=250) < 0.5).sum())
        few = min(count, 250 - count)
        assert f"In {few} samples" in fault.what
        assert f"knob {knob.name} " in fault.what


def test_the_value_from_another_machine_is_named(sound):
    faulty = value_on_another_machine(sound, np.random.default_rng(0))
    (fault,) = findings_by_check(faulty)["value_elsewhere"]
    assert fault.what.startswith("max_crops=6 takes 0.4")


def test_a_knob_that_is_a_way_to_judge_is_named():
    """Two models, whose answers two filters take apart: they took the same time."""
    random = torch.Generator().manual_seed(0)
    of_models = torch.tensor([100.0, 300.0]) * (1 + torch.rand(40, 2, generator=random))
    knobs = (Knob("filter", ("strict", "flexible")), Knob("model", ("small", "large")))
    both = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    table = table_of(torch.rand(40, 4, generator=random).round(), of_models[:, both[:, 1]])
    table = replace(table, knobs=knobs, configurations=both)
    (fault,) = findings_by_check(table)["values_in_equal_times"]
    assert "knob filter" in fault.what
    assert "in 80 cells" in fault.what
    one_differs = table.latency_ms.clone()
    one_differs[7, 0] *= 1.001
    coarse = of_models.div(100).round()[:, both[:, 1]]
    for times in (one_differs, coarse):
        assert not findings_by_check(replace(table, latency_ms=times))["values_in_equal_times"]


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ((1, 2, 3, 4, 2), 4),  # the last one falls
        ((0.4, 2, 2.1, 2.2, 2.3), 0),  # a step unlike all others
        ((4, 3, 2, 1, 0.5), None),
        ((1, 2, 1, 2, 1), None),  # in no direction
        ((1, 1.1, 1.2, 1.3, 1.4), None),
    ],
)
def test_values_out_of_line(times, named):
    noise = 1 + 0.01 * torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    table = table_of(torch.ones(40, 5), torch.tensor(times) * noise)
    table = replace(table, knobs=(Knob("blocks", (4, 5, 6, 7, 8)),))
    found = [fault.what.split()[0] for fault in findings_by_check(table)["value_elsewhere"]]
    assert found == ([] if named is None else [f"blocks={4 + named}"])


def test_a_cold_configuration_is_named_with_its_factor(sound):
    factor = torch.ones(12)
    factor[7] = 30.0
    table = replace(sound, latency_ms=sound.latency_ms * factor)
    (fault,) = findings_by_check(table)["cold_configurations"]
    assert fault.what.split()[0] in {"29", "30", "31"}
    assert sound.label(7) in fault.what


def test_microseconds_are_hinted_at_where_they_would_be_minutes(sound):
    draws = np.random.default_rng(0)
    assert findings_by_check(all_in_microseconds(sound, draws))["usual_time"] == []
    slow = replace(sound, latency_ms=sound.latency_ms * 20)
    (fault,) = findings_by_check(all_in_microseconds(slow, draws))["usual_time"]
    assert "minutes" in fault.what


def test_the_feature_that_numbers_the_samples_is_named(sound):
    for seed in range(4):
        (fault,) = findings_by_check(numbered(sound, np.random.default_rng(seed)))[
            "numbers_of_samples"
        ]
        assert fault.what.startswith("Feature further[0] ")
    # the number in the id, where ids are not sorted by it
    ids = tuple(f"q{number}" for number in np.random.default_rng(0).permutation(1000)[:250])
    numbers = torch.tensor([float(each[1:]) for each in ids]).unsqueeze(1)
    table = replace(sound, sample_ids=ids, features={"id": numbers.square()})
    assert len(findings_by_check(table)["numbers_of_samples"]) == 1
    # some numbers of a larger range, in another order, may be anything
    table = replace(sound, features={"id": numbers})
    assert findings_by_check(table)["numbers_of_samples"] == []


def test_times_of_day_in_two_units_among_the_features(sound):
    seconds = 1.77e9 + 3600 * torch.rand(250, 1, dtype=torch.float64)
    mixed = torch.where(torch.arange(250)[:, None] % 2 == 0, seconds, 1000 * seconds)
    for column, count in ((seconds, 0), (mixed, 1)):
        table = replace(sound, features={"at": column.float()})
        found = findings_by_check(table)["features_in_units"]
        assert len(found) == count
        assert all(fault.what.startswith("Feature at[0] ") for fault in found)


def test_time_outs_that_count_as_wrong_need_no_advice_to_count_them_so():
    draws = np.random.default_rng(0)
    latency_ms = draws.uniform(10, 90, (200, 4))
    latency_ms[:30, 0] = 100.0
    accuracy = np.ones((200, 4))
    advice = []
    for scored in (0.0, 1.0):
        accuracy[:30, 0] = scored
        table = table_of(torch.from_numpy(accuracy).float(), torch.from_numpy(latency_ms).float())
        (fault,) = findings_by_check(table)["capped"]
        advice.append(fault.advice)
    assert "Give accuracy 0" not in advice[0]
    assert "Give accuracy 0 to the 30 " in advice[1]
    # budgets of one's own may be longer
    for default in (True, False):
        (fault,) = capped(Measured(table, {"default_budgets": default}))
        assert ("default budgets" in fault.advice) == default


def with_time_outs(share, scored):
    """100 samples × 2 configurations × 3 repeats, each right. In the first configuration the last
    repeats of a share of the samples, 1 or 2 of them by turns, ended at 900 ms: wrong, or right if
    they were scored."""
    draws = np.random.default_rng(0)
    times = draws.uniform(100, 200, (100, 2, 3))
    accuracy = np.ones((100, 2))
    for sample in range(round(share * 100)):
        count = 1 + sample % 2
        times[sample, 0, 3 - count :] = 900.0
        if not scored:
            accuracy[sample, 0] = 1 - count / 3
    return table_of(torch.from_numpy(accuracy).float(), torch.from_numpy(times).float())


def test_time_outs_among_repeats_need_no_advice_if_they_are_wrong():
    for scored in (False, True):
        (fault,) = findings_by_check(with_time_outs(0.4, scored))["capped"]
        # two of three decide the median of 20 cells
        assert fault.what.startswith("20 cells have the largest latency, 900")
        assert ("Give accuracy 0 to the 20 " in fault.advice) == scored


def test_time_outs_among_repeats_are_no_slower_machine():
    assert findings_by_check(with_time_outs(0.8, scored=False))["later_repeats"] == []


@pytest.mark.parametrize("torn", [True, False])
def test_a_split_that_parts_samples_of_an_image_is_noticed(torn):
    parts = ("train", "test" if torn else "train", "train", "test") * 3
    images = tuple(
        f"image{sample // 2 if sample % 4 < 2 else sample + 100}" for sample in range(12)
    )
    table = small_table(samples=12, parts=parts, image_ids=images)
    said = [warning for warning in inspect_table(table)["warnings"] if "split:" in warning]
    assert len(said) == torn
    assert all("3 images" in warning for warning in said)
