"""What training on a profile can bring: of few groups or images intervals are too narrow."""

from dataclasses import replace

import pytest
from helpers import small_table

from knobwise.experiments.inspection.measured import Measured
from knobwise.experiments.inspection.prospects import few_groups

TABLE = small_table(600)


def of(count):
    """A name for each of the 600 samples, of which there are so many."""
    return tuple(str(row % count) for row in range(600))


@pytest.mark.parametrize(
    ("belongs", "words"),
    [
        ({"image_ids": of(12)}, "Only 12 images:"),
        ({"clusters": of(12)}, "Only 12 groups (profile.group):"),
        # a cluster may hold several images
        ({"image_ids": of(300), "clusters": of(60)}, "Only 60 groups (profile.group):"),
        # ids are those of a data set: there are two images of each id
        ({"image_ids": of(12), "datasets": ("a",) * 300 + ("b",) * 300}, "Only 24 images:"),
        ({"image_ids": of(100)}, None),
        ({"clusters": of(100)}, None),
        ({}, None),
    ],
)
def test_few_groups_or_images_are_noticed(belongs, words):
    findings = [str(finding) for finding in few_groups(Measured(replace(TABLE, **belongs)))]
    assert len(findings) == (words is not None)
    if words:
        assert findings[0].startswith(words)
        assert ("images" in findings[0]) == ("images" in words)


def test_images_of_one_sample_each_are_samples():
    table = small_table(60)
    for images, noticed in ((60, 0), (59, 1)):
        ids = tuple(str(row % images) for row in range(60))
        assert len([*few_groups(Measured(replace(table, image_ids=ids)))]) == noticed
