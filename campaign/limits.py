"""Limits of the machine and of the person: a trial for each, in a new interpreter."""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache, partial

from campaign import ROOT
from campaign.children import VARIABLES, Ended, run
from campaign.kills import reference_of
from campaign.state import difference, state_of
from campaign.workloads import LEAN, TABLE, Workload, write_table

LIMIT_S = 300
DROP_CAPABILITY, MAY_WRITE_ANYWHERE = 24, 1
"""PR_CAPBSET_DROP and CAP_DAC_OVERRIDE of Linux."""
INSPECT = ["inspect", *TABLE, "json=i.json"]
RUN = Workload("lean", write_table, [*LEAN, "name=r"], "")


def _begun(words, folder, before=None, **variables):
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT), **variables}
    # where a file may not be long, Python leaves half a .pyc, which later commands trip over
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment = {name: value for name, value in environment.items() if value != "(unset)"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
    command = [sys.executable, "-m", "knobwise", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=before, **pipes)


def _ended(process):
    with process:
        try:
            printed = process.communicate(timeout=LIMIT_S)
            return Ended(process.returncode, *printed, 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return Ended(None, "", "", LIMIT_S)


def _judged(end, statuses=(0, 1, 2), blames="", says=""):
    """Fine, or a complaint of one line, which says this and must not blame that file."""
    if end.status is None:
        return "hang", str(end)
    if end.traceback:
        return "traceback", str(end)
    if end.status == 0:
        return ("fine", "") if 0 in statuses else ("wrong", str(end))
    blamed = blames and blames in end.err
    plain = len(end.complaint) == 1 and end.status in statuses and not blamed and says in end.err
    return "refused" if plain else "vague", str(end)


def _tried(folder, words=INSPECT, before=None, statuses=(0, 1, 2), blames="", says="", **variables):
    return _judged(_ended(_begun(words, folder, before, **variables)), statuses, blames, says)


def _lower(limit, value):
    return partial(resource.setrlimit, limit, (value, value))


def _removed(folder):
    place = folder / "gone"
    place.mkdir()
    return _tried(place, before=place.rmdir)


def _full_disk(folder):
    """On a file system of its own, which is full before the run has ended."""
    place = folder / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", place], check=True)
    try:
        for name in ("t.parquet", "f.npz"):
            shutil.copy(folder / name, place)
        return _tried(place, RUN.work, statuses=(1,))
    finally:
        subprocess.run(["umount", place], check=True)


def _read_only(folder):
    folder.chmod(0o555)

    def lower():  # root has it; others have none to drop
        ctypes.CDLL(None).prctl(DROP_CAPABILITY, MAY_WRITE_ANYWHERE, 0, 0, 0)

    try:
        return refused(folder, RUN.work, lower)
    finally:
        folder.chmod(0o755)


def _at_once(folder):
    """Two of the same command: both end well, as one after the other does."""
    both = [_begun(RUN.work, folder) for _ in range(2)]
    worst = max(_judged(_ended(process)) for process in both)
    if worst != ("fine", ""):
        return worst
    states = [state_of(folder / "runs/lean" / name) for name in ("r", "r-2")]
    unlike = difference(*states, noise=set()).unlike if all(states) else ["there are not two runs"]
    named = ("report.html", "config.yaml", "results.json .command")
    unlike = [place for place in unlike if not place.startswith(named)]
    return ("unlike", str(unlike[:4])) if unlike else ("fine", "")


def _stopped(folder, number, status, set_back_s=0.0):
    """It saves, says how to go on, and ends like the unbroken run; also where the clock was set
    back meanwhile, so that its files are from the future."""
    shutil.rmtree(folder)
    reference = reference_of(RUN, folder.with_name(f"{folder.name}-reference"))
    shutil.copytree(reference.prepared, folder, symlinks=True)
    end = run(RUN.work, folder, die_after_s=reference.seconds * 0.4, number=number)
    if end.status != status or "repeat the command to resume" not in end.err:
        return ("traceback" if end.traceback else "vague"), str(end)
    for path in folder.rglob("*"):
        modified_s = path.lstat().st_mtime + set_back_s
        os.utime(path, (modified_s, modified_s), follow_symlinks=False)
    end = run(RUN.work, folder)
    if end.status != 0:
        return _judged(end)
    left = difference(state_of(folder), reference.state, reference.noise)
    # a stop saves once more, so the checkpoint before the last may be that of the stop
    left = left._replace(unlike=[place for place in left.unlike if "/previous.pt " not in place])
    return ("unlike" if left.unlike else "leftovers", str(left)) if any(left) else ("fine", "")


refused = partial(_tried, statuses=(2,))
fine = partial(_tried, statuses=(0,))
inspected = partial(_tried, blames="t.parquet")
stopped = partial(_stopped, number=signal.SIGINT, status=130)
LIMITS = {
    "file size": partial(_tried, words=RUN.work, before=_lower(resource.RLIMIT_FSIZE, 20_000)),
    "open files": partial(inspected, before=_lower(resource.RLIMIT_NOFILE, 12)),
    "address space": partial(inspected, before=_lower(resource.RLIMIT_AS, 4 << 30)),
    "more address space": partial(inspected, before=_lower(resource.RLIMIT_AS, 8 << 30)),
    "ASCII output": partial(fine, PYTHONIOENCODING="ascii", LC_ALL="C"),
    "removed working folder": _removed,
    "no home": partial(fine, HOME="(unset)", XDG_CACHE_HOME="(unset)"),
    "read-only folder": _read_only,
    "two at once": _at_once,
    "Ctrl-C": stopped,
    "clock set back": partial(stopped, set_back_s=86_400.0),
    "SIGTERM": partial(_stopped, number=signal.SIGTERM, status=143),
    "long option": partial(refused, words=[*LEAN, f"name={'a' * 5000}"], says="name"),
    "long path": partial(refused, words=[*INSPECT, f"profile.path={'a' * 5000}"], says="aaa"),
    "profile=0": partial(refused, words=["inspect", "profile=0"], says="profile"),
}
if os.geteuid() == 0:  # who else may not mount
    LIMITS["full disk"] = _full_disk


def limit_trial(name, folder):
    """One limit, in a folder with a table. Raises RuntimeError if commands fail without it, so that
    a command that never begins does not count as one that met its limit."""
    _without_limits()
    folder.mkdir(parents=True)
    _prepare(folder)
    return LIMITS[name](folder)


def _prepare(folder):
    if (prepared := run(write_table, folder)).status != 0:
        raise RuntimeError(f"limits: no table: {prepared}")


@cache
def _without_limits():
    for words in (INSPECT, RUN.work):
        with tempfile.TemporaryDirectory() as folder:
            _prepare(folder)
            if (end := _ended(_begun(words, folder))).status != 0:
                raise RuntimeError(f"limits: {' '.join(words)}: {end}")
