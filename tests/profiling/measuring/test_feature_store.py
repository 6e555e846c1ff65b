"""Features on disk: one file that others read, nothing computed twice, nothing lost with a kill."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from knobwise.common.errors import InputError
from knobwise.envs.readers.feature_files import read_features
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys, image_digests
from knobwise.profiling.measuring.questions import VQAItem


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), colour).save(buffer, "png")
    return buffer.getvalue()


ITEMS = tuple(VQAItem(f"q{n}", png((n, 0, 0)), f"Question {n}?", ("yes",)) for n in range(5))


def keys_of(items, model="m"):
    return content_keys(image_digests(items), [item.question for item in items], model)


def take(item):
    n = int(item.id[1:])
    return {"image_features": np.float32([n, n + 0.25, -n]), "language_features": np.float32([0.1, n])}


def collected(store, items=ITEMS, model="m", force=False):
    """Add the features that the store lacks, or all; return the keys of the items and the ids of those computed."""
    keys = keys_of(items, model)
    missing = [(key, item) for key, item in zip(keys, items, strict=True) if force or key not in store]
    for key, item in missing:
        store.add(key, take(item), item.id)
    store.flush()
    return keys, [item.id for _, item in missing]


def test_the_file_is_a_feature_file_in_the_order_of_the_samples(tmp_path):
    store = FeatureStore(tmp_path / "parts", keys_of(ITEMS), chunk=2)
    keys, computed = collected(store)
    assert len(computed) == 5
    store.write(tmp_path / "f.safetensors", keys[::-1], [item.id for item in ITEMS[::-1]])
    found = read_features(tmp_path / "f.safetensors")
    assert found.sample_ids == ("q4", "q3", "q2", "q1", "q0")
    assert found.blocks["image_features"][1].tolist() == [3, 3.25, -3]
    assert found.blocks["language_features"].shape == (5, 2)
    assert found.blocks["language_features"][0, 0] == torch.tensor(0.1)


def test_what_was_added_before_a_kill_is_there_up_to_the_last_part(tmp_path):
    keys = keys_of(ITEMS)
    store = FeatureStore(tmp_path, keys, chunk=2)
    for key, item in zip(keys, ITEMS, strict=True):
        store.add(key, take(item), item.id)
    again = FeatureStore(tmp_path, keys, chunk=2)  # the first one was never flushed
    assert [key in again for key in keys] == [True] * 4 + [False]
    assert collected(again)[1] == ["q4"]
    assert all(key in FeatureStore(tmp_path, keys) for key in keys)


def test_what_a_kill_left_half_written_is_passed_over(tmp_path):
    keys = keys_of(ITEMS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ".000000-x1y2.safetensors").write_bytes(b"half")
    store = FeatureStore(tmp_path / "own", keys)
    store.add(keys[0], take(ITEMS[0]), "q0")
    store.flush()
    (tmp_path / "own" / ".000001-x1y2.safetensors").write_bytes(b"half")
    assert keys[0] in FeatureStore(tmp_path / "own", keys)
    assert keys[0] in FeatureStore(tmp_path / "other", keys, [tmp_path / "own"])
    assert keys[0] not in FeatureStore(tmp_path / "other", keys[1:], [tmp_path / "own"])  # nobody asks for it


def test_only_what_changed_is_computed_again_and_all_with_force(tmp_path):
    def run(items, model="m", force=False):
        store = FeatureStore(tmp_path / "parts", keys_of(items, model), [tmp_path / "f.safetensors"])
        keys, computed = collected(store, items, model, force)
        store.write(tmp_path / "f.safetensors", keys, [item.id for item in items])
        return computed

    assert len(run(ITEMS)) == 5
    assert run(ITEMS) == []
    assert run(ITEMS[::-1]) == []  # another order is no change
    changed = (
        VQAItem("q0", ITEMS[0].image, "Another question?", ("yes",)),
        VQAItem("q1", png((9, 9, 9)), ITEMS[1].question, ("yes",)),
        VQAItem("q2", ITEMS[2].image, ITEMS[2].question, ("another answer",)),
    )
    assert run(changed) == ["q0", "q1"]
    assert run(ITEMS, model="another") == [item.id for item in ITEMS]
    assert run(ITEMS, model="another", force=True) == [item.id for item in ITEMS]


def test_the_same_image_from_a_file_and_from_bytes_is_the_same_content(tmp_path):
    (tmp_path / "a.png").write_bytes(png("red"))
    of_file, of_bytes = (VQAItem("1", image, "?", ("a",)) for image in (tmp_path / "a.png", png("red")))
    assert image_digests([of_file, of_file]) == image_digests([of_bytes, of_bytes])
    red, blue = (VQAItem("1", Image.new("RGB", (2, 3), colour), "?", ("a",)) for colour in ("red", "blue"))
    wide = VQAItem("1", Image.new("RGB", (3, 2), "red"), "?", ("a",))
    assert len(set(image_digests([of_file, red, blue, wide]))) == 4
    # the same indices into another palette are another picture
    palettes = [
        VQAItem("1", item.image.convert("P", palette=Image.Palette.ADAPTIVE), "?", ("a",)) for item in (red, blue)
    ]
    assert palettes[0].image.tobytes() == palettes[1].image.tobytes()
    assert image_digests(palettes) == image_digests([red, blue])


def test_half_precision_is_kept_and_never_passed_off_as_more(tmp_path):
    keys = keys_of(ITEMS)
    store = FeatureStore(tmp_path / "half", keys, half=True)
    collected(store)
    store.write(tmp_path / "f.safetensors", keys, [item.id for item in ITEMS])
    assert read_features(tmp_path / "f.safetensors").blocks["language_features"][0, 0] == torch.tensor(0.1).half()
    assert all(key in FeatureStore(tmp_path / "new", keys, [tmp_path / "f.safetensors"], half=True) for key in keys)
    assert not any(key in FeatureStore(tmp_path / "new", keys, [tmp_path / "f.safetensors"]) for key in keys)


def test_mistakes_are_named(tmp_path):
    keys = keys_of(ITEMS)
    store = FeatureStore(tmp_path / "parts", keys)
    store.add(keys[0], take(ITEMS[0]), "q0")
    half = FeatureStore(tmp_path / "h", keys, half=True)
    for place, features, message in (
        (store, {"image_features": np.zeros(4, np.float32)}, r"sample q1: widths \{'image_features': 4\}"),
        (store, {"image_features": np.float32([np.nan])}, "sample q1: image_features are not all finite"),
        (half, {"x": np.float32([1e6])}, "do not fit into half precision"),
        (store, {}, "there are none"),
    ):
        with pytest.raises(InputError, match=message):
            place.add(keys[1], features, "q1")
    with pytest.raises(InputError, match="no features for 4 samples, such as q1"):
        store.write(tmp_path / "f.safetensors", keys, [item.id for item in ITEMS])
    assert not (tmp_path / "f.safetensors").exists()
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"broken\.safetensors: cannot be read"):
        FeatureStore(tmp_path / "parts", keys, [tmp_path / "broken.safetensors"])
    with pytest.raises(InputError, match="cannot be read"):
        image_digests([VQAItem("1", tmp_path / "gone.png", "?", ("a",))])
