"""docs/data_sets.md: what `experiments/studies/data_sets.py` measured, in tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.judging.evaluation import bootstrap, mean_ci95

Found = Mapping[str, Sequence[Mapping[str, Mapping[str, list[float]]]]]
"""Way → for each seed: policy → data set → utility of each test sample."""
FITTED = {"all": "all data sets", "all, told": "all data sets, told which", "own": "its own data set"}
FITTED |= {"others": "the other data sets", "others, told": "the other data sets, told which"}


def page_of(found: Found, facts: Mapping[str, Any]) -> str:
    """The page."""
    names = datasets(found)
    source = (
        "simulated, calibrated to published numbers (`knobwise.envs.simulated.calibrated`): nothing here was measured "
        "on a model"
        if facts["simulated"]
        else "measured"
    )
    parts = [
        "# Several data sets",
        "Made by `python experiments/studies/data_sets.py`. One policy for all data sets, one for each, or one that "
        "has never seen the data set it is judged on? "
        f"Profile {facts['profile']} ({source}): {facts['samples']:,} samples × "
        f"{facts['configurations']} configurations; data sets {', '.join(names)}. The policy is the "
        f"default one with {facts['members']} networks and, as experts, {', '.join(facts['simple'])}; *told* means "
        "that the data set is an input (`profile.dataset_input=true`). Judged on the "
        "same held-out fifth of each data set, mean utility over its five default budgets; "
        f"{len(facts['seeds'])} training seeds, 95 % bootstrap intervals over samples and seeds, those of differences "
        "paired. Leaving one out uses all samples of the others, validation included, and no sample of the data set.",
        "## What each gets",
        _markdown(*_main_table(found, facts)),
        "Static and the simple ways (" + ", ".join(facts["simple"]) + ") are fitted on the same samples as the policy "
        "of the same line, with the same features. Gap closed is (policy − static)/(oracle − static) over the test "
        "samples of all data sets, static being that of each data set.",
        "## Differences",
        _markdown(*_difference_table(found)),
        f"## {facts['folds']} folds",
        "Every sample of one data set is judged once, by what was fitted on the other folds; ± is the standard "
        "deviation between folds.",
        _markdown(*_fold_table(found, facts)),
    ]
    return "\n\n".join(parts) + "\n"


def lines_of(found: Found, facts: Mapping[str, Any]) -> list[str]:
    """The same tables for the terminal."""
    lines: list[str] = []
    for head, rows in (_main_table(found, facts), _difference_table(found), _fold_table(found, facts)):
        widths = [max(len(line[k]) for line in [head, *rows]) for k in range(len(head))]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *rows]
        ]
        lines.append("")
    return lines


def datasets(found: Found) -> list[str]:
    """The data sets, sorted."""
    return list(found["all"][0]["policy"])


def utilities(found: Found, fitted: str, policy: str, dataset: str) -> Tensor:
    """Float64 [S, n]: what `policy`, fitted as `FITTED` says, got for the test samples of a data set.

    What does not depend on the seed of training has S equal rows.
    """
    name, _, told = fitted.partition(",")
    way = fitted if name == "all" else f"{name} {dataset}" + (f",{told}" if told else "")
    return torch.tensor([seed[policy][dataset] for seed in found[way]], dtype=torch.float64)


def _main_table(found: Found, facts: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = datasets(found)
    head = ["policy", "fitted on", *names, "mean", "gap closed"]
    wanted = [("policy", fitted) for fitted in FITTED]
    wanted += [(simple, fitted) for simple in facts["simple"] for fitted in FITTED]
    wanted += [("static", fitted) for fitted in ("own", "all", "others")] + [("oracle", "all")]
    rows = []
    for policy, fitted in wanted:
        each = [utilities(found, fitted, policy, name) for name in names]
        cells = [_with_interval(one.mean(), mean_ci95(one)) for one in each]
        joined = torch.cat(each, 1)
        low, high = (
            torch.cat([utilities(found, "own", end, name) for name in names], 1)[0] for end in ("static", "oracle")
        )
        gap = float((joined.mean() - low.mean()) / (high.mean() - low.mean()))
        ends = bootstrap(joined, low, high)["gap_closed_ci95"]
        words = "" if policy == "oracle" else FITTED[fitted]
        shown = f"{gap:z.2f} [{ends[0]:z.2f}, {ends[1]:z.2f}]" if (policy, fitted) != ("static", "own") else "0"
        rows.append([_called(policy), words, *cells, f"{joined.mean():.3f}", "1" if policy == "oracle" else shown])
    return head, rows


COMPARED = (
    (("policy", "all"), ("policy", "own"), "one policy for all − one for each"),
    (("policy", "all, told"), ("policy", "all"), "told the data set − not told, one for all"),
    (("policy", "all, told"), ("policy", "own"), "one for all, told − one for each"),
    (("policy", "others"), ("policy", "own"), "never seen the data set − its own policy"),
    (("policy", "others, told"), ("policy", "others"), "never seen, told − not told"),
    (("policy", "others"), ("static", "own"), "never seen the data set − static of the data set"),
    (("policy", "others"), ("static", "others"), "never seen the data set − static that has not seen it either"),
    (("policy", "all"), ("static", "own"), "one policy for all − static of the data set"),
    (("static", "all"), ("static", "own"), "static of all − static of the data set"),
)


def _difference_table(found: Found) -> tuple[list[str], list[list[str]]]:
    names = datasets(found)
    rows = []
    for (policy, fitted), (other, basis), words in COMPARED:
        each = [utilities(found, fitted, policy, name) - utilities(found, basis, other, name) for name in names]
        joined = torch.cat(each, 1)
        rows.append([words, *(_signed(one) for one in [*each, joined])])
    return ["difference in utility", *names, "all samples"], rows


def _fold_table(found: Found, facts: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    first = datasets(found)[0]
    of_folds = [found[f"fold {number} {first}"] for number in range(facts["folds"])]

    def got(policy: str) -> list[Tensor]:
        return [torch.tensor([s[policy][first] for s in of_fold], dtype=torch.float64) for of_fold in of_folds]

    low, high = (torch.cat(got(end), 1)[0] for end in ("static", "oracle"))
    rows = []
    for policy in ("policy", *facts["simple"], "static", "oracle"):
        folds = got(policy)
        joined = torch.cat(folds, 1)
        spread = torch.stack([one.mean() for one in folds]).std()
        ends = bootstrap(joined, low, high)["gap_closed_ci95"]
        gap = float((joined.mean() - low.mean()) / (high.mean() - low.mean()))
        shown = {"static": "0", "oracle": "1"}.get(policy, f"{gap:z.2f} [{ends[0]:z.2f}, {ends[1]:z.2f}]")
        rows.append([_called(policy), _with_interval(joined.mean(), mean_ci95(joined)), f"± {spread:.3f}", shown])
    return [f"policy, {first}", "utility", "between folds", "gap closed"], rows


def _called(policy: str) -> str:
    words = {"policy": "learned policy", "static": "budget-aware static", "oracle": "oracle (upper bound)"}
    return words.get(policy, policy.replace("_", " "))


def _with_interval(mean: Tensor, ends: Tensor) -> str:
    return f"{mean:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def _signed(difference: Tensor) -> str:
    low, high = mean_ci95(difference).tolist()
    return f"{difference.mean():+z.3f} [{low:+z.3f}, {high:+z.3f}]"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
