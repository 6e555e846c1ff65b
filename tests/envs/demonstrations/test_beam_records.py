"""What is refused in files of recorded beams: broken JSON, and records of either format that do not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_files import read_beam_data, read_beams, read_rl_data

BANK = torch.arange(40.0).reshape(20, 2)
PAIR = {"id_list": [[1, 2]], "score_list": [0.5]}


def written(folder: Path, content: Any) -> Path:
    path = folder / "beams.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def rl(*rows: dict[str, Any], **record: Any) -> dict[str, Any]:
    """RL data of one query, 3, with a pool of three."""
    return {"3": {"candidate_pool_ids": [7, 9, 5], "pointer_candidates": list(rows)} | record}


def row(pointer: list[int], **changes: Any) -> dict[str, Any]:
    return {"pointer": pointer, "gen_method": "beam", "beam_score": 0.5} | changes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ('{"3": {"id_list": [[1, 2', r"not JSON, or cut off \(.*write the file again"),
        ("[" * 100_000, "not JSON, or cut off"),
        ("[]", "holds no queries"),
        ({"_meta": {}}, "holds no queries"),
        ('{"3": {}, "3": {}}', "the key '3' stands twice"),
        ({"3": PAIR, "03": PAIR}, "query 3 stands there 2 times"),
        ({"3": {"id_list": [[1, 2]], "score_list": [0.5, 0.25]}}, "query 3: expected id_list and score_list, two"),
        ({"3": {"id_list": [[1, 2]]}}, "query 3: expected id_list and score_list"),
        ({"4": PAIR, "3": []}, "query 3: expected id_list"),
        ({"x7": PAIR}, "query x7: its key holds 'x7', expected a list of ids, whole numbers"),
        ({"-1": PAIR}, "query -1: its key holds '-1'"),
        ({"3": {"id_list": [[1, 2.0]], "score_list": [1]}}, "query 3: row 0 of id_list holds 2.0, expected"),
        ({"3": {"id_list": [[1, True]], "score_list": [1]}}, "row 0 of id_list holds True"),
        ({"3": {"id_list": [[1], [-1]], "score_list": [1, 1]}}, "row 1 of id_list holds -1"),
        ({"3": {"id_list": [[10**19]], "score_list": [1]}}, "row 0 of id_list holds 10000000000000000000"),
        ({"3": {"id_list": [7], "score_list": [1]}}, "row 0 of id_list holds 7"),
        ({"3": {"id_list": [[1, 2, 1]], "score_list": [1]}}, "query 3, row 0: id 1 stands twice in the sequence"),
        ({"3": {"id_list": [[1]], "score_list": [None]}}, "score 0 of score_list is null"),
        ({"3": {"id_list": [[1]], "score_list": ["0.5"]}}, "query 3: beam_score is '0.5', expected a finite number"),
        ({"3": {"id_list": [[1]], "score_list": [True]}}, "query 3: beam_score is True, expected a finite number"),
        ('{"3": {"id_list": [[1]], "score_list": [NaN]}}', "holds NaN, which is not JSON; write null"),
        ('{"3": {"id_list": [[1]], "score_list": [-Infinity]}}', "holds -Infinity, which is not JSON"),
        ('{"3": {"id_list": [[1]], "score_list": [1e999]}}', "query 3: beam_score is inf, expected a finite number"),
        ('{"3": {"id_list": [[1]], "score_list": [1e39]}}', r"query 3: beam_score is 1e\+39, expected a finite number"),
    ],
)  # fmt: skip
def test_broken_legacy_beams(tmp_path, content: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"beams\.json: (query 3[:,] )?{said}"):
        read_beams(written(tmp_path, content), BANK)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"3": PAIR}, "query 3: expected an object with pointer_candidates"),
        ({"3": {"pointer_candidates": [[1, 2]]}}, "query 3: expected an object with pointer_candidates"),
        (rl(query=[1]), "query 3: expected an object with pointer_candidates"),
        (rl(query={"image_id": 1.5}), r"query 3: image_id is 1\.5"),
        (rl(candidate_pool_ids=[1, 2, 1]), "query 3: an id stands twice in candidate_pool_ids"),
        (rl(candidate_pool_ids={"1": 2}), "query 3: candidate_pool_ids holds {'1': 2}, expected a list of ids"),
        (rl(row([7, 8])), "query 3, row 0: id 8 is not in candidate_pool_ids; mend or remove the row"),
        (rl(row([7]), row([7, 9, 7])), "query 3, row 1: id 7 stands twice"),
        (rl(row([3], pointer_global=[5])), "query 3, row 0: pointer 3 is outside the pool of 3 candidates"),
        (rl(row([1], pointer_global=[5])), r"query 3, row 0: pointer \[1\] and pointer_global \[5\] name different"),
        (rl({"gen_method": "beam"}), "query 3, row 0: pointer holds None, expected a list of ids"),
        (rl({"pointer": [7]}), "query 3, row 0: gen_method is None; known are beam, sample, retrieval, random, policy"),
        (rl(row([7], gen_method="magic")), "row 0: gen_method is 'magic'; known are"),
        (rl(row([7], gen_method="beam-2")), "row 0: gen_method is 'beam-2'; known are"),
        (rl(row([7], gen_method="policy-x")), "row 0: round holds 'x', expected"),
        (rl(row([7], gen_method="policy-0")), "row 0: gen_method 'policy-0' with round None; draws of a policy count"),
        (rl(row([7], gen_method="policy-2", round=3)), "row 0: gen_method 'policy-2' with round 3"),
        (rl(row([7], round=1)), "row 0: gen_method 'beam' with round 1"),
        (
            rl(row([7], vqa_correct=0.5)),
            r"query 3: vqa_correct is 0.5, expected 0 or 1 \(soft scores are vqa_acc_score",
        ),
        (rl(row([7], vqa_acc_score="1")), "query 3: vqa_acc_score is '1', expected a finite number"),
        (rl(row([7], eval_failed="false")), "row 0: eval_failed is 'false'"),
        (rl(row([7], vqa_eval_mode=3)), "row 0: .*vqa_eval_mode 3; expected"),
    ],
)
def test_broken_rl_data(tmp_path, content: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"beams\.json: (query 3[:,] )?{said}"):
        read_rl_data(written(tmp_path, content), BANK)


def test_no_such_file_and_what_is_no_text(tmp_path) -> None:
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        read_beam_data(tmp_path / "none.json", BANK)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bytes\.json: not JSON"):
        read_beams(tmp_path / "bytes.json", BANK)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path) -> None:
    (tmp_path / "mark.json").write_text(json.dumps({"3": PAIR}), encoding="utf-8-sig")
    assert read_beams(tmp_path / "mark.json", BANK).num_queries == 1
