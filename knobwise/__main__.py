"""The command line: `knobwise VERB key=value …`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from knobwise._version import __version__

USAGE = """knobwise: which setting of a model's knobs for which input, under a latency budget

  knobwise train      learn a controller from a profile (or with experiment=selector a selector of demonstrations
                      from beams), judge it beside every simple way, report
  knobwise evaluate   judge a trained controller again; with live=true in front of a model that really runs
  knobwise compare    finished runs side by side: what differs in their settings and in what they found
  knobwise inspect    what is in a profile, and how much there is to gain
  knobwise profile    measure a model at every configuration, or record which demonstrations help it
  knobwise export     a trained controller as one file that decides by itself: ONNX, and NumPy alone
  knobwise workspace  the view of all runs in Weights & Biases

  knobwise VERB --help lists the settings; they are given as key=value, a sweep as -m key=a,b,c (train).
  Profiles: profile=builtin | exp5_exp6 | core_exp | table | joint | calibrated | simulated, for example
    knobwise train profile=table profile.path=measured.parquet profile.features=features.npz
"""

SWEEPS = """Sweeps: knobwise train -m key=a,b … runs every combination, one after the other, and knobwise train -m
experiment=NAME those that the experiment's file lists. At the same time they run by
  hydra/launcher=joblib   in processes of this machine, hydra.launcher.n_jobs=N of them
  hydra/launcher=ray      as many as Ray has cores; on a running cluster by hydra.launcher.ray.init.address=HOST:PORT"""

HYDRA_FLAGS = ("-m", "--multirun", "-c", "--cfg", "-i", "--info")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; 0 when all went well, 1 when it failed for no fault of what was given, 2 when something given was
    wrong, 130 after Ctrl-C, 143 after SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _whoever_reads():
        return _main(words)


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"knobwise {__version__}")
        return 0
    try:
        from knobwise.common.errors import InputError
        from knobwise.common.files import refused_by_system
        from knobwise.common.interruption import stopped_by_signals

        with stopped_by_signals():
            try:
                return _run(words[0], words[1:])
            except InputError as error:
                print(f"knobwise: {error}", file=sys.stderr)
                return 2
            except OSError as error:
                if (refused := refused_by_system(error)) is None:
                    raise
                print(f"knobwise: {refused[1]}", file=sys.stderr)
                return refused[0]
    except KeyboardInterrupt as stop:
        return _interrupted(stop, words)


class _Output:
    """stdout whose reader may go, as in `| head`: what comes after that goes nowhere, and the work goes on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._read(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._read(self._stream.flush)

    def _read(self, do: Callable[..., Any], *text: str) -> Any:
        try:
            return do(*text)
        except BrokenPipeError:
            import os

            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def _whoever_reads() -> Iterator[None]:
    """A block that prints to a terminal, a pipe that somebody may leave, or nowhere (`>&-`)."""
    before = sys.stdout
    output = _Output(open("/dev/null", "w") if before is None else before)  # noqa: SIM115
    sys.stdout = output
    try:
        yield
    finally:
        output.flush()
        sys.stdout = before


def _interrupted(stop: KeyboardInterrupt, words: list[str]) -> int:
    """Say what is kept and how to go on; gives the exit status."""
    import shlex
    import shutil
    from contextlib import suppress
    from pathlib import Path

    from knobwise.common.interruption import status_of

    lines = ["knobwise: interrupted", *getattr(stop, "__notes__", ())]
    if words[0] in ("train", "profile"):
        here = Path(sys.executable)
        program = "knobwise" if shutil.which("knobwise") else str(here.with_name("knobwise"))
        if Path(sys.argv[0]).name == "__main__.py":
            program = f"{'python' if shutil.which('python') == str(here) else here} -m knobwise"
        lines.append(f"the same command goes on where it stopped:\n  {program} {shlex.join(words)}")
    with suppress(AttributeError, OSError, ValueError):  # nobody may be there to read it
        sys.stderr.write("\n" + "\n".join(lines) + "\n")
        sys.stderr.flush()
    return status_of(stop)


def _run(verb: str, words: list[str]) -> int:
    from knobwise.common.errors import InputError

    verbs: dict[str, Callable[[Any, list[str]], None]] = {
        "train": _train,
        "evaluate": _evaluate,
        "inspect": _inspect,
        "profile": _profile,
        "export": _export,
        "compare": _compare,
        "workspace": _workspace,
    }
    if verb not in verbs:
        raise InputError(f"unknown verb {verb!r}; known are {', '.join(verbs)} (knobwise --help)")
    from knobwise.experiments.command_line import settings

    schema = settings.schema_of(verb, words)
    if any(word in ("-h", "--help") for word in words):
        _help(schema, settings)
        return 0
    if verb == "train" and any(word in HYDRA_FLAGS for word in words):
        return _train_by_hydra(schema, words)
    if verb == "compare":  # folders are given as they are
        from pathlib import Path

        folders = [word for word in words if "=" not in word or Path(word).is_dir()]
        given = [] if not folders and any(word.startswith("runs=") for word in words) else [f"runs={folders}"]
        words = [*given, *(word for word in words if word not in folders)]
    config = settings.read_settings(schema, words)
    _check_written(config)
    if verb == "train" and any(word.startswith("experiment=") for word in words):
        _tell_of_variants(schema, words)
    verbs[verb](config, words)
    return 0


def _tell_of_variants(schema: str, words: list[str]) -> None:
    """Say that an experiment's file has several jobs, of which a run without -m is one."""
    from knobwise.common.progress import say
    from knobwise.experiments.command_line.sweeps import jobs_of

    if (count := len(jobs_of(schema, words))) > 1:
        named = next(word for word in reversed(words) if word.startswith("experiment="))
        say(f"{named}: one run, by the defaults of its file; with -m it runs its {count} variants")


def _check_written(config: Any) -> None:
    """Refuse files and folders that cannot be written before anything takes time."""
    import os
    from pathlib import Path

    from knobwise.common.errors import InputError

    stream = getattr(config, "stream", None)
    for owner, prefix in ((config, ""), (stream, "stream.")):
        for name in ("json", "html", "out", "runs"):
            given = getattr(owner, name, None)
            if given is None or isinstance(given, list):  # `compare` reads its runs
                continue
            path, is_folder = Path(given), name in ("out", "runs")
            if not is_folder and path.is_dir():
                raise InputError(f"{prefix}{name}={given}: is a folder; give the name of a file")
            for above in (*([path] if is_folder else []), *path.parents):
                if above.exists() and not above.is_dir():
                    raise InputError(f"{prefix}{name}={given}: {above} is a file and no folder; choose another place")
            nearest = next(above for above in (*([path] if is_folder else []), *path.parents) if above.exists())
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise InputError(f"{prefix}{name}={given}: nothing can be written in {nearest}; choose another place")


def _train(config: Any, words: list[str]) -> None:
    from knobwise.experiments.command_line.sweep_jobs import train

    train(config, words)


def _train_by_hydra(schema: str, words: list[str]) -> int:
    """A sweep (-m), or what Hydra's own flags show (--cfg job, …); gives the exit status."""
    from knobwise.experiments.command_line import sweeps

    if "-m" in words or "--multirun" in words:
        return sweeps.sweep(schema, words, _check_written)
    sweeps.shown_by_hydra(schema, words)
    return 0


def _evaluate(config: Any, words: list[str]) -> None:
    from knobwise.experiments.deploy.evaluate import run

    run(config)


def _export(config: Any, words: list[str]) -> None:
    from knobwise.experiments.deploy.export import run

    run(config)


def _inspect(config: Any, words: list[str]) -> None:
    import json

    from rich.console import Console

    from knobwise.common.files import written_whole
    from knobwise.experiments.report.inspection import inspect_table, print_inspection, write_inspection
    from knobwise.experiments.settings.profiles import read_profile

    facts = inspect_table(read_profile(config.profile))
    print_inspection(facts, Console())
    if config.json is not None:
        with written_whole(config.json) as temporary:
            temporary.write_text(json.dumps(facts, indent=1))
    if config.html is not None:
        print(f"page: {write_inspection(facts, config.html)}")


def _profile(config: Any, words: list[str]) -> None:
    from knobwise.common.errors import InputError

    _check_profiled(config)
    try:
        if config.model == "elastic":
            from knobwise.profiling.elastic.profile import profile_elastic

            print(f"profile: {profile_elastic(config.out, config.elastic)}")
        elif config.data is not None:
            from knobwise.profiling.huggingface.profile import profile_hugging_face

            how = {"importance": config.importance, "dtype": config.dtype, "device": config.device}
            print(f"profile: {profile_hugging_face(config.out, config.model, config.data, config.knobs, **how)}")
        else:
            _profile_beams(config)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"profile: {error}") from error


