"""What the page of a live run has besides that of any run: how it was served, what the tracker
believed, and the replay of the same decisions."""

from __future__ import annotations

from knobwise.experiments.evidence.schema import LiveFacts, RunResults
from knobwise.experiments.report.tables import Folded, records, texts
from knobwise.experiments.wording.choice_sentences import setting
from knobwise.experiments.wording.words import number, policy_name

COMPARED = {
    "accuracy": "accuracy",
    "latency_ms_mean": "mean ms",
    "satisfaction": "share on time",
    "utility": "utility",
}
"""What a live run compares with its replay, in words."""


def machine_words(results: RunResults) -> str:
    """Say what the requests were served on, and by which profile."""
    machine = results["live"]["machine"]
    return (
        f"{machine['cpu']}, torch {machine['torch']}, one thread, load {machine['load']:.1f}, "
        f"jitter {number(machine['jitter'], '.1%')} · profile {results['profile']['name']}"
    )


def on_serving(live: LiveFacts) -> list[str]:
    """Say what the controller added to the model's time, and whether a replay on the profile fares
    as the live run did, if there is one."""
    overhead = number(live["overhead"]["share"], ".1%")
    lines = [f"The controller added {overhead} to the model's mean inference time."]
    rows = live["agreement"]
    differing = [
        f"{COMPARED[row['what']]} of {policy_name(row['policy'])}"
        for row in rows
        if not row["agrees"]
    ]
    if differing:
        lines.append(
            f"Live and replay agree in {len(rows) - len(differing)} of {len(rows)} numbers; they "
            f"differ in {', '.join(differing)}."
        )
    elif rows:
        lines.append("Live and replay agree: accuracy exactly, the rest within the 95% intervals.")
    return lines


def details_of(results: RunResults) -> list[Folded]:
    """Return the folded tables that are about serving."""
    live = results["live"]
    about = texts()["about"]
    served = {
        "requests": f"{live['requests']:,}",
        "budgets": ", ".join(f"{budget:.2f}" for budget in results["budgets_ms"]),
        "clock": {"wall": "wall time", "cpu": "CPU time of the thread"}[live["clock"]],
    }
    same = live["decisions"].get("as_replayed_at_the_same_limit")
    serving = records([{**live["overhead"], **live["speed"], "same": same}], "serving")
    # what the tracker believed when the run ended
    tracker = [{"part": part, "factor": factor} for part, factor in live["tracker"].items()]
    ignored = about["tracker"].format(ignored=live["ignored"])
    fixed = {policy_name(name): setting(knobs) for name, knobs in live["configurations"].items()}
    details = [
        Folded("How it was served", [about["serving"].format(**served), serving], open=True),
        Folded("The tracker", [ignored, records(tracker, "tracker")]),
        Folded("The fixed configurations", [fixed]),
    ]
    if live["agreement"]:
        replay = records(live["agreement"], "replay")
        details.insert(1, Folded("Live and replay", [about["replay"], replay]))
    return details
