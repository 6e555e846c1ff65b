"""What training on a profile can bring, and how certain that is."""

from dataclasses import replace

import pytest
import torch
from helpers import small_table, table_of

from knobwise.experiments.inspection.facts import inspect_table
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


def measured_on(count, jitter=0.01):
    """A setting of its own for every so many samples, which takes nearly the same for each."""
    setting = torch.arange(60) // count
    mask = torch.arange(int(setting.max()) + 1) == setting.unsqueeze(1)
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    latency = (5 + torch.arange(mask.shape[1])) * (1 + jitter * noise)
    return table_of(torch.ones(mask.shape).where(mask, torch.nan), latency.where(mask, torch.nan))


def sure_of(table, check):
    return [each["sure"] for each in inspect_table(table)["findings"] if each["check"] == check]


@pytest.mark.parametrize(
    ("table", "sure"),
    [
        (measured_on(1), []),
        (measured_on(1, jitter=0), []),
        (measured_on(30), ["certain"]),
        (measured_on(30, jitter=0), ["certain"]),
        # the deviation may be larger than it looks, as far as 30 pairs tell
        (measured_on(2, jitter=0.018), ["perhaps"]),
        (measured_on(30, jitter=0.05), []),
    ],
)
def test_latency_that_hardly_differs_is_as_certain_as_the_samples_of_a_setting_tell(table, sure):
    assert sure_of(table, "same_latency") == sure


def test_of_settings_that_one_sample_has_it_is_said_that_nobody_knows_the_gain():
    """The static choice of each sample is then the oracle's."""
    for count, said in ((1, True), (2, True), (5, False)):
        table = measured_on(count)
        assert sure_of(table, "scattered_settings") == ["certain"] * said
        assert bool(sure_of(table, "little_headroom")) != said
