"""What the selector experiment learns from and is judged on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import small_beams

from knobwise.common.errors import InputError
from knobwise.experiments.settings.beams import check_judged, hide, read_data
from knobwise.experiments.settings.selector_options import BeamFiles


def test_hidden_columns_are_hidden_everywhere_and_nothing_else_is() -> None:
    table, _ = small_beams()
    hidden = hide(table, ["liar"])
    for seen, before in ((hidden.queries, table.queries), (hidden.candidates, table.candidates)):
        assert not seen[:, 3].any()
        assert torch.equal(seen[:, :3], before[:, :3])
    assert table.candidates[:, 3].any()  # the table itself is left as it was
    with pytest.raises(InputError, match="image, liar"):
        hide(table, ["annotator"])


def test_beams_of_a_file_are_judged_on_queries_that_nothing_was_fitted_or_chosen_on(tmp_path: Path) -> None:
    table, _ = small_beams(50)
    table.save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    parts = [set(rows.tolist()) for rows in (data.split.train, data.split.validation, data.test_rows)]
    assert [len(part) for part in parts] == [40, 5, 5]
    assert len(set.union(*parts)) == 50
    assert data.judged_by == "recorded"


def test_without_right_answers_the_best_beam_is_right(tmp_path: Path) -> None:
    table, _ = small_beams(30)
    scores = {"beam_score": torch.tensor([0.1, 0.4, 0.2, 0.4, 0.3, 0.0]).expand(30, -1)}
    replace(table, fields=scores).save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    assert data.judged_by == "best_beam"
    assert "vqa_correct" not in data.table.fields
    assert data.test.fields["vqa_correct"][0].tolist() == [0, 1, 0, 1, 0, 0]


def test_numbers_of_shots_that_cannot_be_judged(tmp_path: Path) -> None:
    small_beams(30)[0].save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    check_judged(data, [1, 2])
    for wrong, message in (
        ([], "at least one"),
        ([2, 2], "none twice"),
        ([0, 2], "at least 1"),
        ([3, 4], r"\[2\] shots"),
    ):
        with pytest.raises(InputError, match=message):
            check_judged(data, wrong)
