"""`profile.group`: samples that belong together stay in one part of every split."""

from dataclasses import replace

import numpy as np
import polars as pl
import torch
from helpers import identical, input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs import ProfileTable
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import long_frame, read_long_table, table_from_frame
from knobwise.envs.tables.divisions import divide
from knobwise.envs.tables.splits import folds_of

SAMPLES = 120


def clustered(clusters, **fields):
    """A table whose samples belong to these clusters."""
    return replace(small_table(len(clusters), seed=1), clusters=tuple(map(str, clusters)), **fields)


def clusters_of(table, split):
    """The clusters in each part."""
    return [{table.clusters[row] for row in part.tolist()} for part in split]


def whole(table, split):
    """Whether no cluster is in two parts, and each sample in one."""
    rows = torch.cat(list(split)).sort().values
    apart = sum(map(len, clusters_of(table, split))) == len(set(table.clusters))
    return apart and torch.equal(rows, torch.arange(table.num_samples))


# clusters of up to a tenth of the samples, of any sizes
SIZES = st.lists(st.integers(1, SAMPLES // 10), min_size=SAMPLES, max_size=SAMPLES).map(
    lambda sizes: np.repeat(np.arange(SAMPLES), sizes)[:SAMPLES].tolist()
)


@settings(max_examples=40)
@given(SIZES, st.integers(0, 1000), st.sampled_from([(0.6, 0.2), (0.5, 0.25), (0.8, 0.1)]))
def test_clusters_stay_whole_and_parts_have_their_shares(sizes, seed, shares):
    # members need not stand together
    table = clustered(np.random.default_rng(seed).permutation(sizes))
    split = table.split(*shares, seed=seed)
    assert whole(table, split)
    identical(split, table.split(*shares, seed=seed))
    # a border is at most half of the largest cluster away
    most = max(map(table.clusters.count, table.clusters))
    for part, share in zip(split, (*shares, 1 - sum(shares)), strict=True):
        assert abs(len(part) - share * SAMPLES) <= most + 1


@settings(max_examples=20)
@given(SIZES, st.integers(0, 100), st.integers(2, 4))
def test_folds_and_repeats_keep_clusters_whole(sizes, seed, folds):
    table = clustered(sizes, datasets=tuple(f"set {row % 3}" for row in range(SAMPLES)))
    splits = [divide(table, seed=seed, folds=folds, number=number) for number in range(folds)]
    tested = torch.cat([split.test for split in splits]).sort().values
    identical(tested, torch.arange(SAMPLES))
    repeats = [divide(table, seed=seed, repeats=4, number=number) for number in range(4)]
    assert all(whole(table, split) for split in splits + repeats)
    # two of them may be the same by chance, where a few large clusters make up the test part
    assert len({tuple(split.test.tolist()) for split in repeats}) > 1
    # the folds that experts are fitted in
    clusters = np.array(table.clusters)
    for fit, hold in folds_of(table, torch.arange(SAMPLES), seed):
        assert not set(clusters[fit]) & set(clusters[hold])


def test_clusters_of_one_sample_split_as_samples_do():
    table = small_table(50)
    alone = replace(table, clusters=table.sample_ids)
    for seed in range(5):
        identical(alone.split(seed=seed), table.split(seed=seed))


def test_a_large_cluster_leaves_no_part_empty():
    table = clustered(["a"] * 60 + [f"b{i}" for i in range(40)])
    places = set()
    for seed in range(20):
        split = table.split(seed=seed)
        assert whole(table, split)
        assert all(map(len, split))
        places.add(["a" in part for part in clusters_of(table, split)].index(True))
    # the large one is not always in the same part
    assert len(places) > 1
    for clusters in ("a" * 100, "a" * 50 + "b" * 50):
        with input_error("empty"):
            clustered(clusters).split()


def test_nothing_is_fitted_on_clusters_of_a_data_set_that_is_left_out():
    users = [f"user {row % 7}" for row in range(60)] + [f"other {row % 9}" for row in range(30)]
    users += [f"other {row % 3}" for row in range(30)]
    datasets = ("a",) * 60 + ("b",) * 30 + ("a",) * 30
    table = clustered(users, datasets=datasets)
    for name in ("a", "b"):
        split = divide(table, 0.75, 0.25, leave_out=name)
        train, validation, test = clusters_of(table, split)
        assert not (train | validation) & test
        assert {datasets[row] for row in split.test} == {name}
    with input_error("profile .small."):
        divide(replace(table, clusters=tuple("abcde" * 24)), leave_out="a")


def test_a_fixed_split_that_parts_a_cluster_is_refused():
    parts = ("train", "train", "validation", "test") * 5
    with input_error("several parts"):
        clustered("u" * 20, parts=parts).split()
    fixed = clustered("abcd" * 5, parts=parts)
    assert whole(fixed, fixed.split())
    # also where the validation part is to be drawn
    for groups, tested in ((20, 3), (4, 1)):
        clusters = [row // groups for row in range(60)]
        parts = ["test" if row % groups < tested else "train" for row in range(60)]
        with input_error("several parts"):
            clustered(clusters, parts=tuple(parts)).split()


@settings(max_examples=40)
@given(SIZES, st.integers(0, 1000), st.floats(0.1, 0.9), st.sampled_from(["clusters", "images"]))
def test_a_drawn_validation_part_keeps_groups_whole_or_the_file_is_refused(sizes, seed, share, of):
    """Parts are given by group, but for one sample in half of the cases."""
    rng = np.random.default_rng(seed)
    groups = np.array(rng.permutation(sizes))
    tested = groups % 3 == 0
    torn = seed % 2 and (groups == groups[0]).sum() > 1
    if torn:
        tested[0] = not tested[0]
    parts = tuple(np.where(tested, "test", "train"))
    table = clustered(groups, parts=parts)
    if of == "images":
        table = replace(table, clusters=(), image_ids=table.clusters)
    if torn:
        with input_error("several parts"):
            table.split(share, 0.2, seed)
        return
    split = table.split(share, 0.2, seed)
    assert whole(replace(table, clusters=table.clusters or table.image_ids), split)
    identical(split.test, torch.from_numpy(tested.nonzero()[0]))
    assert all(map(len, split))


def test_a_column_says_what_belongs_together(tmp_path):
    table = clustered("abcdef" * 5)
    frame = long_frame(table).rename({"cluster": "user"})
    frame.write_csv(tmp_path / "t.csv")
    read = read_long_table(tmp_path / "t.csv", group="user")
    assert (read.clusters, read.knobs) == (table.clusters, table.knobs)
    read.save(tmp_path / "t.safetensors")
    again = ProfileTable.load(tmp_path / "t.safetensors")
    assert (again.clusters, again.digest) == (read.clusters, read.digest)
    # it is no feature, unlike other columns that are constant inside a sample; numbers are names
    length = pl.col("sample_id").cast(pl.Int64) % 5
    frame = frame.with_columns(length=length, user=length)
    read = table_from_frame(frame, name="t", group="user", features="auto")
    assert [column.name for column in read.columns] == ["length"]
    assert read.clusters[:3] == ("0", "1", "2")


def test_groups_that_are_refused():
    frame = long_frame(clustered("abcdef" * 5)).rename({"cluster": "user"})
    image = (pl.col("sample_id").cast(pl.Int64) // 2).alias("image_id")
    gaps = pl.when(pl.col("sample_id") != "3").then("user").alias("user")
    for changed, options, what in (
        (frame, {"group": "document"}, "no column document"),
        (frame, {"group": "max_crops"}, "group=max_crops must .* sample"),
        (frame, {"knobs": ["user"]}, "user for a knob"),
        (frame, {"features": ["user"]}, "user cannot be a feature"),
        (frame.with_columns(image), {}, "group=user must .* image"),
        (frame.with_columns(gaps), {}, "'user' must hold a name"),
    ):
        with input_error(what):
            table_from_frame(changed, name="t", **{"group": "user"} | options)


def test_joined_tables_share_their_clusters():
    first = clustered("abcd" * 5, name="first")
    second = replace(first, name="second")
    table = join_tables([first, second])
    assert whole(table, table.split())
    assert set(table.clusters) == set("abcd")
    # samples of a table without clusters are alone
    alone = replace(second, clusters=())
    mixed = join_tables([first, alone, replace(alone, name="third")])
    assert len(set(mixed.clusters)) == 4 + 20 + 20
    assert whole(mixed, mixed.split())
