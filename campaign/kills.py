"""kill −9 at a random moment or at the k-th change of a file, torn files, and the same command
again."""

import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

from campaign.children import run
from campaign.state import State, difference, noise_of, state_of
from campaign.workloads import WORKLOADS
from knobwise.common.errors import InputError

BLOCK = 4096


def _whole_blocks(content):
    return content[: (len(content) - 1) // BLOCK * BLOCK]


TEARS = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "last block lost": _whole_blocks,
    "last block zero": lambda whole: _whole_blocks(whole).ljust(len(whole), b"\0"),
}
OF_READERS = ("export", "evaluate", "compare")
"""They take an instant, so what they read is torn."""
BY_NAME = {workload.name: workload for workload in WORKLOADS}


class Reference(NamedTuple):
    """What the unbroken command leaves, and where that differs from call to call."""

    prepared: Path
    state: State
    noise: set
    seconds: float
    writes: int


def reference_of(workload, folder):
    """Run the command twice without a break."""
    prepared, states = folder / "prepared", []
    shutil.rmtree(folder, ignore_errors=True)
    prepared.mkdir(parents=True)
    if (end := run(workload.prepare, prepared)).status != 0:
        raise RuntimeError(f"{workload.name}: cannot be prepared: {end.err}")
    for name in ("first", "second"):
        shutil.copytree(prepared, folder / name, symlinks=True)
        end = run(workload.work, folder / name, fresh=workload.fresh)
        if end.status != 0:
            raise RuntimeError(f"{workload.name}: {end.status} {end.err}")
        states.append(state_of(folder / name))
        shutil.rmtree(folder / name)
    # reports say when their run began
    reports = {(name, "") for name in states[0] if name.endswith("report.html")}
    noise = noise_of(*states) | {*workload.varies} | reports
    return Reference(prepared, states[0], noise, end.seconds, end.writes)


def kill_trial(workload, reference, folder, random, torn):
    """Kill it once or twice, tear a file if wanted, run it to its end. The outcome and a note."""
    shutil.copytree(reference.prepared, folder, symlinks=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    story = []
    again = partial(run, workload.work, folder, fresh=workload.fresh)
    for _ in range(random.choice((1, 1, 2))):
        death = {"die_after_s": random.uniform(0, reference.seconds)}
        if random.random() < 0.6:
            death = {"die_at": random.randint(1, max(1, reference.writes))}
        killed = again(**death, alone=random.random() < 0.3)
        story.append(str(death))
        if killed.status != -9:
            story[-1] += f" (ended with {killed.status} before)"
        if killed.status == 0 or _complete(folder, reference):
            break  # the same command would begin another run
        # what it started may complain of its death
        if killed.status != -9 and (outcome := _bad_end(killed)):
            return outcome, f"{' + '.join(story)}: {killed}"
    complete = _complete(folder, reference)
    path = _tear(workload, folder, before, random, story) if torn else None
    story = " + ".join(story)
    if path is None and complete:
        return "fine", f"{story}: after its last step"
    end = killed if killed.status == 0 and path is None else again()
    if complete and end.status == 0:
        return "fine", f"{story}: began another run"
    return _judged(workload, reference, folder, end, path, story)


def _complete(folder, reference):
    return not any(difference(state_of(folder), reference.state, reference.noise))


def _tear(workload, folder, before, random, story):
    paths = []
    for path in sorted(folder.glob(workload.torn)):
        if path.is_file() and not path.is_symlink() and "tensorboard" not in path.parts:
            content = path.read_bytes()
            if content and (workload.name in OF_READERS or before.get(path) != content):
                paths.append(path)
    if not paths:
        return None
    path, (name, tear) = random.choice(paths), random.choice(list(TEARS.items()))
    path.write_bytes(tear(path.read_bytes()))
    story.append(f"{path.relative_to(folder)}: {name}")
    return path


def _bad_end(end):
    return "hang" if end.status is None else "traceback" if end.traceback else ""


def _judged(workload, reference, folder, end, torn, story):
    if outcome := _bad_end(end):
        return outcome, f"{story}: {end}"
    named = torn is not None and torn.name in end.out + end.err
    if end.status != 0:
        plain = end.status == 2 and len(end.complaint) == 1 and named
        return ("refused" if plain else "vague" if torn else "unlike"), f"{story}: {end}"
    if workload.check is not None:
        checked = run(_Check(workload.name), folder)
        if outcome := _bad_end(checked):
            return outcome, f"{story}: check: {checked}"
        said = torn is not None and checked.status == 1  # what a tear took is counted by its reader
        wrong = checked.status and not said
        return "unlike" if wrong else "fine", f"{story}: {checked.err.strip()[-300:]}"
    left = difference(state_of(folder), reference.state, reference.noise)
    if torn is not None:
        if torn.suffix:  # a torn file that was only read stays as it is
            same = str(torn.relative_to(folder))
            left = left._replace(unlike=[x for x in left.unlike if not x.startswith(same)])
        if named and any(left):
            return "fine", f"{story}: said"
    if left.unlike:
        return "unlike", f"{story}: {left.unlike[:4]} {left.leftovers[:3]}"
    return ("leftovers", f"{story}: {left.leftovers[:4]}") if left.leftovers else ("fine", "")


class _Check(NamedTuple):
    """The check of a workload, in a process of its own."""

    name: str

    def __call__(self):
        try:
            wrong = BY_NAME[self.name].check()
        except InputError as error:
            wrong = [str(error)]
        if wrong:
            raise SystemExit("; ".join(wrong))
