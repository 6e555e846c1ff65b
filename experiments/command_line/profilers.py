"""The profiler of a model with knobs, in this process or, its shards as Ray tasks, on one machine or many."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.experiments.command_line.sweep_jobs import join_cluster
from knobwise.experiments.settings.options import ProfileRun


def measure(config: ProfileRun) -> Path:
    """Measure a model with knobs, or the part of it that is this process's; gives the folder."""
    if config.model == "ocr":
        from knobwise.profiling.ocr.profile import profile_ocr

        return profile_ocr(config.out, config.ocr)
    if config.model == "elastic" or ":" in config.model:
        return _profile_class(config)
    from knobwise.profiling.huggingface.profile import profile_hugging_face

    assert config.data is not None
    how: dict[str, Any] = {"importance": config.importance, "dtype": config.dtype, "device": config.device}
    return profile_hugging_face(config.out, config.model, config.data, config.knobs, **how)


def _profile_class(config: ProfileRun) -> Path:
    """Measure the elastic model, or one of the user's own."""
    from knobwise.profiling.measuring.machine import one_thread
    from knobwise.profiling.measuring.profiler import profile_vlm
    from knobwise.profiling.measuring.questions import VQAData
    from knobwise.profiling.models import model_of_class, questions_of

    model = model_of_class(config.model)
    items = tuple(questions_of(config.model, model, config.data))
    # the built-in profile's name of its data set, so that its samples are found again
    usual = "elastic_scenes" if config.model == "elastic" else model.name
    knobs = replace(config.knobs, name=config.knobs.name or Path(config.data or usual).name.split(".")[0])
    with one_thread():
        return profile_vlm(config.out, model, VQAData(items, ()), knobs, {"class": config.model})


def profile_shards(config: ProfileRun) -> None:
    """Measure each of `knobs.shards` parts as a Ray task, with a GPU of its own where the cluster has any.

    The last part to finish writes the profile. The cluster is that of RAY_ADDRESS, else this machine. Its machines must
    share the working folder. Parts that are done are skipped when the command is repeated.

    Raises:
        InputError: Ray is not installed or no cluster answers; a part failed (the first line of each).
    """
    if find_spec("ray") is None:
        raise InputError("launcher=ray: Ray is not installed; `pip install 'knobwise[ray]'` brings it")
    import ray

    started, address = not ray.is_initialized(), os.environ.get("RAY_ADDRESS")
    init: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    if address:
        join_cluster("RAY_ADDRESS", address, init)
    else:
        ray.init("local", **init)
    try:
        gpus = int(config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_measured)
        parts = [
            replace(config, launcher="here", knobs=replace(config.knobs, shard=i)) for i in range(config.knobs.shards)
        ]
        numbers = {task.remote(part, os.getcwd()): i for i, part in enumerate(parts)}
        waiting, problems = list(numbers), list[str]()
        with progress("shards", len(parts), 0) as tick:
            while waiting:
                done, waiting = ray.wait(waiting)
                problems += [f"shard {numbers[part]}: {problem}" for part in done if (problem := ray.get(part))]
                tick(len(parts) - len(waiting), "")
    finally:
        if started:
            ray.shutdown()
    if problems:
        raise InputError("; ".join(problems))


def _measured(config: ProfileRun, folder: str) -> str:
    """Measure one part in the folder of the command; gives what went wrong, in a line, or ""."""
    os.chdir(folder)
    try:
        measure(config)
    except InputError as error:
        return str(error).splitlines()[0]
    return ""
