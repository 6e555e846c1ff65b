"""What was asked for by name, one short test a row: it works by the words that launch it, and it stays.

Rows C are the project as a whole, K the controller, S the selector. CONTRIBUTING.md says why no test here is removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- C1: the folders and the packages ----------------------------------------------------------------------------------


# -- C2: a gymnasium-style bandit that is stepped by hand --------------------------------------------------------------


# -- C3: three categorical actions under three keys --------------------------------------------------------------------


# -- C4: what GRPO trains is what is deployed --------------------------------------------------------------------------


# -- C5: experiment files, and runs compared in Weights & Biases -------------------------------------------------------


# -- C6: a sweep file for `wandb agent` --------------------------------------------------------------------------------


# -- K1: exp5 and exp6, core_exp, long tables --------------------------------------------------------------------------


# -- K2: accuracy in per cent, features in .pt files, controller_training_data.json ------------------------------------


# -- K3: image and language features, a budget encoding, three heads ---------------------------------------------------


# -- K4: features reduced before the first layer -----------------------------------------------------------------------


# -- K5: the shaped reward ---------------------------------------------------------------------------------------------


# -- K6: relative budgets, and budgets drawn from a range --------------------------------------------------------------


# -- K7: groups of draws, z-scores, the clip, the KL -------------------------------------------------------------------


# -- K8: a KL coefficient that follows the KL --------------------------------------------------------------------------


# -- K9: balanced sampling, k-fold splits ------------------------------------------------------------------------------


# -- K10: the original's training settings -----------------------------------------------------------------------------


# -- K11: the logged names ---------------------------------------------------------------------------------------------


# -- K12: a decision as a dict of the three knobs ----------------------------------------------------------------------


# -- K13: ONNX and INT8 ------------------------------------------------------------------------------------------------
def test_k13_what_is_deployed_is_exported_as_onnx_and_int8(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from commands import TABLE, refused, write_table
    from helpers import driven_apart

    from knobwise.__main__ import main
    from knobwise.agents.checkpoint import save_checkpoint
    from knobwise.agents.controller.settings import PolicyConfig
    from knobwise.experiments.settings.profiles import TableProfile, read_profile

    words = ["onnx=true", "int8=true"]
    assert "nowhere" in refused(["export", "checkpoint=nowhere/at_all.pt", *words], capsys)
    write_table()
    table = read_profile(TableProfile(path="t.parquet", features="f.npz"))
    save_checkpoint("c.pt", driven_apart(table, PolicyConfig(structure="independent", hidden=8)), table, {})
    assert main(["export", "checkpoint=c.pt", *TABLE, *words]) == 0
    exported = json.loads(Path("exported/export.json").read_text())
    exact, small = (exported["graphs"][f"controller.{form}"] for form in ("onnx", "int8.onnx"))
    assert exact["same"] + exact["rounding"] == exact["contexts"] == 60 * 5
    assert 200 < small["same"] <= small["contexts"] == 60 * 5
    files = {"controller.npz", "controller.onnx", "controller.int8.onnx"}
    assert exported["decisions_us_p50"].keys() == files
    assert all(micros > 0 for micros in exported["decisions_us_p50"].values())
    assert files < exported["files"].keys()


# -- K14: cached features and decisions, the first stage in the background ---------------------------------------------
def test_k14_features_and_decisions_are_cached_and_first_stages_prepared_in_the_background() -> None:
    import torch
    from helpers import driven_apart

    from knobwise.agents import AdaptiveModel
    from knobwise.agents.controller.settings import PolicyConfig
    from knobwise.envs import builtin_profile
    from knobwise.profiling.elastic.adapter import ElasticAdaptive, ElasticRequests

    torch.set_num_threads(1)
    requests = [ElasticRequests().request(str(number)) for number in (0, 1, 0, 1)]
    controller = driven_apart(builtin_profile(), PolicyConfig(structure="utility", hidden=8))
    plain = AdaptiveModel(ElasticAdaptive(), controller, tracker=False)
    wanted = [plain.answer(request, 9e3) for request in requests]
    with AdaptiveModel(ElasticAdaptive(), controller, tracker=False, cache=2) as model:
        for request, expected in zip(requests, wanted, strict=True):
            model.prefetch(request)
            result = model.answer(request, 9e3)
            assert (result.choice, result.answer.text) == (expected.choice, expected.answer.text)
    for recent in (model.cached_features, model.cached_decisions):
        summary = recent.summary()
        assert (summary["hits"], summary["misses"]) == (2, 2)
        assert summary["hit_us"] > 0


# -- K15: the knobs of a running model ---------------------------------------------------------------------------------


# -- K16: several data sets --------------------------------------------------------------------------------------------


# -- K17: PPO with a value network -------------------------------------------------------------------------------------


# -- K18: updates, other hardware, explanations ------------------------------------------------------------------------


# -- S1: beams in every format -----------------------------------------------------------------------------------------


# -- S2: pools, the generation of beams --------------------------------------------------------------------------------


# -- S3: the selectors v0, v1, v2 and v3 -------------------------------------------------------------------------------


# -- S4: CLIP with LoRA ------------------------------------------------------------------------------------------------


# -- S5: supervised fine-tuning, RCE, GRPO -----------------------------------------------------------------------------


# -- S6: a start from a checkpoint -------------------------------------------------------------------------------------


# -- S7: the curriculum, the temperature by KL, conditional GRPO, rank advantages --------------------------------------


# -- S8: the checkpoint of the best KL ---------------------------------------------------------------------------------


# -- S9: reward modes, their weights, by shots, adaptive ---------------------------------------------------------------


# -- S10: the planned experiments --------------------------------------------------------------------------------------


# -- S11: the logged names ---------------------------------------------------------------------------------------------


# -- S12: a learned reward ---------------------------------------------------------------------------------------------
