"""The study of the parts of GRPO alone: a sample that several splits test is one sample."""

import re

import numpy as np
import torch

from knobwise.experiments.studies.grpo_parts import splits_of, with_interval


def width(words):
    """The width of the interval of a difference in words."""
    low, high = re.fullmatch(r"[+−][\d.]+ \[(.*), (.*)\]", words).groups()
    return float(high.replace("−", "-")) - float(low.replace("−", "-"))


def test_samples_have_one_number_in_all_splits():
    tested = [torch.tensor([7, 2]), torch.tensor([2, 9]), torch.tensor([7])]
    assert splits_of(tested).tolist() == [[0, 0, 1, 1, 2], [1, 0, 0, 2, 1]]


def test_an_interval_is_wider_where_samples_repeat():
    differences = np.random.default_rng(0).normal(0.1, 1.0, 100)
    thrice = np.tile(differences, 3)
    same = splits_of([torch.arange(100)] * 3)
    others = splits_of([torch.arange(start, start + 100) for start in (0, 100, 200)])
    once = splits_of([torch.arange(100)])
    # three equal results of a sample say no more than one
    repeated = width(with_interval(thrice, same))
    assert abs(repeated / width(with_interval(differences, once)) - 1) < 0.1
    # 100 samples and not 300: the wider by √3 but for the splits, which are drawn, too
    assert repeated > 1.2 * width(with_interval(thrice, others))
