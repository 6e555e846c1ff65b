"""`knobwise profile`, which checks the settings and calls the right profiler, and `knobwise
inspect`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.common.checks import a_device, at_least
from knobwise.common.errors import InputError, Missing
from knobwise.common.extras import install_command
from knobwise.common.files import write_json
from knobwise.common.imports import source_file
from knobwise.experiments.settings.measured_with import workers_of
from knobwise.experiments.settings.measuring_options import InspectRun, ProfileRun
from knobwise.experiments.settings.profiles import TableProfile, read_profile
from knobwise.experiments.settings.words import shell_word
from knobwise.profiling.endpoint.settings import NAME as ENDPOINT
from knobwise.profiling.endpoint.settings import NAMES, endpoint_options
from knobwise.profiling.measuring.settings import BUILT_IN

if TYPE_CHECKING:
    from torch import Tensor

    from knobwise.envs.demonstrations.beam_table import BeamTable
    from knobwise.envs.tables.profile_table import ProfileTable

RECORDED = ("learner", "smollm2")
"""Models whose demonstrations are recorded, and that bring questions along."""
FEW_TEXTS = 20
"""With fewer different texts than this, what is counted in them is taken for features."""


def profile(config: ProfileRun) -> None:
    """Measure a model at its configurations, or record sequences of demonstrations.

    Raises:
        InputError: options for another kind of model; see also the profilers.
    """
    if config.complete is not None:
        from knobwise.experiments.deploy.complete import complete

        complete(config, measure_profile)
        return
    # a model with knobs is measured, any other is asked which demonstrations help
    users_class = ":" in config.model and not config.vlm.data
    has_knobs = config.data is not None or config.model in BUILT_IN or users_class
    _check(config, has_knobs)
    try:
        if has_knobs:
            _summary(measure_profile(config))
        else:
            _profile_beams(config)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"profile: {error}") from error


def measure_profile(
    config: ProfileRun, needed: Callable[[], tuple[ProfileTable, Tensor]] | None = None
) -> Path:
    """Measure a model with knobs; return the folder.

    Args:
        needed: see `profile_vlm`.
    """
    from knobwise.profiling.measuring.machine import one_thread
    from knobwise.profiling.measuring.profiler import profile_vlm
    from knobwise.profiling.models import load_model

    load = partial(
        load_model,
        config.model,
        config.data,
        config.knobs,
        importance=config.importance,
        dtype=config.dtype,
        device=config.device,
        endpoint=endpoint_options(config),
    )
    identity: dict[str, object] = {}
    if config.data is None or ":" in config.model:
        identity["class"] = config.model
    runner = None
    with ExitStack() as stack:
        if config.workers > 1:
            from knobwise.profiling.workers.measuring import PoolRunner, describe_model, machine_of

            # this process holds no replica
            pool = stack.enter_context(_workers(config, load, config.knobs.clock == "cpu"))
            (model, items), note = pool.ask(describe_model)
            identity["machine"] = machine_of(Path(config.out), note)
            runner = partial(PoolRunner, pool)
        else:
            model, items = load()
            if hasattr(model, "close"):
                stack.callback(model.close)
            stack.enter_context(one_thread())  # as it is served live
        usual = config.data or getattr(model, "dataset", model.name)
        name = config.knobs.name or Path(str(usual)).name.split(".")[0]
        knobs = replace(config.knobs, name=name)
        source = source_file(config.model) if ":" in config.model else None
        about = config.out, model, items, knobs, identity, needed
        folder = profile_vlm(*about, runner=runner, source=source)
    if (folder / "state/workers.json").exists():
        from knobwise.profiling.workers.machines import note_workers

        note_workers(folder)
    return folder


def _workers(
    config: ProfileRun, load: Callable[[], Any], shares: bool
) -> AbstractContextManager[Any]:
    """Start workers for a block, each with what `load` returns; they may share cores if nothing is
    timed that depends on it."""
    from knobwise.profiling.workers.cluster import WorkerOptions
    from knobwise.profiling.workers.pool import worker_pool

    options = WorkerOptions(config.workers, config.gpus, config.ray_address, shares)
    return worker_pool(load, options)


def _summary(folder: Path) -> None:
    """Print what a measured profile holds."""
    from knobwise.common.parquet import read_parquet

    table = folder / "table.parquet"
    features: str | list[str] = str(folder / "features.safetensors")
    measured = read_parquet(table)
    words = [shell_word("profile.path", table), shell_word("profile.features", features)]
    costs = [name for name in ("usd",) if name in measured.columns]
    # behind an endpoint, the text of a request says more than what is counted in it; a few texts
    # say nothing
    if "prompt" in measured.columns and measured["prompt"].n_unique() >= FEW_TEXTS:
        features = ["prompt"]
        words[1] = "profile.features=[prompt]"
    if costs:
        words.append("profile.costs=[usd]")
    print(f"profile: {folder}")
    about = TableProfile(path=str(table), features=features, costs=costs, name=folder.name)
    inspect(InspectRun(about))
    if not (measured["accuracy"] > 0).any():
        print("no answer is right: look at knobs.metric, knobs.prompt and the data")
    print(f"next:    knobwise train profile=table {' '.join(words)}")


def _check(config: ProfileRun, has_knobs: bool) -> None:
    """Refuse a model without items, and options for another kind of model."""
    if not has_knobs and not config.vlm.data and config.model not in RECORDED:
        raise InputError(
            f"model={config.model}: needs the items that it answers: data=FILE to measure its "
            "knobs, or vlm.data=FILE to record demonstrations; "
            f"{', '.join((*BUILT_IN, *RECORDED))} have their own"
        )
    # the options that this kind of model does not read
    unread = ["knobs", "importance"]
    if has_knobs:
        unread = ["pool", "beams", "vlm", "learner"]
        if config.data is None or ":" in config.model:
            unread.append("importance")
        if config.model in (*BUILT_IN, "learner"):
            unread.append("data")
    if config.model != ENDPOINT:
        unread += NAMES
    else:
        unread += ["importance", "dtype", "device"]
        # without knobs there is nothing to make messages of
        if not has_knobs:
            unread.append("messages")
    for name in unread:
        if getattr(config, name) != getattr(ProfileRun(), name):
            raise InputError(
                f"{name}: model={config.model} does not read it; leave it out. data=FILE has the "
                "questions to measure a model on, vlm.data=FILE those to record demonstrations for"
            )
    _check_workers(config)
    # that of a worker is looked for where it is
    a_device(config.device, usable=config.workers == 1)


def _check_workers(config: ProfileRun) -> None:
    """Refuse workers that cannot be, and what only they read."""
    at_least("workers", config.workers, 1)
    at_least("gpus", config.gpus, 0)
    if config.workers == 1:
        for name in ("gpus", "ray_address"):
            if getattr(config, name):
                raise InputError(f"{name}: only several workers read it; leave it out")
        return
    if config.model == ENDPOINT:
        raise InputError(
            f"workers={config.workers}: model={ENDPOINT} runs elsewhere; take "
            f"concurrency={config.workers}"
        )
    # before a model is loaded
    if find_spec("ray") is None:
        raise Missing(f"workers={config.workers} needs: {install_command('ray')}")
    on_gpu = (config.device or "cpu").startswith("cuda")
    if on_gpu != bool(config.gpus) and config.device is not None:
        raise InputError(
            f"device={config.device}: does not fit gpus={config.gpus}, the GPUs of each worker; "
            "leave out device"
        )


def _profile_beams(config: ProfileRun) -> None:
    """Record sequences of demonstrations, or the draws of a trained selector as one more round."""
    from knobwise.profiling.demonstrations.profile import profile_beams
    from knobwise.profiling.demonstrations.tasks import vlm_task
    from knobwise.profiling.endpoint.token_counts import cut_line
    from knobwise.profiling.measuring.machine import one_thread
    from knobwise.testbeds.canvases.task import learner_task

    load: Callable[[], Any] = partial(
        vlm_task, config.model, config.vlm, config.pool, endpoint_options(config)
    )
    if config.model == "learner":
        load = partial(learner_task, config.learner, config.pool)
    do = None
    with ExitStack() as stack:
        if config.workers > 1:
            from knobwise.profiling.workers.recording import find_by, without_scorer

            # scores are the same however long they take
            pool = stack.enter_context(_workers(config, load, shares=True))
            task, _ = pool.ask(without_scorer)
            do = partial(find_by, pool, Path(config.out) / "state")
        else:
            task = load()
            if config.model == "learner":
                stack.enter_context(one_thread())
            if hasattr(task.scorer, "close"):
                stack.callback(task.scorer.close)
        # without a checkpoint nothing but the search finds sequences
        draw = None
        drawn_by = ""
        if config.checkpoint is not None:
            draw = _draws_of(config.checkpoint, task.table, config.beams.shots)
            drawn_by = hashlib.sha256(Path(config.checkpoint).read_bytes()).hexdigest()
        profile_beams(config.out, task, config.beams, draw, drawn_by, do)
    if unlisted := getattr(task.scorer, "unlisted", 0):
        print(
            f"note:  {unlisted} scores are of answers that the server did not list among the "
            "likeliest tokens; they hold the most that it can be"
        )
    if most := getattr(task.scorer, "cut_at", None):
        print(f"note:  {cut_line(most)}")
    print(f"beams: {config.out}")
    print(
        f"next:  knobwise train experiment=selector_language beams=files "
        f"{shell_word('beams.path', config.out)} beams.model=null variants.grpo_live=null"
    )


def _draws_of(checkpoint: str, table: BeamTable, shots: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that draws sequences from the selector in a checkpoint."""
    from knobwise.agents.selector.actor import SelectorActor
    from knobwise.agents.selector.evaluation import draw
    from knobwise.agents.training.checkpoint import load_checkpoint
    from knobwise.experiments.settings.beams import table_for

    loaded = load_checkpoint(checkpoint)
    # a function of rows, int64 [n], and the number of draws, to int64 [n, count, shots]
    return partial(draw, SelectorActor(loaded.selector, table_for(table, loaded), shots))


def inspect(config: InspectRun) -> None:
    """Print what a profile or a log holds, and write it where the settings say."""
    from rich.console import Console

    from knobwise.experiments.report import inspection

    if config.log is not None:
        from knobwise.experiments.inspection.logs import inspect_log

        for name in ("budgets_ms", "learning_curve", "html"):
            value = getattr(config, name)
            if value not in (None, False):
                raise InputError(f"{name}={value}: is for profile=…; leave it out with log=…")
        facts = inspect_log(config.log)
        inspection.print_log(facts, Console())
    else:
        from knobwise.experiments.inspection.facts import inspect_table

        workers = workers_of(getattr(config.profile, "path", None))
        table = read_profile(config.profile)
        facts = inspect_table(table, config.learning_curve, workers, config.budgets_ms)
        inspection.print_inspection(facts, Console())
        if config.html is not None:
            print(f"page: {inspection.write_inspection(facts, config.html)}")
    write_json(config.json, facts)
