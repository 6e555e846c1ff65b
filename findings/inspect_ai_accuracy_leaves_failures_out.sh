#!/bin/bash
# One would guess: inspect-ai's accuracy is right answers / samples, so that a sample which ended in
# an error counts as wrong, or that the log says how many samples the mean is of.
# It is: with fail_on_error=False a sample that fails is left out of the mean, and of four samples of
# which two failed and two were right the accuracy is 1.0. `unscored_samples` does not count them
# either; only the difference of total_samples and completed_samples tells.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install inspect-ai==0.3.285 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver


@solver
def fails_at_times():
    async def solve(state, generate):
        if state.sample_id in (3, 4):
            raise RuntimeError("bad gateway")
        return state

    return solve


def answer(*_):
    output = ModelOutput.from_content("mock", "yes")
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


task = Task(
    dataset=[Sample(id=n, input="yes?", target="yes") for n in (1, 2, 3, 4)],
    solver=[fails_at_times(), generate()],
    scorer=match(),
    fail_on_error=False,
)
(log,) = eval(task, model=get_model("mockllm/m", custom_outputs=answer), display="none")
accuracy = log.results.scores[0].metrics["accuracy"].value
print("inspect-ai", importlib.metadata.version("inspect_ai"))
print("status", log.status, "| samples", log.results.total_samples)
print("completed", log.results.completed_samples, "| failed", sum(bool(s.error) for s in log.samples))
print("unscored_samples", log.results.scores[0].unscored_samples, "| accuracy", accuracy)
sys.exit(not (log.status == "success" and accuracy == 1.0))
P
"$folder/venv/bin/python" run.py
