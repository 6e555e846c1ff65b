#!/bin/bash
# One would guess: OfflinePolicyEvaluator of pybandits takes the propensities of the log where it is told
# their column, counts how often each action was taken in each batch with "batch_empirical", and in all of
# the log with "empirical".
# It is: without features of context it takes every propensity as 1, also where the log has them; the
# warning calls them uniform. Of two settings, one that is right in 70 % of samples is estimated at 29 %.
# With features the column is used, but "empirical" counts by batch, and "batch_empirical" over all: where
# another share was sent to a setting in each batch, that gives 58 % instead of 70 %.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 pandas==2.3.3 scikit-learn==1.9.1 pydantic==2.13.5 2>/dev/null
"$folder/venv/bin/pip" -q install loguru==0.6.0 tqdm==4.70.1 optuna==3.6.2 bokeh==3.9.1 2>/dev/null
"$folder/venv/bin/pip" -q install jax==0.9.2 numpyro==0.20.1 optax==0.1.9 numpy==2.4.6 2>/dev/null
"$folder/venv/bin/pip" -q install --no-deps pybandits==8.4.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
import pandas as pd
from loguru import logger
from pybandits.offline_policy_estimator import InverseProbabilityWeighting
from pybandits.offline_policy_evaluator import OfflinePolicyEvaluator


class Evaluator(OfflinePolicyEvaluator):
    """The evaluator, for the policy that always takes the large setting."""

    def estimate_policy(self, mab, test_data, **settings):
        always = np.ones(test_data["n_rounds"])
        return pd.DataFrame({"large": always, "small": 0 * always})


def batch(number, share, accuracy, count=1000):
    """Return a batch of the log: of `count` samples a share went to the large setting, which was right in some."""
    large = round(share * count)
    right = np.zeros(count, dtype=int)
    right[: round(accuracy * large)] = 1
    return pd.DataFrame(
        {
            "batch": number,
            "setting": np.where(np.arange(count) < large, "large", "small"),
            "right": right,
            "propensity": np.where(np.arange(count) < large, share, 1 - share),
            "tokens": np.arange(count) % 90,
        }
    )


# the first two are for training; of the others one has easy samples, and one hard ones
log = pd.concat([batch(0, 0.5, 0.7), batch(1, 0.5, 0.7), batch(2, 0.2, 0.9), batch(3, 0.8, 0.5)])
truth = (0.9 + 0.5) / 2
warnings = []
logger.remove()
logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")


def estimated(propensities, features):
    evaluator = Evaluator(
        split_prop=0.25,
        propensity_score_model_type=propensities,
        propensity_score_feature="propensity",
        contextual_features=features,
        expected_reward_model_type="logreg",
        importance_weights_model_type="logreg",
        ope_estimators=[InverseProbabilityWeighting()],
        batch_feature="batch",
        action_feature="setting",
        reward_feature="right",
    )
    return float(evaluator.evaluate(None, log, visualize=False)["value"].iloc[0])


print("pybandits", importlib.metadata.version("pybandits"))
print(f"accuracy of the large setting in the two batches that are evaluated: {truth:.2f}")
found = {}
for propensities, features in (
    ("propensity_score", ["tokens"]),
    ("empirical", ["tokens"]),
    ("batch_empirical", ["tokens"]),
    ("propensity_score", None),
):
    found[propensities, bool(features)] = value = estimated(propensities, features)
    print(f"{propensities:17}{'with' if features else 'without':8}features: {value:.2f}")
print(*warnings, sep="\n")
# over all, half of the samples went to the large setting
pooled, ones = (0.2 * 0.9 + 0.8 * 0.5) / 2 / 0.5, (0.2 * 0.9 + 0.8 * 0.5) / 2
expected = [truth, truth, pooled, ones]
sys.exit(not (np.allclose(list(found.values()), expected) and len(warnings) == 1 and "uniform" in warnings[0]))
P
OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$folder/venv/bin/python" -W ignore run.py