def _compare(config: Any, words: list[str]) -> None:
    from knobwise.experiments.compare.compare import compare

    compare(config)


def _workspace(config: Any, words: list[str]) -> None:
    from knobwise.experiments.tracking.workspace import workspace

    workspace(config)


def _check_profiled(config: Any) -> None:
    """Refuse settings that are for another kind of model than the one named."""
    from knobwise.common.errors import InputError
    from knobwise.profiling.elastic.profile import ElasticProfileConfig
    from knobwise.profiling.measuring.profiler import VLMProfileConfig

    named = config.model not in ("elastic", "learner")
    if config.data is not None and not named:
        raise InputError(
            f"data={config.data}: model={config.model} makes its own questions; say which model is to answer these, by "
            "model=NAME_OR_FOLDER"
        )
    if config.data is None:
        of_data = {"importance": config.importance is not None, "knobs": config.knobs != VLMProfileConfig()}
        for name in (name for name, given in of_data.items() if given):
            own = "; the knobs of the elastic model are elastic.max_crops, …" if config.model == "elastic" else ""
            raise InputError(f"{name}: is for a Hugging Face model with data=FILE{own}")
    if config.model != "elastic" and config.elastic != ElasticProfileConfig():
        raise InputError(f"elastic: is for model=elastic, not for model={config.model}")
    if config.device is not None:
        import torch

        if config.device.split(":")[0] not in ("cpu", "cuda"):
            raise InputError(f"device={config.device}: must be cpu or cuda")
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"device={config.device}: torch finds no GPU here; take device=cpu")


