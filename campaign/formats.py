"""Every format that the product reads: small files by its own writers, its reader, and who knows
better."""

import contextlib
import io
import json
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from helpers import arrays, small_beams, small_table
from replayed import logging_model, serve_requests, small_stack
from run_folders import write_run
from safetensors.numpy import load as safetensors_load
from safetensors.numpy import save as safetensors_save
from safetensors.torch import save_file

from campaign import mutate, oracle
from knobwise.agents import NumpyController
from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.learning.logged import read_log
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.common.errors import InputError
from knobwise.envs import BeamTable, ProfileTable
from knobwise.envs.demonstrations.beam_files import read_beam_data, write_rl_data
from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.feature_files import read_features, write_features
from knobwise.envs.readers.long_table import long_frame, read_long_table
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.report import compare
from knobwise.experiments.settings.comparison_options import CompareRun
from knobwise.profiling.measuring.machine import claim_machine
from knobwise.profiling.measuring.measuring import TIMES, TOKENS, read_measurements
from knobwise.profiling.measuring.questions import read_vqa_data
from knobwise.serving.tracker import LatencyTracker

LIMIT_S = 10
TABLE = small_table(6)
OUTCOMES = ("fine", "refused", "vague", "traceback", "hang", "wrong")
"""Read rightly; refused in one line that names the file; refused otherwise; another error; no end;
read wrongly."""


class Format(NamedTuple):
    make: Callable
    """Writes the files into the working folder."""
    files: str
    """Pattern of those that are changed."""
    read: Callable
    """The product reads them."""
    judge: Callable = lambda *_: ""
    """What is wrong with what it read: of that, the files, what it read of the whole ones, whether
    bytes were changed. Raises `oracle.Wrong` for files that had to be refused."""
    refusals: tuple = (InputError,)
    named: tuple = ()
    """What a refusal may name instead of the file."""


def _frame():
    """Made late: threads of polars do not survive a fork."""
    return long_frame(TABLE).with_columns(sample_id=pl.col("sample_id").cast(pl.String))


def _core():
    folder = Path("d/text-vqa")
    folder.mkdir(parents=True, exist_ok=True)
    for (k, blocks), rows in _frame().group_by("top_k", "num_active_blocks"):
        cells = rows.unique("sample_id").sort("sample_id")
        cells = cells.select("sample_id", "accuracy", T_total="latency_ms").to_dicts()
        content = {"tier": "low", "top_k": k, "num_active_blocks": blocks, "num_samples": 6}
        path = folder / f"text_vqa_imgsizetier-low_crops12_topk{k}_blocks{blocks}.json"
        path.write_text(json.dumps(content | {"per_sample_results": cells}))


def _beams():
    table, _ = small_beams(6)
    write_rl_data(table, "rl.json")
    ids = table.pool.gather(1, table.sequences.flatten(1)).view(table.sequences.shape).tolist()
    scores = table.fields["beam_score"].tolist()
    legacy = {}
    for q, rows, score in zip(table.query_ids, ids, scores, strict=True):
        legacy[q] = {"id_list": [[*row, int(q)] for row in rows], "score_list": score}
    Path("legacy.json").write_text(json.dumps(legacy))
    save_file({"embeddings": table.candidates}, "c.safetensors")
    save_file({"embeddings": table.queries}, "q.safetensors")


def _checkpoint(path):
    save_checkpoint(path, *small_stack(60), {"test_rows": torch.arange(9)})


def _exported(path):
    small_stack(60)[0].export(path)


def _log():
    agent, table = small_stack(60)
    serve_requests(logging_model(Path("log"), agent, table, explore=0.3), table, 12)


def _tracker():
    Path("tracker.json").write_text(json.dumps(_restored({}).state()))


def _restored(state):
    tracker = LatencyTracker(configurations_of(TABLE), "digest")
    tracker.update(3, 1.0, 0.2, 4.0)
    if state:
        tracker.restore(state)
    tracker.update(1, 1.0, 0.2, 4.0)
    return tracker


def _measured():
    times = dict.fromkeys((*TIMES, "features_ms", "first_look_ms"), 1.5) | dict.fromkeys(TOKENS, 7)
    rows = {"sample_id": list("012345"), "content": list("abcdef")}
    Path("m").mkdir()
    others = {"repeat": 0, "max_crops": 2, "text": "a"}
    pl.DataFrame(rows | times | others).write_ndjson("m/measured.jsonl")


def _questions():
    Path("i.png").write_bytes(b"")
    rows = {"image": "i.png", "question": "what?", "answers": [["a", "b"]] * 3}
    pl.DataFrame({"id": range(3), **rows}).write_ndjson("q.jsonl")


