"""The page of a study, docs/results.md: what is compared and in which words; tables and prose are in the template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from knobwise.experiments.command_line.compose import question_of
from knobwise.experiments.report import words
from knobwise.experiments.report.words import of_last_round, policy_name
from knobwise.experiments.results.problem import FEASIBLE, GRPO, LATENCY, problem_of
from knobwise.experiments.results.statistics import CHANCE, Difference
from knobwise.experiments.studies import findings
from knobwise.experiments.studies.findings import Section, SelectorSection, Study, StudyRun
from knobwise.experiments.studies.running import rendered


def results_page(study: Study, finished: Sequence[StudyRun], seeds: Sequence[int], unfinished: int = 0) -> str:
    """docs/results.md.

    Args:
        study: which experiments to show, and against what.
        finished: the finished runs.
        seeds: of the training.
        unfinished: how many runs of the study are not finished.
    """
    controllers, selectors = [], []
    for name, section in study.controllers.items():
        if runs := [run for run in finished if run.experiment == name]:
            controllers.append(_heading(name, section) | _controllers(study, name, section, runs, finished))
    demonstrations = {run.experiment: run.results for run in finished if run.profile == "beams"}
    for name, selector in study.selectors.items():
        if name in demonstrations:
            selectors.append(_heading(name, selector) | _selector(demonstrations[name], selector, demonstrations))
    families = [family for section in controllers for family in section["families"]]
    every = [difference for family in families for difference in family]
    measured = {run.profile: run.results["profile"] for run in finished if run.profile in study.profiles}
    return rendered(
        "results.md.j2",
        seeds=seeds,
        profiles=[(study.profiles[name], facts) for name, facts in measured.items()],
        unfinished=unfinished,
        chance=CHANCE,
        differences=every,
        outside=sum(d.ci95[0] > 0 or d.ci95[1] < 0 for d in every),
        families=families,
        controllers=controllers,
        selectors=selectors,
        study=study,
        beams=next(iter(demonstrations.values()), None),
        points=findings.points,
        words=words,
    )


def _heading(name: str, section: Section | SelectorSection) -> dict[str, Any]:
    anchor = "".join(c for c in section.title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return {**vars(section), "anchor": anchor, "question": question_of(name), "name": name}


def _controllers(
    study: Study, name: str, section: Section, runs: Sequence[StudyRun], finished: Sequence[StudyRun]
) -> dict[str, Any]:
    """What the page says about the runs of an experiment."""
    swept = any(run.variant for run in runs)
    profile_words = study.profiles[section.profiles[0]].words[:1] if len(section.profiles) > 1 else []
    families, lines, answers, compared_of = list[Sequence[Difference]](), list[str](), list[str](), {}
    for profile, facts in study.profiles.items():
        of_profile = [run for run in runs if run.profile == profile]
        compared = compared_of[profile] = findings.controller_differences(section, of_profile, finished)
        notes = list(findings.sentences(compared))
        if compared:
            families.append(compared)
            answer = findings.answer_on_baselines if section.baselines else findings.answer
            answers.append(f"{facts.name}: {answer(compared)}")
        for run in of_profile:
            if early := words.kept_before_grpo(run.results):
                seeds = f"in {early} of {len(run.results['chosen'])} seeds"
                notes.append(f"{run.label}: {seeds} the best checkpoint is from before GRPO.")
            if len(section.profiles) == 1 and (by_dataset := findings.differences_by_dataset(run)):
                families.append(by_dataset)
                sorted_out = findings.sorted_out(by_dataset)
                notes.append(f"{run.label} against budget-aware static, by data set: {sorted_out}.")
        lines += [f"{facts.name}: {note}" for note in notes]
    problem = problem_of(runs[0].results)
    bases = {d.against for compared in compared_of.values() for d in compared}
    return {
        "command": " ".join(["knobwise train", *["-m"] * swept, f"experiment={name}", *profile_words]),
        "runs": runs,
        "lines": lines,
        "answer": "; ".join(answers) or "not finished",
        "families": families,
        "score": next(metric for metric in problem.metrics if metric.key == problem.score),
        "fourth": FEASIBLE if FEASIBLE in problem.metrics else LATENCY,
        "base": bases.pop() if len(bases) == 1 else "what it is held against",
        "differences": {(profile, d.run): d for profile, compared in compared_of.items() for d in reversed(compared)},
        "leads": {(profile, d.run, d.against): d for profile, compared in compared_of.items() for d in compared},
    }


def _selector(
    results: Mapping[str, Any], section: SelectorSection, results_of: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What the page says about an experiment with a selector."""
    compared = findings.selector_differences(section, results)
    base = results_of.get(section.against)
    across = findings.network_differences(results, base) if base else []
    unpaired = "separate runs, not paired, so the interval is wide"
    lines = [*findings.sentences(compared)]
    lines += [f"{line[:-1]} ({unpaired})." for line in findings.sentences(across)]
    lines += _idle(results)
    rows = [*results["rows"], *results["controls"]]
    if not section.full:
        rows = [row for row in rows if "accuracy_per_seed" in row and row["policy"] != "random"]
    at: dict[str, dict[int, words.Row]] = {}
    for row in rows:
        at.setdefault(policy_name(row["policy"], results), {})[row["shots"]] = row
    # the answer to the question leaves out what is compared in every experiment
    common = {"sft"} if set(GRPO) & set(results["variants"]) else {"sft", "rce"}
    left_out = {policy_name(policy, results) for policy in common}
    main = across or [d for d in compared if d.against not in left_out]
    trained = results["trained_shots"]
    return {
        "results": results,
        "lines": lines,
        "votes": words.rows_at(results, trained, "votes") if section.full else {},
        "rows": dict(sorted(at.items(), key=lambda item: -item[1][trained]["accuracy"])),
        "answer": findings.answer(main) or "nothing compared",
    }


def _idle(results: Mapping[str, Any]) -> Iterator[str]:
    """Policies that training did not improve."""
    for policy, epochs in results.get("epochs", {}).items():
        if idle := epochs.count(0):
            seeds = f"in {idle} of {len(results['seeds'])} seeds"
            no_epoch = f"no epoch{of_last_round(policy)} beat its starting point on validation"
            yield f"{policy_name(policy, results)}: {seeds} {no_epoch}."
