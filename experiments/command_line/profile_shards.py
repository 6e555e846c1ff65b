"""A profile measured by several processes, on one machine or many: its shards as Ray tasks."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.experiments.command_line.sweep_jobs import join_cluster
from knobwise.experiments.settings.options import ProfileRun


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
    from knobwise.experiments.command_line.profile import measure

    os.chdir(folder)
    try:
        measure(config)
    except InputError as error:
        return str(error).splitlines()[0]
    return ""
