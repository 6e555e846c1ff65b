"""What choosing demonstrations gains, and what of the training matters: every experiment of the selector, and the page
docs/selector.md.

    python experiments/selector_study.py key=value …

Some forty minutes on two cores; an experiment that is finished is not run again, and one that was stopped goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole
from knobwise.experiments.selector_settings import changed
from knobwise.experiments.selector_verdict import policy_words
from knobwise.experiments.settings import CONF

SECTIONS = {
    "selector": "What post-training gains",
    "selector_careful": "Where imitation gets nothing wrong",
    "selector_groups": "Which sequences form a group",
    "selector_rewards": "Reward modes",
    "selector_weights": "Hard and soft weights",
    "selector_advantages": "Rank against z-score",
    "selector_warm_up": "With and without warm-up",
    "selector_curriculum": "Curriculum",
    "selector_conditional": "Conditional training",
    "selector_kl": "The KL to the SFT policy",
    "selector_v0": "Network: v0",
    "selector_v1": "Network: v1",
    "selector_convex": "State update: convex",
    "selector_linear": "Projections: linear",
}
"""Experiments by name, in the order of the page, and their headings."""
NOT_LEARNED = ("best_recorded", "oracle")
BETWEEN = ("sft", "rce", "grpo_recorded", "grpo_live")
"""Rows by which networks are compared."""


@dataclass
class StudyConfig:
    """The settings, each as key=value."""

    experiments: list[str] = field(default_factory=lambda: list(SECTIONS))
    """Which of them; the page shows all that are finished."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds."""
    runs: str = "runs"
    """Where the runs are kept."""
    out: str = "docs/selector.md"
    """The page."""
    jobs: int = 2
    """Seeds trained at the same time."""


def run(config: StudyConfig) -> Path:
    """Run what is not finished, and write the page; gives its path.

    Raises:
        InputError: an unknown experiment.
    """
    from knobwise.experiments import selector
    from knobwise.experiments.settings import read_settings

    if unknown := set(config.experiments) - set(SECTIONS):
        raise InputError(f"experiments={sorted(unknown)}: must be among {', '.join(SECTIONS)}")
    for name in config.experiments:
        if not _results(config, name).exists():
            seeds = f"seeds=[{','.join(map(str, config.seeds))}]"
            words = [f"experiment={name}", seeds, "name=study", f"runs={config.runs}", f"jobs={config.jobs}"]
            selector.run(read_settings("train_selector", [*words, "tracking=disabled"]), words[:2])
    found = {name: json.loads(path.read_text()) for name in SECTIONS if (path := _results(config, name)).exists()}
    with written_whole(config.out) as temporary:
        temporary.write_text(page_of(found), encoding="utf-8")
    return Path(config.out)


def _results(config: StudyConfig, name: str) -> Path:
    return Path(config.runs) / name / "study" / "results.json"


def question_of(experiment: str) -> str:
    """What an experiment asks, from the head of its file."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    comment = [line.removeprefix("#").strip() for line in lines[: [line[:1] for line in lines].index("e")]]
    return " ".join(line for line in comment if line)


def page_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from the `results.json` of each experiment."""
    some = next(iter(found.values()))
    parts = [
        "# Choosing demonstrations",
        "Made by `python experiments/selector_study.py`, from the built-in beams: queries about canvases (a digit, a "
        "frame, a texture), half of them with two questions that must both be right, labels permuted for each query, "
        "answered by a small learner from the demonstrations alone. Six of ten annotators are careless: their canvases "
        "are clean and four in ten of their labels wrong; the selector sees who annotated, the learner does not. "
        f"Accuracy on {some['test_queries']:,} held-out queries, each with its own pool of 48 out of a bank that "
        f"training never used; {len(some['seeds'])} seeds; 95 % bootstrap intervals over queries and seeds, those of "
        "differences paired. All were trained at two shots. The best epoch is chosen on 330 other queries.",
    ]
    for name, results in found.items():
        parts += [f"## {SECTIONS[name]}", f"*{question_of(name)}* `knobwise train experiment={name}`"]
        parts.append(_table(results))
        parts += _sentences(name, results)
    return "\n\n".join(parts) + "\n"


def _table(results: Mapping[str, Any]) -> str:
    shots = results["shots"]
    own = results["experiment"] != "selector"
    rows = [row for row in [*results["rows"], *results["controls"]] if not own or _is_trained(row)]
    at = {(row["policy"], row["shots"]): row for row in rows}
    trained = results["trained_shots"]
    names = sorted({row["policy"] for row in rows}, key=lambda name: -at[name, trained]["accuracy"])
    head = ["policy", *(f"{count} shot{'s' * (count > 1)}" for count in shots)]
    lines = [head, ["---"] * len(head)]
    for name in names:
        lines.append([policy_words(name, results), *(_cell(at.get((name, count))) for count in shots)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_trained(row: Mapping[str, Any]) -> bool:
    return "accuracy_per_seed" in row and row["policy"] != "random"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    low, high = row["accuracy_ci95"]
    return f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def _sentences(name: str, results: Mapping[str, Any]) -> list[str]:
    """Differences at the trained number of shots, each with its interval."""
    at = {
        (row["policy"], row["against"]): row
        for row in results["differences"]
        if row["shots"] == results["trained_shots"]
    }
    if name == "selector":
        wanted = [pair for pair in at if pair[0] in ("grpo_live", "grpo_rounds", "grpo_recorded") and pair[1] == "rce"]
        wanted += [("rce", "sft"), ("sft", "part_similarity"), ("shuffled_recorded", "sft"), ("shuffled_live", "sft")]
        wanted += [("hidden_live", "hidden_sft")]
    elif any(policy in BETWEEN[2:] for policy, _ in at):
        wanted = [("rce", "sft"), ("grpo_recorded", "rce"), ("grpo_live", "rce")]
    else:
        first = next(iter(results["variants"]))
        wanted = [("rce", "sft")] if any(results.get("epochs", {}).get("rce", [])) else []
        wanted += [(first, "rce"), *((variant, first) for variant in results["variants"] if variant != first)]
    lines = [_difference(at[pair], results) for pair in wanted if pair in at] + _idle(results)
    if name == "selector":
        votes = {row["policy"]: row for row in results.get("votes", []) if row["shots"] == results["trained_shots"]}
        lines += [
            f"Without the learner, the majority of the labels that {policy_words(policy, results)} chose is right for "
            f"{_cell(votes[policy])}"
            for policy in ("sft", "grpo_live")
            if policy in votes
        ]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _idle(results: Mapping[str, Any]) -> list[str]:
    """Trainings that changed nothing: the start was the best on validation, and went on."""
    idle = {name: epochs.count(0) for name, epochs in results.get("epochs", {}).items()}
    seeds = len(results["seeds"])
    return [
        f"{policy_words(name, results)}: no epoch was better on validation than its start in {count} of {seeds} seeds"
        for name, count in idle.items()
        if count
    ]


def _difference(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    low, high = row["ci95"]
    words = f"{policy_words(row['policy'], results)} − {policy_words(row['against'], results)}: "
    words += f"{100 * row['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    return words if low > 0 or high < 0 else words + ", no difference shown"


def main(words: Sequence[str]) -> int:
    """Run from `key=value` words; 2 when one of them is wrong."""
    try:
        config = changed(StudyConfig(), OmegaConf.from_dotlist(list(words)), "selector_study")
        print(f"page: {run(config)}")
    except InputError as error:
        print(f"selector_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
