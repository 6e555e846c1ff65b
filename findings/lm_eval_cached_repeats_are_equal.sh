#!/bin/bash
# One would guess: with a cache (`use_cache`) an evaluation in lm-evaluation-harness that is run again
# gives what it gave; where answers are drawn (temperature 0.7, several repeats) either the same draws
# or new ones.
# It is: where generation_kwargs do not say do_sample, which APIs do not need, all repeats of a question
# are kept as one answer, the last. Run again, or gone on with after a break, the repeats are equal: any
# of four is right as seldom as one, and a majority is that one. With do_sample nothing comes from the
# cache.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install "lm-eval[api]==0.4.13" 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", HF_HOME=os.path.abspath("home"))
import lm_eval
from lm_eval.api.model import LM

Path("questions.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(2)))
TASK = {
    "task": "letter",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Question {{n}}: which letter?",
    "doc_to_target": "a",
    "repeats": 4,
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


class Draws(LM):
    """A model whose four draws differ, as they do at a temperature."""

    asked = 0

    def generate_until(self, requests):
        self.asked += len(requests)
        return ["abcd"[number % 4] for number in range(len(requests))]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def draws(cache, **settings):
    """The answers to the first question, and how many were asked for."""
    model = Draws()
    task = TASK | {"generation_kwargs": {"until": ["\n"], "temperature": 0.7} | settings}
    results = lm_eval.simple_evaluate(model, tasks=[task], use_cache=cache, bootstrap_iters=0)
    return "".join(results["samples"]["letter"][0]["resps"][0]), model.asked


print("lm_eval", importlib.metadata.version("lm_eval"))
shown = [draws("one"), draws("one"), draws("two", do_sample=True), draws("two", do_sample=True)]
for name, (answers, asked) in zip(("temperature", "again", "with do_sample", "again"), shown):
    print(f"{name}: answers {answers}, asked {asked} times")
sys.exit(shown != [("abcd", 8), ("dddd", 0), ("abcd", 8), ("abcd", 8)])
P
"$folder/venv/bin/python" run.py 2>/dev/null
