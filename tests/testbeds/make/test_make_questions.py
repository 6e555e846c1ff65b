"""The questions that come with knobwise are those that the command makes."""

from knobwise.profiling.huggingface.smollm import QUESTIONS_CSV
from knobwise.profiling.measuring.questions import read_vqa_data
from knobwise.testbeds.make import questions


def test_the_file_is_what_the_command_makes_small_and_of_many_questions_of_many_kinds(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "questions.csv"
    monkeypatch.setattr("sys.argv", ["questions", "--out", str(out)])
    questions.main()
    assert out.read_bytes() == QUESTIONS_CSV.read_bytes()
    assert out.stat().st_size < 300_000
    data = read_vqa_data(out, images=False)
    items = (*data.queries, *data.bank)
    assert len(items) >= 1500
    assert str(len(items)) in capsys.readouterr().out
    assert len({item.question_type for item in items}) >= 12


def test_parts_ask_about_different_things():
    """Each thing has a name that occurs in its questions only, so parts can be told apart."""
    things = [f"thing{i}." for i in range(7)]
    kind = questions.Kind("test", ("What is {}", "Name {}"), [(thing, "x") for thing in things])
    frame = questions.questions([kind])
    assert len(frame) == 14
    about = frame["question"].str.extract(r"(thing\d)")
    for _, asked in frame.group_by(about):
        assert asked.select("part", "question").n_unique() == len(asked) == 2
        assert asked["part"].n_unique() == 1
    assert about.n_unique() == 7
