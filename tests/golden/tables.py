"""What is read from every format that the owner has: shapes, names and digests of arrays.

The files are written here by plain code, not by the product's writers. Numbers are made of integers,
so that no processor rounds them otherwise.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import polars as pl
import torch
from safetensors.numpy import save_file

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import schema_of
from knobwise.experiments.settings.beams import read_data
from knobwise.experiments.settings.profiles import read_profile

SAMPLES = range(12)
GRID = [(crops, k, blocks) for crops in (2, 6, 10) for k in (4, 8) for blocks in (12, 16)]
TIERS = {2: "low", 6: "medium", 10: "high"}
PARTS = {"prefill": 0.25, "decode": 0.5}
OWN = "profile.dataset_name=text_vqa profile.features=f.npz"
NAMED = (
    "profile.id=item profile.knobs=[model,effort] profile.accuracy=grade profile.latency=seconds"
)
NAMED += " profile.unit=s profile.features=[words,topic]"
PROFILES = {
    "exp5 and exp6": f"profile=exp5_exp6 profile.exp5_dir=exp5 profile.exp6_dir=exp6 {OWN}",
    "exp5 and exp6, prefill alone": "profile=exp5_exp6 profile.exp5_dir=exp5 profile.exp6_dir=exp6 "
    f"profile.latency=prefill {OWN}",
    "exp6 in the older spelling": "profile=exp5_exp6 profile.exp5_dir=exp5 profile.exp6_dir=older "
    f"{OWN}",
    "exp5 in per cent": "profile=exp5_exp6 profile.exp5_dir=percent profile.exp6_dir=exp6 "
    f"profile.accuracy_unit=percent {OWN}",
    "core_exp": f"profile=core_exp profile.directory=core {OWN}",
    "controller_training_data.json": "profile=table profile.path=controller_training_data.json",
    "long CSV": "profile=table profile.path=long.csv profile.features=f.npz",
    "long CSV, features in .pt": "profile=table profile.path=long.csv profile.features=f.pt",
    "CSV with repeats, columns named": f"profile=table profile.path=named.csv {NAMED}",
    "Parquet, columns named": f"profile=table profile.path=named.parquet {NAMED}",
    "JSON, columns named": f"profile=table profile.path=named.json {NAMED}",
    "JSON lines, columns named": f"profile=table profile.path=named.jsonl {NAMED}",
    "wide CSV": "profile=table profile.path=wide.csv profile.id=item profile.features=[words]"
    " profile.wide=[a_score,b_score] profile.wide_latency=[a_ms,b_ms]",
}
FILES = "train experiment=selector_seeds beams=files beams.embeddings="
BEAMS = {
    "id_list and score_list": f"{FILES}e.npz beams.path=ids.json",
    "the same, .npy": f"{FILES}e.npy beams.path=ids.json",
    "the same, .pt": f"{FILES}e.pt beams.path=ids.json",
    "the same, .safetensors": f"{FILES}e.safetensors beams.path=ids.json",
    "list of records": f"{FILES}e.npz beams.path=list.json",
    "one shot to four": f"{FILES}e.npz beams.path=shots.json",
    "pointer candidates": f"{FILES}e.npz beams.path=pointers.json",
}


def values():
    """Everything that is read, by the name of its format. Files are written into this folder."""
    _write_profiles()
    _write_beams()
    read = {}
    for name, words in PROFILES.items():
        read[name] = _of_table(read_profile(read_settings("inspect", words.split()).profile))
    for name, words in BEAMS.items():
        words = words.split()[1:]
        settings = read_settings(schema_of("train", words), words)
        read[f"beams: {name}"] = _of_beams(read_data(settings.beams).table)
    return read


def _of_table(table):
    labels = [table.label(index) for index in range(table.num_configurations)]
    arrays = {"accuracy": table.accuracy, "latency_ms": table.latency_ms, "mask": table.mask}
    arrays |= {f"feature {name}": block for name, block in table.features.items()}
    if table.repeats_ms is not None:
        arrays["repeats_ms"] = table.repeats_ms
    return {
        "samples": " ".join(table.sample_ids),
        "configurations": labels,
        "unit": table.unit,
        "images": " ".join(table.image_ids),
        "datasets": sorted(set(table.dataset_names)),
        "arrays": {name: digest(array) for name, array in arrays.items()},
    }


def _of_beams(table):
    arrays = {"pool": table.pool, "sequences": table.sequences, "queries": table.queries}
    arrays |= {"candidates": table.candidates, "found_by": table.found_by, **table.fields}
    return {
        "queries": " ".join(table.query_ids),
        "arrays": {name: digest(array) for name, array in arrays.items()},
    }


def digest(array):
    """The shape, the sum and a hash of an array, NaN as one number."""
    array = np.asarray(array)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    total = np.nansum(array, dtype=np.float64)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    whole = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{list(array.shape)} sum {total:.6g} sha256 {whole}"


def number(*parts, below=97):
    """A number that looks drawn, the same everywhere."""
    total = 7
    for part in parts:
        total = (total * 31 + int(part) * 17 + 3) % 9973
    return total % below


def _write_profiles():
    image = [[number(i, j) / 8 - 6 for j in range(3)] for i in SAMPLES]
    words = [[number(i, j, 5) / 4 for j in range(2)] for i in SAMPLES]
    image[3][1] = float("nan")
    blocks = {"image_features": image, "language_features": words}
    arrays = {name: np.array(block, np.float32) for name, block in blocks.items()}
    np.savez("f.npz", sample_id=np.array(SAMPLES), **arrays)
    vectors = {}
    for i in SAMPLES:
        vectors[i] = {name: torch.from_numpy(block[i]) for name, block in arrays.items()}
    torch.save(vectors, "f.pt")
    long = []
    examples = []
    for place, (crops, k, blocks) in enumerate(GRID):
        scored, timed, older, core, percent = [], [], [], [], []
        knobs = {"max_crops": crops, "top_k": k, "num_active_blocks": blocks}
        for i in SAMPLES:
            if number(i, place, 1) % 10 == 0:
                continue  # not profiled
            score = number(i, place, 2) % 4 / 4
            ms = 20.0 + 8 * place + number(i, place, 3) / 4
            row = {"sample_id": i, "image_id": i // 2}
            scored.append(row | {"score": score, "pred": "a", "answers": ["a"]})
            percent.append(row | {"score": 100 * score})
            times = {f"T_{part}_ms": share * ms for part, share in PARTS.items()}
            timed.append({"sample_id": i, **knobs, "T_total_ms": ms, **times, "accuracy": score})
            times = {f"latency_{part}": share * ms for part, share in PARTS.items()}
            older.append({"sample_id": i, "score": score, "latency_total": ms, **times})
            core.append({"sample_id": i, "accuracy": score, "T_total": ms, "T_LLM_prefill": ms / 4})
            long.append({"sample_id": i, **knobs, "accuracy": score, "latency_ms": ms})
            for factor in (0.8, 1.0, 1.2):
                features = {"image_feature": [i / 4, 1.0], "language_feature": [float(i % 3)]}
                example = {"sample_id": i, **features, "latency_budget": factor * 64}
                examples.append(example | {"config": knobs, "accuracy": score, "latency": ms})
        stem = f"crops{crops}_topk{k}_blocks{blocks}"
        # of some configurations the ranks are not merged
        cut = len(scored) // 2
        ranks = (
            {"_rank0": slice(cut), "_rank1": slice(cut, None)} if place % 3 else {"": slice(None)}
        )
        summary = [{**knobs, "num_total_blocks": 16, "num_samples": len(scored)}]
        for rank, rows in ranks.items():
            _put(f"exp5/exp5_accuracy_text-vqa/exp5_accuracy_results_{stem}{rank}.json",
                 {"summary": [], "all_samples": scored[rows]})  # fmt: skip
        _put(
            f"percent/exp5_accuracy_results_{stem}.json",
            {"summary": summary, "all_samples": percent},
        )
        _put(f"exp6/exp6_latency_text-vqa/exp6_latency_{stem}.json",
             {"summary": summary, "per_sample_latencies": timed})  # fmt: skip
        _put(f"older/exp6_latency_{stem}.json", {"summary": [], "all_samples": older})
        name = f"text_vqa_imgsizetier-{TIERS[crops]}_{stem}.json"
        _put(f"core/text-vqa/{name}",
             {"tier": TIERS[crops], **knobs, "per_sample_results": core})  # fmt: skip
    pl.DataFrame(long).write_csv("long.csv")
    _put("controller_training_data.json", examples)
    named = []
    for i in SAMPLES:
        for place, (model, effort) in enumerate((m, e) for m in ("small", "large") for e in (1, 2)):
            for repeat in range(1 + (i + place) % 3):
                if i == 5 and place == 2:
                    continue
                seconds = (200 + 64 * place + number(i, place, repeat)) / 1024
                row = {"item": f"q{i}", "words": number(i, 8), "topic": "abc"[i % 3]}
                row |= {"model": model, "effort": effort, "grade": number(i, place) % 5 / 4}
                named.append(row | {"seconds": seconds})
    frame = pl.DataFrame(named)
    frame.write_csv("named.csv")
    frame.write_parquet("named.parquet")
    _put("named.json", named)
    frame.write_ndjson("named.jsonl")
    wide = [
        {
            "item": f"w{i}",
            "words": number(i, 6),
            "a_score": number(i, 1) % 2,
            "b_score": number(i, 2) % 2,
            "a_ms": 5 + number(i, 3) / 8,
            "b_ms": 25 + number(i, 4) / 8,
        }
        for i in SAMPLES
    ]
    pl.DataFrame(wide).write_csv("wide.csv")


def _write_beams():
    embeddings = np.array(
        [[number(i, j) / 16 - 3 for j in range(4)] for i in range(30)], np.float32
    )
    np.savez("e.npz", embeddings=embeddings)
    np.save("e.npy", embeddings)
    torch.save(torch.from_numpy(embeddings), "e.pt")
    save_file({"embeddings": embeddings}, "e.safetensors")
    ids, shots, records = {}, {}, []
    pointers = {"_meta": {"vqa_model": "some"}}
    for query in range(12):
        scores = [0.05 - 0.01 * rank for rank in range(5)]
        rows = [_sequence(query, rank, 3) for rank in range(5)]
        ids[query] = {"id_list": [[*row, query] for row in rows], "score_list": scores}
        lengths = [_sequence(query, rank, 1 + rank % 4) for rank in range(5)]
        shots[query] = {"id_list": lengths, "score_list": scores}
        records.append({"query_id": query, "id_list": rows, "score_list": scores})
        pool = sorted({member for row in rows for member in row})
        candidates = []
        for rank, row in enumerate(rows):
            places = [pool.index(member) for member in row]
            method = ("beam", "sample", "retrieval", "random", "beam")[rank]
            candidates.append(
                {
                    "pointer": places,
                    "pointer_global": row,
                    "gen_method": method,
                    "beam_score": scores[rank],
                    "logprob_score": -number(query, rank) / 8,
                    "vqa_correct": number(query, rank, 1) % 2,
                    "vqa_acc_score": number(query, rank, 2) % 5 / 4,
                    "vqa_gt_prob": number(query, rank, 3) / 128,
                    "vqa_rel_score": number(query, rank, 4) / 128,
                    "vqa_eval_mode": "vqaEval" if rank < 4 else "error",
                    "eval_failed": False,
                }
            )
        question = {"question_id": query, "image_id": query, "question": "?"}
        pointers[query] = {
            "query": question,
            "candidate_pool_ids": pool,
            "pointer_candidates": candidates,
        }
    for name, content in (
        ("ids", ids),
        ("shots", shots),
        ("list", records),
        ("pointers", pointers),
    ):
        _put(f"{name}.json", content)


def _sequence(query, rank, length):
    """Different candidates from 12 to 29."""
    first = number(query, rank, below=18)
    return [12 + (first + 5 * place) % 18 for place in range(length)]


def _put(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
