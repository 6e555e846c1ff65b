"""A slice of the campaign on profiles of known truth, with fixed seeds."""

import pytest

from campaign.profiles.attainable import trial


@pytest.mark.parametrize("kind", ["Bernoulli", "nothing to gain"])
def test_the_interval_of_what_is_attainable_holds_the_truth(kind):
    estimate, truth, bayes = trial(kind, 0, 200)
    low, high = estimate["gain_ci95"]
    assert low - 0.0005 <= truth <= high + 0.0005
    assert truth <= bayes + 0.005
    assert (low > 0) is (kind != "nothing to gain")
