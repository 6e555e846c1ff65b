#!/bin/bash
# One would guess: a sample of inspect-ai whose answer came from inspect's own cache is marked in the
# log's summaries, or has no time, or that of the answer in the cache.
# It is: total_time and working_time are those of the look-up, some milliseconds, and the
# accuracy counts the sample like others. Only the model events of a whole sample say `read`; in
# summaries the token usage is empty, as it is where a provider reports none.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install inspect-ai==0.3.285 2>/dev/null
cd "$folder"
# its cache lies in the user's folder
export HOME="$folder" XDG_CACHE_HOME="$folder/cache"
cat > run.py <<'P'
import importlib.metadata
import sys
import time

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log_sample_summaries
from inspect_ai.model import GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match

SECONDS = 1.0


def answer(*_):
    time.sleep(SECONDS)
    output = ModelOutput.from_content("mock", "yes")
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


def run():
    task = Task(
        dataset=[Sample(id=1, input="yes?", target="yes")],
        scorer=match(),
        config=GenerateConfig(cache=True),
    )
    model = get_model("mockllm/m", custom_outputs=answer)
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    (sample,) = log.samples
    (event,) = (each for each in sample.events if each.event == "model")
    (summary,) = read_eval_log_sample_summaries(log.location)
    accuracy = log.results.scores[0].metrics["accuracy"].value
    words = [name for name, value in summary.model_dump().items() if "cache" in name and value]
    print(
        f"total_time {summary.total_time} s | working_time {summary.working_time} s | accuracy",
        f"{accuracy} | event {event.cache} | fields of a cache in the summary {words} | usage",
        "yes" if summary.model_usage else "none",
    )
    return event.cache, summary.total_time, summary.working_time, accuracy, words


print("inspect-ai", importlib.metadata.version("inspect_ai"))
first, second = run(), run()
sys.exit(
    not (
        (first[0], second[0]) == ("write", "read")
        and min(first[1:3]) >= SECONDS > max(second[1:3])
        and second[3:] == (1.0, [])
    )
)
P
"$folder/venv/bin/python" run.py
