"""Text on the command line, such as paths and names: taken as it is typed, whatever Hydra's grammar
makes of it; and the commands that are printed, each of which can be pasted into a shell."""

import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import TABLE, UNTAUGHT, jobs_of, launch, mistake, read_json, words_of, write_table
from omegaconf import OmegaConf

from knobwise.__main__ import main
from knobwise.experiments.command_line import main as command_line
from knobwise.experiments.command_line import profile, train
from knobwise.experiments.command_line.compose import (
    compose_config,
    in_grammar,
    read_settings,
    text_options,
)
from knobwise.experiments.command_line.grammar import TEXT, kinds_of_options
from knobwise.experiments.command_line.registry import READERS, readers_of
from knobwise.experiments.command_line.verbs import VERBS
from knobwise.experiments.deploy.update import CURRENT
from knobwise.experiments.evidence.run_folder import command_of, run_name
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.settings.words import shell_word
from knobwise.experiments.train.finish import next_command, print_finished, words_of_inspect

NAMES = [
    "ü",
    "数据",
    "run#1",
    "it's",
    'say "x"',
    "a(b)",
    "a b",
    " a ",
    "a,b",
    "[a]",
    "{a: b}",
    "a=b",
    "date=2026-01-31",
    "~",
    "$x",
    "${x}",
    "a${b",
    "\\${x}",
    "a\\b",
    "a\\'b",
    "*",
    "100%",
    "-a",
    "1e5",
    "007",
    "true",
    "null",
    "'quoted'",
    "a;b&c|d",
    "choice(a)",
]
"""Most of them mean something else to Hydra, to OmegaConf or to a shell."""


@pytest.fixture
def folder(home):
    """An empty folder with a long table and its features."""
    write_table()
    return home


# -- what is typed ---------------------------------------------------------------------------------


