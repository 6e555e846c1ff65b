"""Copies of a sample under other ids: one cluster, so that no split parts them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from helpers import identical, small_table

from knobwise.envs import ProfileTable
from knobwise.envs.readers.feature_files import attach_features, features_from
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.tables.copies import inputs_of, with_copies_together
from knobwise.envs.tables.divisions import divide
from knobwise.envs.tables.splits import folds_of
from knobwise.experiments import studies
from knobwise.experiments.inspection.attainable import attainable
from knobwise.experiments.inspection.facts import inspect_table
from knobwise.testbeds.profiles import builtin_profile, ocr_profile, smollm_profile

MEASURED = Path(studies.__file__).with_name("measured")
WORDS = [f"{a}{b}m" for a in "bdfgklmnprst" for b in "aeiou"]


def asked(inputs=120, ids=4, seed=0, settings=3, **columns):
    """Rows of inputs that were asked under several ids each. Which setting is often right is drawn
    for each input, and nothing of that can be known of a new one."""
    draws = np.random.default_rng(seed)
    rows = []
    for number in range(inputs):
        seen = {name: make(draws, number) for name, make in columns.items()}
        best = draws.integers(settings)
        for copy in range(ids):
            for setting in range(settings):
                right = draws.random() < (0.9 if setting == best else 0.4)
                time = 100 * np.exp(0.1 * draws.standard_normal())
                key = {"sample_id": f"{number}-{copy}", "model": "abc"[setting]}
                rows.append(key | seen | {"accuracy": int(right), "latency_ms": time})
    return pl.DataFrame(rows)


def read(frame, **options):
    return table_from_frame(frame, name="t", features="auto", **options)


def prompt(draws, _):
    return " ".join(draws.choice(WORDS, 12))


def numbers(width):
    """So many columns of random numbers, rounded."""
    return {f"f{i}": lambda draws, _: round(draws.random(), 2) for i in range(width)}


def inputs_apart(table, inputs):
    """Whether ids of one input are in one cluster each, of which there are so many."""
    names = [name.split("-")[0] for name in table.sample_ids]
    pairs = set(zip(names, table.clusters, strict=True))
    return len(pairs) == len(set(names)) == len(set(table.clusters)) == inputs


@pytest.mark.parametrize("columns", [{"prompt": prompt}, numbers(16)], ids=["text", "numbers"])
def test_copies_stay_together_and_nothing_is_gained_by_them(columns):
    table = read(asked(**columns))
    assert inputs_apart(table, 120)
    assert any("480" in note and "120" in note for note in table.notes)
    clusters = np.array(table.clusters)
    splits = [divide(table, seed=seed) for seed in range(3)]
    splits += [divide(table, folds=3, number=number) for number in range(3)]
    for split in splits:
        parts = [set(clusters[part.numpy()]) for part in split]
        assert sum(map(len, parts)) == 120
    for fit, hold in folds_of(table, torch.arange(480), 0):
        assert not set(clusters[fit]) & set(clusters[hold])


def test_a_gain_that_only_copies_show_is_none():
    table = read(asked(**numbers(16)))
    budgets_ms = torch.tensor([150.0, 300.0])
    assert attainable(replace(table, clusters=()), budgets_ms)["gain"] > 0.08
    assert attainable(table, budgets_ms)["gain"] < 0.02


def test_few_prompts_that_become_categories_are_texts_too():
    table = read(asked(40, prompt=prompt))
    assert not table.texts
    assert inputs_apart(table, 40)


@pytest.mark.parametrize(
    "columns",
    [
        # a rounded number, and a few of them
        numbers(1),
        numbers(3),
        # a short text, and kinds of samples with long names
        {"prompt": lambda draws, _: f"what is {draws.integers(99)} plus {draws.integers(9)}?"},
        {
            "kind": lambda draws, _: (
                f"questions about the history of the {draws.integers(6)}th age"
            ),
            "size": lambda draws, _: int(draws.integers(5)),
        },
        # rare flags, which most samples have none of
        {f"flag{i}": lambda draws, _: int(draws.random() < 0.03) for i in range(40)},
        # nothing was found in the image
        {
            f"f{i}": lambda draws, number: (number % 30 > 1) * round(draws.random(), 3)
            for i in range(20)
        },
    ],
    ids=["number", "numbers", "short", "kinds", "flags", "zeros"],
)
def test_what_is_equal_by_chance_is_no_copy(columns):
    table = read(asked(480, ids=1, settings=2, **columns))
    assert table.clusters == ()
    assert not any("several ids" in note for note in table.notes)


def test_one_rounded_feature_is_no_sign_of_copies():
    for seed in range(4):
        draws = np.random.default_rng(seed)
        x = draws.random(480).round(2)
        rows = []
        for sample, level in enumerate(x):
            for model, time in (("a", 50), ("b", 100), ("c", 200)):
                time *= (0.7 + level) * np.exp(0.05 * draws.standard_normal())
                row = {"sample_id": sample, "x": level, "model": model}
                right = draws.random() < 0.4 + 0.3 * level
                rows.append(row | {"accuracy": int(right), "latency_ms": time})
        facts = inspect_table(read(pl.DataFrame(rows)))
        assert not [each for each in facts["findings"] if each["check"] == "same_samples"]


def block_of(count, width=20, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def with_copies(copies, **fields):
    """60 samples of which some, {row: the row that it copies}, have the features of others."""
    x = block_of(60)
    for row, of_row in copies.items():
        x[row] = x[of_row]
    return replace(small_table(60, features=False), features={"x": x}, **fields)


def test_copies_join_images_and_groups():
    copies = {1: 0, 41: 40}
    table = with_copies_together(with_copies(copies))
    assert (table.clusters[0], table.clusters[40]) == ("small/0", "small/40")
    assert [table.clusters[row] for row in copies] == ["small/0", "small/40"]
    assert len(set(table.clusters)) == 58
    # users 0 and 4 have a copy in common, and so all of their samples stay together
    users = tuple(f"u{row // 10}" for row in range(60))
    grouped = with_copies_together(with_copies({41: 0}, clusters=users))
    assert grouped.clusters == tuple("u0" if user == "u4" else user for user in users)
    inside = with_copies({1: 0}, clusters=users)
    assert with_copies_together(inside) is inside
    # another image is another input, and one image is a unit already
    for images in (tuple(map(str, range(60))), tuple(str(row // 2) for row in range(60))):
        table = with_copies({1: 0}, image_ids=images)
        assert with_copies_together(table) is table


def test_a_split_that_the_file_fixes_stays_and_is_noted():
    parts = ("train", "train", "validation", "test") * 15
    table = with_copies_together(with_copies({4: 0, 3: 0}, parts=parts))
    assert any("3 samples have copies" in note for note in table.notes)
    assert table.clusters[4] == table.clusters[0] != table.clusters[3]
    identical(table.split().test, torch.arange(3, 60, 4))
    alike = with_copies_together(with_copies({4: 0}, parts=parts))
    assert not any("another part" in note for note in alike.notes)


def test_copies_are_known_wherever_features_come_from(tmp_path):
    plain = small_table(60, features=False)
    x = block_of(60)
    x[1] = x[0]
    content = {"sample_id": list(plain.sample_ids), "x": x.numpy()}
    table = attach_features(plain, features_from(content))
    assert table.clusters[:2] == ("small/0",) * 2
    table.save(tmp_path / "t.safetensors")
    again = ProfileTable.load(tmp_path / "t.safetensors")
    assert (again.clusters, again.digest) == (table.clusters, table.digest)
    # the same ids of another data set are other samples, and its copies are found
    other = replace(plain, name="other", features={"x": block_of(60, seed=1)})
    other.features["x"][5] = x[7]
    joint = join_tables([table, other])
    assert joint.clusters[0] == joint.clusters[1] != joint.clusters[60]
    assert joint.clusters[65] == joint.clusters[7]
    assert len(set(joint.clusters)) == 118


def test_missing_features_are_no_input():
    x = block_of(60)
    x[:9] = torch.nan
    table = replace(small_table(60, features=False), features={"x": x})
    assert with_copies_together(table) is table


def test_chats_are_as_long_as_what_the_user_says():
    def chat(question):
        system = {"role": "system", "content": "You are a helpful assistant who answers briefly."}
        return [system, {"role": "user", "content": question}]

    for question, clusters in (
        ("is {} even?", 0),
        ("is {} even? say why, and answer in whole sentences", 120),
    ):
        make = {"messages": lambda _, number, words=question: chat(words.format(number))}
        table = read(asked(**make, settings=2, ids=2))
        assert len(set(table.clusters)) == clusters


def test_profiles_that_come_with_knobwise_have_no_copies():
    tables = [builtin_profile(), builtin_profile("soft_score"), ocr_profile(), smollm_profile()]
    tables += [ProfileTable.load(path) for path in sorted(Path(MEASURED).glob("*.safetensors"))]
    assert len(tables) == 8
    for table in tables:
        assert with_copies_together(table) is table
        assert not inputs_of(table).sure.any()