def _runs():
    for number in (0, 1):
        write_run(Path(f"r{number}"), gain=0.1 * number, samples=range(12), seeds=(0,))


def _compared():
    with contextlib.redirect_stdout(io.StringIO()):
        comparison = compare(CompareRun(["r0", "r1"], html=None))
    return main_table(comparison), comparison.settings


def _chosen(controller):
    budgets = np.linspace(5, 60, 20, dtype=np.float32)
    return controller.choose(arrays(small_table(20)), budgets).tolist()


def _decided(path):
    controller = NumpyController.load(path)
    return [controller.configuration(index) for index in _chosen(controller)]


def _deployed(path):
    controller = load_checkpoint(path).controller
    state = controller.state_dict()
    broken = [name for name, value in state.items() if value.isnan().any()]
    return broken, _chosen(controller), {k: v.tolist() for k, v in state.items()}


def _same(result, files, whole, by_bytes):
    """Whoever rewrites a file on purpose has made another one."""
    return "something else" if by_bytes and result != whole else ""


def _whole(result, *about):
    return f"NaN in {result[0]}" if result[0] else _same(result, *about)


def _logged(result, files, whole, by_bytes):
    """Every row that is used is a line of the log, with numbers that can be."""
    lines = []
    for line in b"".join(files.values()).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    lines = [line for line in lines if isinstance(line, dict)]
    for row in result.rows:
        # the accuracy is that of the label
        if not any(row.items() <= (line | {"accuracy": row["accuracy"]}).items() for line in lines):
            return "a row that is no line"
        possible = 0 < row["probability"] <= 1 and row["budget_ms"] < np.inf
        if not (possible and row["answer_ms"] > 0):
            return f"a row with {row['probability']}, {row['answer_ms']}"
    return ""


def _by(wrong, *options):
    """A judge that gives the oracle the one file that was read."""
    return lambda result, files, whole, by_bytes: wrong(result, *files.values(), *options)


def _exp(core):
    return lambda result, files, whole, by_bytes: oracle.wrong_configurations(result, files, core)


def _file(path, make, read, *judge):
    return Format(partial(make, path), path, partial(read, path), *judge)


def _long(path, writer, rows):
    judge = _by(lambda table, content: oracle.wrong_table(table, *rows(content)))
    return _file(path, lambda path: getattr(_frame(), writer)(path), read_long_table, judge)


def _beam_file(path):
    about = path, "c.safetensors", "q.safetensors"
    return Format(_beams, path, partial(read_beam_data, *about), _by(oracle.wrong_beams))


def _claimed(path):
    claim_machine(Path(path), {"a": 1, "b": [2, 3]})


def _tracked():
    return _restored(oracle.strict(Path("tracker.json").read_bytes()))


def _written(path):
    write_features(TABLE, path)


FORMATS = {
    "long CSV": _long("t.csv", "write_csv", oracle.csv_rows),
    "long Parquet": _long("t.parquet", "write_parquet", oracle.parquet_rows),
    "JSON lines": _long("t.jsonl", "write_ndjson", oracle.json_rows),
    "exp5 and exp6": Format(
        lambda: write_exp5_exp6(_frame(), "a", "b", "text_vqa"),
        "[ab]/*/*.json",
        lambda: read_exp5_exp6("a", "b", "text_vqa"),
        _exp(False),
    ),
    "core_exp": Format(_core, "d/*/*.json", lambda: read_core_exp("d", "text_vqa"), _exp(True)),
    "features .npz": _file("f.npz", _written, read_features, _by(oracle.wrong_features, True)),
    "features .safetensors": _file(
        "f.safetensors", _written, read_features, _by(oracle.wrong_features, False)
    ),
    "beams, legacy": _beam_file("legacy.json"),
    "beams, RL data": _beam_file("rl.json"),
    "beam table": _file(
        "b.safetensors", small_beams(6)[0].save, lambda path: BeamTable.load(path).digest, _same
    ),
    "profile table": _file(
        "t.safetensors", TABLE.save, lambda path: ProfileTable.load(path).digest, _same
    ),
    # one that was rewritten to expect other features does not fit those of the profile
    "checkpoint": _file("s.pt", _checkpoint, _deployed, _whole)._replace(
        named=("features: block",)
    ),
    "exported controller": _file("s.npz", _exported, _decided, _same)._replace(
        refusals=(ValueError,)
    ),
    "request log": Format(_log, "log/requests-*", lambda: read_log("log"), _logged),
    "labels": Format(_log, "log/labels-*", lambda: read_log("log")),
    "tracker state": Format(
        _tracker, "tracker.json", _tracked, refusals=(InputError, oracle.Wrong), named=("",)
    ),
    "profiler: measured": Format(
        _measured, "m/measured.jsonl", lambda: read_measurements("m/measured.jsonl")
    ),
    "profiler: config": _file("config.json", _claimed, _claimed),
    "questions": Format(_questions, "q.jsonl", lambda: read_vqa_data("q.jsonl")),
}
for name in ("results.json", "config.yaml", "decisions.parquet", "metrics.csv"):
    FORMATS[f"run: {name}"] = Format(_runs, f"r0/{name}", _compared)


