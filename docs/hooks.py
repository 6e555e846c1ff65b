"""What the site has beyond the files in docs/, made while MkDocs builds it (`make docs`): the
tutorial from its notebook, a page for each command with every setting, the API reference, and the
project's own pages."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from knobwise.experiments.command_line import registry
from knobwise.experiments.command_line.help import help_lines
from knobwise.experiments.command_line.verbs import VERBS, settings_of_verb

ROOT = Path(__file__).resolve().parents[1]
PROJECT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
PROJECT |= {"CODE_OF_CONDUCT.md": "conduct.md"}
PACKAGES = ("knobwise", "knobwise.envs", "knobwise.agents", "knobwise.losses")
WORDS = {"True": "true", "False": "false"}
"""Defaults as they are typed."""
PROFILING = ("AdaptiveVLM", "FirstStage", "Request", "Answer")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the files outside docs/ that pages link to."""
    pages = {name: (ROOT / source).read_text() for source, name in PROJECT.items()}
    pages |= dict(command_pages()) | dict(reference_pages())
    pictures: dict[str, bytes] = {}
    pages["tutorial.md"] = tutorial(pictures)
    for name, content in {**pages, **pictures}.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Links and lists that work on GitHub work on the site: links lead to its pages, and a list
    needs no blank line."""
    markdown = re.sub(r"\]\((?:\.\./)(examples/\w+\.py)\)", r"](\1)", markdown)
    for source, name in PROJECT.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}", f"]({name}", markdown)
    markdown = re.sub(
        r"\]\((?:docs/|\.\./docs/)", "](", markdown.replace("](tutorial.ipynb)", "](tutorial.md)")
    )
    parts = re.split(
        r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL
    )  # code is left alone
    parts[::2] = (
        re.sub(r"(?<=\n)((?![-*>| ]|\d+\.)\S.*\n)(?=(?:[-*]|1\.) )", r"\1\n", part)
        for part in parts[::2]
    )
    return "".join(parts)


# -- the tutorial ----------------------------------------------------------------------------------


def tutorial(pictures: dict[str, bytes]) -> str:
    """The notebook as Markdown. Its pictures are put into `pictures`, by file name."""
    parts = []
    for cell in json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"tutorial-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![what this cell draws]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


# -- commands and settings -------------------------------------------------------------------------


def command_pages() -> Iterator[tuple[str, str]]:
    """A page for each command, with the settings that `knobwise VERB --help` lists, from the
    dataclasses."""
    usage = (ROOT / "experiments" / "command_line" / "usage.txt").read_text()
    yield "commands/index.md", f"# Commands\n\n```text\n{usage}```\n"
    for verb in VERBS:
        settings = settings_of_verb(verb)
        title = f"knobwise {verb.replace('_', ' experiment=')}"
        summary = " ".join(str(settings.__doc__).split())
        summary = summary.removeprefix(f"{title}: ").removeprefix("knobwise ")
        yield (
            f"commands/{verb}.md",
            f"# {title}\n\n{summary[0].upper()}{summary[1:]}\n" + "".join(sections(verb)),
        )


def sections(verb: str) -> Iterator[str]:
    """A heading and a table for each group of settings; then the experiments."""
    lines = help_lines(verb)
    titles = {line.key: line.meaning for line in lines if not line.default}
    groups: dict[str, list[registry.Option]] = {}
    for line in lines:
        if line.default:
            groups.setdefault(line.choice or line.key.rpartition(".")[0], []).append(line)
    for name, options in groups.items():
        yield f"\n## {name or 'Settings'}\n\n{titles.get(name, '')}\n\n"
        yield "| setting | default | meaning |\n| --- | --- | --- |\n"
        for option in options:
            default = WORDS.get(option.default, option.default)
            default = ", ".join(ast.literal_eval(default)) if default.startswith("{'") else default
            # outside code nothing is Markdown but code
            meaning = re.sub(r"(`[^`]*`)|([|<*_])", lambda m: m[1] or f"\\{m[2]}", option.meaning)
            yield f"| `{option.key}` | `{default}` | {meaning} |\n"
    if verb.startswith("train"):
        yield "\n## Experiments\n\n| experiment | question |\n| --- | --- |\n"
        for name in registry.names_of_choices("experiment"):
            if registry.schema_of("train", [f"experiment={name}"]) == verb:
                yield f"| `{name}` | {registry.question_of_experiment(name)} |\n"


# -- the API reference -----------------------------------------------------------------------------


def reference_pages() -> Iterator[tuple[str, str]]:
    """A page for each package, with its public names."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = [f"{package}.{name}" for name in module.__all__ if not name.startswith("__")]
        yield reference_page(package, str(module.__doc__), names)
    names = [f"knobwise.profiling.measuring.adaptive_model.{name}" for name in PROFILING]
    yield reference_page(
        "knobwise.profiling", "What a model implements that is to be profiled and served.", names
    )


def reference_page(package: str, summary: str, names: list[str]) -> tuple[str, str]:
    blocks = "\n\n".join(f"::: {name}" for name in names)
    return f"api/{package.rpartition('.')[2]}.md", f"# {package}\n\n{summary}\n\n{blocks}\n"