def by_day(names, every=4):
    """Each fourth of these on each run, the others by `make campaign`: each is composed by Hydra."""
    return [
        name if place % every == 0 else pytest.param(name, marks=pytest.mark.campaign)
        for place, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", by_day(NAMES))
def test_a_file_that_exists_is_taken_by_its_name(name, folder):
    shutil.copy("t.parquet", f"{name}.parquet")
    Path("f.npz").rename(name)  # without any ending
    words = ["profile=table", f"profile.path={name}.parquet", f"profile.features={name}"]
    settings = read_settings("inspect", words).profile
    assert (settings.path, settings.features) == (f"{name}.parquet", name)
    joint = read_settings("inspect", ["profile=joint", f"profile.paths=[{name},{name}.parquet]"])
    assert joint.profile.paths == [name, f"{name}.parquet"]
    # its folder, too
    Path(f"{name}d").mkdir()
    shutil.move(f"{name}.parquet", f"{name}d/t.parquet")
    words = ["profile=table", f"profile.path={name}d/t.parquet"]
    assert read_settings("inspect", words).profile.path == f"{name}d/t.parquet"
    assert read_profile(read_settings("inspect", words).profile).num_samples == 60


PLAIN = [name for name in NAMES if name not in ("null", "'quoted'", "choice(a)")]
"""Those that mean themselves even without a file."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_that_is_text_holds_what_was_typed(verb, home):
    options = {key for key, held in text_options(verb).items() if TEXT in held}
    in_groups = {key for key in options if key.partition(".")[0] in READERS}
    check_text(verb, [], options - in_groups)
    for group in GROUPS.get(verb, ()):
        for choice, settings in readers_of(group).items():
            held = kinds_of_options(settings(), {})
            names = {f"{group}.{name}" for name, kinds in held.items() if TEXT in kinds}
            check_text(verb, [f"{group}={choice}"], names)


GROUPS = {"inspect": ["profile"], "update": ["trained_on"], "train_selector": ["beams", "encoder"]}


def check_text(verb, words, keys):
    """All of these options get one of the names each, and later others."""
    # where there may be a list, this one is a list
    names = [name for name in PLAIN if name != "[a]"]
    for shift in range(0, len(names), 14):
        values = {key: names[(i + shift) % len(names)] for i, key in enumerate(sorted(keys))}
        typed_words = [f"{key}={value}" for key, value in values.items()]
        config = compose_config(verb, [*words, *in_grammar(verb, typed_words)])
        for key, value in values.items():
            assert OmegaConf.select(config, key) == value


def test_null_is_none_and_quotes_and_interpolations_mean_what_they_do_in_hydra(home, monkeypatch):
    monkeypatch.setenv("WHERE", "w")
    words = words_of("model=ocr data=null out=${model}/${oc.env:WHERE}")
    settings = read_settings("profile", [*words, "knobs.name='a, b'"])
    assert (settings.data, settings.out, settings.knobs.name) == (None, "ocr/w", "a, b")
    settings = read_settings("inspect", ["profile=exp5_exp6", "profile.dataset_name=[a,b]", *EXP])
    assert settings.profile.dataset_name == ["a", "b"]


EXP = words_of("profile.exp5_dir=5 profile.exp6_dir=6")


@pytest.mark.parametrize("name", by_day(PLAIN))
def test_a_file_that_is_missing_is_named_as_it_was_typed(name, home, capsys):
    words = ["inspect", "profile=table", f"profile.path={name}"]
    if name == "[a]":
        name = "a"  # a list of one file
    # what surrounds a message is not printed
    assert f"knobwise: {name.lstrip()}: no such file" in mistake(words, capsys)
    assert f"knobwise: {name.lstrip()}: no such" in mistake(
        ["evaluate", f"checkpoint={name}"], capsys
    )
    if name != "-a":
        assert f"{name.lstrip()}/x: no such folder" in mistake(["compare", f"{name}/x"], capsys)


def test_outputs_get_the_names_that_were_typed(folder):
    for name in PLAIN:
        assert read_settings("inspect", [*TABLE, f"json={name}.json"]).json == f"{name}.json"
    for name in PLAIN[::5]:
        launch(["inspect", *TABLE, f"json={name}.json"])
        assert read_json(f"{name}.json")["samples"] == 60


def test_commas_part_the_jobs_of_a_sweep_unless_a_file_has_them(folder):
    for name in ("a(b).csv", "c,d.csv", "e.csv"):
        shutil.copy("t.parquet", name)
    words = [*words_of("profile=table tracking=disabled"), "profile.path=ü.csv,a(b).csv,c,d.csv"]
    assert [job.profile.path for job in jobs_of(words)] == ["ü.csv", "a(b).csv", "c,d.csv"]
    # Hydra's own ways stay
    for typed_path in ("choice(x.csv,e.csv)", "'x.csv','e.csv'", "x.csv,e.csv"):
        jobs = jobs_of([*words[:-1], f"profile.path={typed_path}"])
        assert [job.profile.path for job in jobs] == ["x.csv", "e.csv"]


def test_bytes_that_are_no_text_are_refused(home, capsys):
    words = ["inspect", "profile=table", "profile.path=\udcfc.csv"]
    assert "UTF-8" in mistake(words, capsys)


# -- what is printed -------------------------------------------------------------------------------


def pasted(command):
    """The words of a printed command, as a shell parses it, without the program."""
    program, *words = shlex.split(command)
    assert program == "knobwise"
    return words


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", by_day(NAMES))
def test_a_printed_word_is_read_back_as_this_text(name, exists, home):
    if exists:
        Path(name).mkdir()
    (word,) = shlex.split(shell_word("checkpoint", name))
    assert read_settings("export", [word]).checkpoint == name
    path = Path(name) / CURRENT
    (word,) = shlex.split(shell_word("checkpoint", path))
    assert read_settings("update", [word]).checkpoint == str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_table()
        quick = words_of("policy=independent policy.fold_networks=1 baselines=false seeds=[0]")
        launch("train", TABLE, UNTAUGHT, quick, "name=one")
    return folder


@pytest.mark.parametrize("name", by_day(NAMES[::2]))
def test_the_next_command_of_a_run_works_whatever_its_name(name, trained, monkeypatch):
    monkeypatch.chdir(trained)
    run = Path("runs/controller/one")
    if not (renamed := run.with_name(name)).exists():
        shutil.copytree(run, renamed)
    words = pasted(next_command(renamed))
    assert words[0] == "export"
    # what is worse than static is not for deployment
    assert pasted(next_command(renamed, gain=-1)) == ["compare", "runs/controller"]
    assert main([*words, "out=exported"]) == 0
    assert read_json("exported/export.json")["checkpoint"]["path"].startswith(str(renamed))
    # a run without a controller is to be compared with the others
    (renamed / "controller.npz").unlink()
    words = pasted(next_command(renamed))
    assert words == ["compare", "runs/controller"]
    assert main(["compare", str(run), str(renamed), "html=null"]) == 0


def test_the_next_command_of_the_only_run_without_a_controller_runs(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained)
    only = tmp_path / "runs" / "alone"
    shutil.copytree("runs/controller/one", only)
    (only / "controller.npz").unlink()
    words = pasted(next_command(only))
    assert words[0] == "evaluate"
    assert main([*words, "json=alone.json"]) == 0


RUN = {"profile": {"name": "ocr"}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"command": "knobwise train profile=ocr profile.samples=30 seeds=[0]"},
            ["profile=ocr", "profile.samples=30"],
        ),
        (
            {"command": "knobwise train 'budgets_ms=[3,4]' profile=ocr"},
            ["budgets_ms=[3,4]", "profile=ocr"],
        ),
        # the default, and what the experiment chose
        ({"command": "knobwise train", "profile": {"name": "builtin"}}, ["profile=builtin"]),
        ({"command": "knobwise train experiment=shots profile.samples=30"}, []),
        # what inspect does not ask
        (
            {
                "command": "knobwise train profile=ocr rule=mine:Rule",
                "rule": {"name": "mine:Rule", "numbers": {}},
            },
            [],
        ),
        ({"command": "knobwise train profile=ocr policy.promise=0.9", "promises": [{}]}, []),
        ({"command": "knobwise train profile=ocr budget=mean", "sense": "mean"}, []),
    ],
)
def test_a_run_without_a_gain_is_inspected_where_inspect_asks_the_same(content, words):
    assert words_of_inspect(RUN | content) == words


def test_the_next_command_of_a_run_is_printed_and_runs(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    name = "ü,b (c)=[d]{e}~'\"$x${y}"
    words = words_of("policy=independent policy.fold_networks=1 baselines=false seeds=[0]")
    launch(["train", *TABLE, *UNTAUGHT, *words, f"name={name}"])
    printed = capsys.readouterr().out
    (following,) = [line for line in printed.splitlines() if line.startswith("next:")]
    # five samples show no gain, so it looks at the profile
    following = pasted(following.partition(":")[2].strip())
    assert following[0] == "inspect"
    assert main(following) == 0
    run = Path("runs/controller") / name
    # with a gain it is exported
    content = read_json(run / "results.json")
    (row,) = (
        row for row in content["rows"] if (row["policy"], row["budget_ms"]) == ("controller", None)
    )
    row["over_static_ci95"] = [0.1, 0.2]
    print_finished(run, content, "disabled")
    (following,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("next:")
    ]
    assert main([*pasted(following.partition(":")[2].strip()), "out=odd"]) == 0
    # its settings are read again as text, and the command in its results is the same
    launch(["evaluate", f"checkpoint={run}", "json=e.json"])
    command = read_json(run / "results.json")["command"]
    assert read_settings("train", pasted(command)[1:]).name == name


@pytest.mark.parametrize("name", by_day(NAMES))
def test_the_next_command_of_a_measured_profile_reads_it(name, folder, monkeypatch, capsys):
    measured = Path(name)
    measured.mkdir()
    shutil.copy("t.parquet", measured / "table.parquet")
    shutil.copy("f.npz", measured / "features.npz")
    monkeypatch.setattr(profile, "inspect", Mock())
    profile._summary(measured)
    started = Mock()
    monkeypatch.setattr(train, "train", started)
    assert main(pasted(next_line(capsys))) == 0
    settings = started.call_args.args[0].profile
    assert settings.path == str(measured / "table.parquet")
    assert settings.features == str(measured / "features.safetensors")


@pytest.mark.parametrize("name", by_day(NAMES))
def test_the_next_command_of_recorded_beams_reads_them(name, home, monkeypatch, capsys):
    recorded = "knobwise.profiling.demonstrations.profile.profile_beams"
    monkeypatch.setattr(recorded, lambda out, *_: Path(out).mkdir())
    monkeypatch.setattr("knobwise.testbeds.canvases.task.learner_task", Mock())
    Path(name).touch()  # so that it is taken as it is
    settings = read_settings("profile", ["model=learner", f"out={name}"])
    Path(name).unlink()
    profile._profile_beams(settings)
    started = Mock()
    monkeypatch.setattr(train, "train", started)
    assert main(pasted(next_line(capsys))) == 0
    assert started.call_args.args[0].beams.path == name


def next_line(capsys):
    """The command in the line `next: …`."""
    lines = capsys.readouterr().out.splitlines()
    (command,) = [line.partition(":")[2].strip() for line in lines if line.startswith("next:")]
    return command


@pytest.mark.parametrize("name", by_day(PLAIN))
def test_a_command_to_resume_and_one_that_is_kept_have_the_same_words(name):
    words = ["train", f"name={name}", f"profile.path={name}"]
    (line,) = command_line._how_to_resume(words)
    assert pasted(line.splitlines()[1].strip()) == words
    assert pasted(command_of(words[1:])) == words


def test_the_command_of_a_job_in_a_sweep_is_read_as_its_settings(home):
    from knobwise.experiments.command_line.compose import run_hydra

    jobs = []
    words = ["profile=table", "tracking=disabled", "profile.path=a(b).csv,ü,1e5,a'b"]
    run_hydra("train", ["-m", *words], lambda config, words, _: jobs.append((config, words)))
    paths = [config.profile.path for config, _ in jobs]
    assert paths == ["a(b).csv", "ü", "1e5", "a'b"]
    for config, job_words in jobs:
        assert read_settings("train", pasted(command_of(job_words))[1:]) == config
        assert "/" not in run_name(job_words)


@pytest.mark.parametrize("folder_of_run", by_day(["./runs/mine", "runs/mine", "/", "a b"]))
@pytest.mark.parametrize("verb", ["serve", "export", "decide", "evaluate", "explain", "update"])
def test_a_run_that_was_given_alone_is_suggested_as_the_checkpoint(
    verb, folder_of_run, home, capsys
):
    Path(folder_of_run).mkdir(parents=True, exist_ok=True)
    line = mistake([verb, folder_of_run], capsys)
    assert f"{folder_of_run}: " in line
    assert "hydra" not in line
    suggested = line.partition("did you mean ")[2].removesuffix("?")
    words = [*shlex.split(suggested), *["requests=r.csv"] * (verb == "decide")]
    assert read_settings(verb, words).checkpoint == folder_of_run


def test_a_file_that_was_given_alone_is_suggested_as_a_profile(folder, capsys):
    name = "date=2026-01-31 (a,b).csv"
    shutil.copy("t.parquet", name)
    for words in (["inspect", name], ["inspect", f"profile={name}"]):
        _, _, suggested = mistake(words, capsys).partition("did you mean ")
        words = shlex.split(suggested.removesuffix("?"))
        assert read_settings("inspect", words).profile.path == name
