#!/bin/bash
# One would guess: in the data frames of inspect-ai, columns=SampleSummary + EvalModel, `model_args`
# holds the arguments that the model was made with (-M), so that two runs of one model with other
# arguments can be told apart.
# It is: `model_args` is read from the path of `model_base_url`; it is empty, or a URL, and the runs
# look alike but for `eval_id`. The log itself (eval.model_args) has the arguments.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install inspect-ai==0.3.285 pandas==3.1.1 pyarrow==26.0.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

from inspect_ai import Task, eval
from inspect_ai.analysis import EvalModel, SampleSummary, samples_df
from inspect_ai.dataset import Sample
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.scorer import match

for size in ("small", "large"):
    task = Task(dataset=[Sample(id=1, input="yes?", target="yes")], solver=[], scorer=match())
    eval(task, model="mockllm/m", model_args={"size": size}, log_dir="logs", display="none")
print("inspect-ai", importlib.metadata.version("inspect_ai"))
for info in list_eval_logs("logs"):
    log = read_eval_log(info)
    print("log:   model_args", log.eval.model_args)
frame = samples_df("logs", columns=SampleSummary + EvalModel)
print("frame: model_args", frame["model_args"].tolist())
sys.exit(not (len(frame) == 2 and frame["model_args"].isna().all()))
P
"$folder/venv/bin/python" run.py
