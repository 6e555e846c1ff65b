"""Feature files: four formats, matched to samples by id, and everything about them that can be wrong."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.envs.readers.feature_files import Features, attach_features, read_features, write_features

from helpers import small_table, table_of  # isort: skip

SUFFIXES = [".safetensors", ".npz", ".pt", ".parquet"]
NAN = float("nan")
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)


def bare(samples=3, **changes):
    return replace(small_table(samples=samples, features=False), **changes)


def saved(path, ids=("0", "1", "2"), **blocks):
    np.savez(path, sample_id=np.array(ids), **(blocks or {"x": np.zeros((len(ids), 2))}))
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ids=st.lists(NAMES, min_size=2, max_size=4, unique=True),
    values=st.lists(st.floats(-(2.0**90), 2.0**90, width=32) | st.just(NAN), min_size=1, max_size=9),
    datasets=st.booleans(),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_reading_gives_back_what_was_written(tmp_path_factory, suffix, widths, ids, values, datasets):
    n = len(ids)
    blocks = {
        f"block {i}": torch.tensor([values[j % len(values)] for j in range(n * w)]).reshape(n, w)
        for i, w in enumerate(widths)
    }
    table = bare(n, sample_ids=tuple(ids), features=blocks, datasets=tuple("xy"[i % 2] for i in range(n)) * datasets)
    path = tmp_path_factory.mktemp("features") / f"f{suffix}"
    write_features(table, path)
    again = attach_features(replace(table, features={}), path)
    assert list(again.features) == list(blocks)
    for name, block in blocks.items():
        assert again.features[name].dtype == torch.float32
        torch.testing.assert_close(again.features[name], block, rtol=0, atol=0, equal_nan=True)


def test_rows_are_matched_by_id_whatever_their_order(tmp_path):
    saved(tmp_path / "f.npz", ids=[2, 0, 1, 7], x=np.array([20.0, 0.0, 10.0, 70.0]))
    table = attach_features(bare(), tmp_path / "f.npz")
    assert table.features["x"].tolist() == [[0.0], [10.0], [20.0]]
    assert table.notes == ("1 rows of features without a sample: not used",)
    assert read_features(saved(tmp_path / "b.npz", ids=[b"a", b"b"])).sample_ids == ("a", "b")
    saved(tmp_path / "f.npz", ids=["0", "x", "y"])
    with pytest.raises(InputError, match=r"f\.npz: no features for 2 of 3 samples .* such as 1, 2; .* such as 0, x, y"):
        attach_features(bare(), tmp_path / "f.npz")


def test_rows_are_matched_by_data_set_where_both_name_it():
    features = Features(("0", "0"), {"x": torch.tensor([[1.0], [2.0]])}, ("b", "a"))
    both = bare(2, sample_ids=("0", "0"), datasets=("a", "b"))
    assert attach_features(both, features).features["x"].tolist() == [[2.0], [1.0]]
    one = replace(table_of([[0.0]], [[1.0]]), name="a")
    assert attach_features(one, features).features["x"].tolist() == [[2.0]]
    with pytest.raises(InputError, match="ids occur in several data sets of the features"):
        attach_features(replace(one, name="c"), features)
    with pytest.raises(InputError, match="ids occur in several data sets of the profile"):
        attach_features(both, Features(("0",), {"x": torch.zeros(1, 1)}))


def test_every_kind_of_number(tmp_path):
    for kind in (np.float16, np.float64, np.int8, np.uint16, bool):
        saved(tmp_path / "f.npz", x=np.array([[0], [1], [1]], kind))
        assert read_features(tmp_path / "f.npz").blocks["x"].tolist() == [[0.0], [1.0], [1.0]]
    blocks = {"x": torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16)}
    save_file({"sample_id": torch.tensor([4, 2]), **blocks}, tmp_path / "f.safetensors")
    torch.save({"sample_id": [4, 2], **blocks}, tmp_path / "f.pt")
    for suffix in (".safetensors", ".pt"):
        features = read_features(tmp_path / f"f{suffix}")
        assert features.sample_ids == ("4", "2")
        assert features.blocks["x"].tolist() == [[0.5], [2.0]]


def test_columns_of_a_table_file(tmp_path):
    columns = {"sample_id": [1, 2], "split": ["train", "test"], "width": [640, None], "dark": [True, False]}
    data = pl.DataFrame(columns | {"vision": [[1.0, 2.0], [3.0, None]]})
    data.write_parquet(tmp_path / "f.parquet")
    blocks = read_features(tmp_path / "f.parquet").blocks
    assert list(blocks) == ["vision", "features"]
    torch.testing.assert_close(blocks["vision"], torch.tensor([[1, 2], [3, NAN]]), equal_nan=True)
    torch.testing.assert_close(blocks["features"], torch.tensor([[640, 1], [NAN, 0]]), equal_nan=True)
    data.drop("vision", "split").write_csv(tmp_path / "f.csv")
    torch.testing.assert_close(read_features(tmp_path / "f.csv").blocks["features"], blocks["features"], equal_nan=True)


@pytest.mark.parametrize(
    ("ids", "blocks", "message"),
    [
        (["0", "1", "1"], {}, "1 ids occur more than once"),
        (["0", "1"], {"x": np.zeros((3, 2))}, r"'x' have shape \(3, 2\), but there are 2 sample_id"),
        (["0", "1"], {"x": np.zeros((2, 2, 2))}, r"'x' have shape \(2, 2, 2\)"),
        (["0", "1"], {"x": np.array(3.0)}, r"'x' have shape \(\)"),
        (["0", "1"], {"x": np.array(["1", "b"])}, "'x' are not numbers"),
        (["0", "1"], {"x": np.array([1.0, np.inf])}, "'x' hold infinite values"),
        (["0", "1"], {"x": np.array([1.0, 1e300])}, "'x' hold infinite values"),
        ([["0"], ["1"]], {}, "'sample_id' holds"),
        (["0", "1"], {"x": np.array([{}, 1], object)}, "without executing code"),
    ],
)
def test_bad_blocks(tmp_path, ids, blocks, message):
    saved(tmp_path / "f.npz", ids=ids, **blocks)
    with pytest.raises(InputError, match=rf"f\.npz: .*{message}"):
        read_features(tmp_path / "f.npz")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sample_id": [1, 2], "name": ["a", "b"]}, "'name' has 2 values that are not numbers"),
        ({"sample_id": [1, 2], "x": [["a"], ["b"]]}, "'x' has 2 values that are not numbers"),
        ({"sample_id": [1, 2], "x": [[1.0], [1.0, 2.0]]}, "'x' have different lengths"),
        ({"sample_id": [1, 2], "x": [[1.0], None]}, "'x' have different lengths, or are missing"),
        ({"sample_id": [1, 2], "features": [[1.0], [2.0]], "y": [1, 2]}, "has one already"),
        ({"sample_id": [1, None], "x": [1, 2]}, "'sample_id' is empty in 1 rows"),
        ({"sample_id": [1, 2]}, "at least one block"),
        ({"x": [1, 2]}, "need sample_id"),
    ],
)
def test_bad_columns(tmp_path, columns, message):
    pl.DataFrame(columns).write_parquet(tmp_path / "f.parquet")
    with pytest.raises(InputError, match=rf"f\.parquet: .*{message}"):
        read_features(tmp_path / "f.parquet")


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"sample_id": [1], "x": Harmful()}, tmp_path / "f.pt")
    with pytest.raises(InputError, match=r"f\.pt: cannot be read as features without executing code"):
        read_features(tmp_path / "f.pt")
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".bin"])
def test_files_of_another_kind(tmp_path, suffix):
    with pytest.raises(InputError, match=rf"f\{suffix}: no such file"):
        read_features(tmp_path / f"f{suffix}")
    (tmp_path / f"f{suffix}").write_text("hello")
    with pytest.raises(InputError, match=rf"f\{suffix}: "):
        read_features(tmp_path / f"f{suffix}")


def test_nothing_to_write_or_nowhere(tmp_path):
    with pytest.raises(InputError, match=r"\.safetensors, \.npz, \.pt or \.parquet"):
        write_features(small_table(), tmp_path / "f.bin")
    with pytest.raises(InputError, match=r"blocks: \[\]"):
        write_features(bare(), tmp_path / "f.npz")
    assert list(tmp_path.iterdir()) == []