def _profile_beams(config: Any) -> None:
    from contextlib import nullcontext
    from pathlib import Path

    from knobwise.profiling.demonstrations.profile import profile_beams
    from knobwise.profiling.demonstrations.tasks import learner_task, vlm_task
    from knobwise.profiling.elastic.measuring import one_thread

    is_learner = config.model == "learner"
    task = learner_task(config.learner, config.pool) if is_learner else vlm_task(config.model, config.vlm, config.pool)
    draw, drawn_by = None, ""
    if config.checkpoint is not None:
        import hashlib

        from knobwise.agents.checkpoint import load_checkpoint
        from knobwise.agents.selector.selector import StoredEmbeddings

        selector = load_checkpoint(config.checkpoint).selector
        embeddings = StoredEmbeddings(task.table.queries, task.table.candidates)
        drawn_by = hashlib.sha256(Path(config.checkpoint).read_bytes()).hexdigest()

        def draw(rows: Any, count: int) -> Any:
            query, pool = embeddings.both(rows, task.table.pool[rows])
            return selector.distribution(query, pool, task.table.pool_mask[rows], config.beams.shots, count).sample()

    with one_thread() if is_learner else nullcontext():
        table = profile_beams(config.out, task, config.beams, draw, drawn_by)
    if is_learner:
        from knobwise.profiling.demonstrations.builtin import demonstrations_path, save_demonstrations

        about = config.learner
        compact = Path(config.out) / demonstrations_path(about.variant, about.part).name
        save_demonstrations(table, about.variant, about.part, compact, seed=about.seed)
    print(f"beams: {config.out}")


def _help(verb: str, settings: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    print(" ".join(settings.VERBS[verb].__doc__.split()), "\n")
    table = Table(box=None, pad_edge=False)
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for line in settings.help_lines(verb):
        table.add_row(*(word.replace("[", r"\[") for word in line))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if verb not in settings.EXPERIMENTS:
        return
    print(f"\n{SWEEPS}\n\nExperiments, each with what it asks:\n")
    asked = Table(box=None, pad_edge=False, show_header=False)
    for path in sorted((settings.CONF / "experiment").glob("*.yaml")):
        asked.add_row(f"experiment={path.stem}", settings.question_of(path.stem).partition("?")[0] + "?")
    console.print(asked)


if __name__ == "__main__":
    sys.exit(main())