def _arrays_changed(path, content, random):
    file, out = io.BytesIO(content), io.BytesIO()
    if path.suffix == ".pt":
        tree = torch.load(file, weights_only=True)
        torch.save(mutate.tree_of_arrays_changed(tree, random, torch.from_numpy), out)
        return out.getvalue()
    tree = dict(np.load(file)) if path.suffix == ".npz" else safetensors_load(content)
    heads = [name for name in ("head", "header") if name in tree]
    if heads and random.random() < 0.5:
        head = mutate.json_changed(tree[heads[0]].tobytes(), random, [])
        tree[heads[0]] = np.frombuffer(head, np.uint8)
    else:
        tree = mutate.tree_of_arrays_changed(tree, random, np.asarray)
    if path.suffix == ".npz":
        np.savez(out, allow_pickle=False, **tree)
        return out.getvalue()
    ids = {"sample_id": json.dumps(TABLE.sample_ids)} if "image_features" in tree else None
    whole = {n: np.ascontiguousarray(np.atleast_1d(x)) for n, x in tree.items()}
    return bytes(safetensors_save(whole, ids))


CHANGES = {
    ".csv": mutate.csv_changed,
    ".json": mutate.json_changed,
    ".jsonl": mutate.json_changed,
    ".yaml": mutate.text_changed,
}


def _mutated(path, content, random, by_bytes, others):
    if by_bytes or not content:
        return mutate.damaged(content, random, others)
    try:
        if path.suffix in CHANGES:
            return CHANGES[path.suffix](content, random, others)
        if path.suffix == ".parquet":
            out = io.BytesIO()
            mutate.frame_changed(pl.read_parquet(io.BytesIO(content)), random).write_parquet(out)
            return out.getvalue()
        return _arrays_changed(path, content, random)
    except Exception:  # no file can hold what was drawn
        return mutate.damaged(content, random, others)


def trials(name, folder, seed, numbers):
    """Change the files of a format, let the product read them, and judge: number, outcome and a
    note of each trial."""
    about = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    about.make()
    files = {str(path): path.read_bytes() for path in sorted(Path().glob(about.files))}
    others, whole = list(files.values()), about.read()
    if wrong := about.judge(whole, files, whole, True):
        raise AssertionError(f"{name}: the oracle refuses the whole file: {wrong}")
    for number in numbers:
        random = Random(f"{seed} {name} {number}")
        path, by_bytes = random.choice(sorted(files)), number % 2 == 0
        content = _mutated(Path(path), files[path], random, by_bytes, others)
        Path(path).write_bytes(content)
        outcome, note = _outcome(about, path, files | {path: content}, whole, by_bytes)
        yield number, outcome, f"{'bytes' if by_bytes else 'structure'}: {note}" if note else ""
        Path(path).write_bytes(files[path])


class Mutations(NamedTuple):
    """The work of a child: each outcome is a line in its folder."""

    format: str
    seed: int
    numbers: list

    def __call__(self):
        path = Path("outcomes.jsonl").absolute()
        for trial in trials(self.format, Path("files"), self.seed, self.numbers):
            with path.open("a") as file:
                file.write(json.dumps(trial) + "\n")


def _outcome(about, path, files, whole, by_bytes):
    def too_late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LIMIT_S)
    try:
        result = about.read()
    except about.refusals as error:
        folders = [f"{place}{end}" for place in Path(path).parents for end in ": "]
        named = any(place in str(error) for place in (Path(path).name, *folders, *about.named))
        one_line = "\n" not in str(error).strip()
        return ("refused", "") if named and one_line else ("vague", f"{str(error)[:200]!r}")
    except TimeoutError:
        return "hang", ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{f.filename}:{f.name}" for f in where if "knobwise" in f.filename][-1:]
        line = str(error).partition("\n")[0][:120]
        return "traceback", f"{type(error).__name__}: {line} in {ours}"
    finally:
        signal.alarm(0)
    try:
        wrong = about.judge(result, files, whole, by_bytes)
    except oracle.Wrong as error:
        wrong = f"accepted: {error}"
    except Exception as error:
        wrong = f"accepted what the oracle cannot read: {type(error).__name__}: {str(error)[:120]}"
    return ("wrong", wrong) if wrong else ("fine", "")
