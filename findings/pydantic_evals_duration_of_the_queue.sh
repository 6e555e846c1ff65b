#!/bin/bash
# One would guess: a case's `task_duration` in pydantic-evals is the time from the task's call to its answer,
# and with `retry_task` that of all attempts.
# It is: all cases start at once unless `max_concurrency` is given, those of a plain function (no coroutine)
# then wait for one of 40 threads, and the wait is in their duration: of 160 cases the last forty seem to
# take four times as long as the first, the same ones in each run. Of attempts only the last is in it, not
# those that timed out nor the pauses; `total_duration` has these, with the evaluators. A coroutine, or
# max_concurrency=40 and less, has the task's own time.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages="pydantic-evals==2.62.0 pydantic-ai-slim[retries]==2.62.0 anyio==4.16.0"
"$folder/venv/bin/pip" -q install $packages 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys
import time
from collections import Counter

import anyio
from pydantic_evals import Case, Dataset
from tenacity import stop_after_attempt, wait_fixed

SECONDS = 0.5
calls = Counter()


def answers(question):
    time.sleep(SECONDS)
    return "yes"


async def answers_as_coroutine(question):
    await anyio.sleep(SECONDS)
    return "yes"


def answers_at_last(question):
    calls[question] += 1
    time.sleep(SECONDS)
    if calls[question] < 3:
        raise TimeoutError("gateway time-out")
    return "yes"


def durations(task, count, **options):
    cases = [Case(name=f"q{n}", inputs=n, expected_output="yes") for n in range(count)]
    report = Dataset(name="questions", cases=cases).evaluate_sync(task, progress=False, **options)
    assert len(report.cases) == count
    return report


for package in ("pydantic-evals", "anyio"):
    print(package, importlib.metadata.version(package))
report = durations(answers, 160)
parts = [[case.task_duration for case in report.cases[start : start + 40]] for start in range(0, 160, 40)]
means = [sum(part) / 40 for part in parts]
print(f"a task of {SECONDS} s, 160 cases, each forty:", *(f"{mean:.2f}" for mean in means))
print(f"its mean in the report: {report.averages().task_duration:.2f}")
limited = durations(answers, 160, max_concurrency=40).averages().task_duration
print(f"with max_concurrency=40: {limited:.2f}")
coroutine = durations(answers_as_coroutine, 160).averages().task_duration
print(f"as a coroutine: {coroutine:.2f}")
retry = {"stop": stop_after_attempt(3), "wait": wait_fixed(0.5)}
(case,) = durations(answers_at_last, 1, retry_task=retry).cases
print(f"{calls[0]} attempts: task_duration {case.task_duration:.2f}, total_duration {case.total_duration:.2f}")
waits = means[3] > 3 * SECONDS and report.averages().task_duration > 2 * SECONDS > max(limited, coroutine)
last = calls[0] == 3 and case.task_duration < 1.5 * SECONDS and case.total_duration > 4 * SECONDS
sys.exit(not (waits and last))
P
"$folder/venv/bin/python" run.py
