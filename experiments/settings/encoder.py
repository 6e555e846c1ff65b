"""What a selector reads of queries and candidates: the config group `encoder`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from knobwise.common.errors import InputError

if TYPE_CHECKING:  # they import torch, which the command line does without until there is something to read
    from knobwise.agents.checkpoint import Loaded
    from knobwise.agents.selector.clip_encoder import ClipEncoder
    from knobwise.agents.selector.selector import StoredEmbeddings
    from knobwise.envs.demonstrations.beam_table import BeamTable
    from knobwise.profiling.measuring.questions import VQAItem


@dataclass
class StoredEncoder:
    """The embeddings that come with the beams."""

    format: str = "stored"
    """The reader."""


@dataclass
class ClipLora:
    """v2_lora: a CLIP model embeds image and question of each item, and learns along with the selector by LoRA."""

    format: str = "clip"
    """The reader."""
    folder: str = MISSING
    """Folder of the CLIP model and its processor, as `save_pretrained` writes them."""
    data: str = MISSING
    """The items, as for vlm.data: id, image, question, answers. For beams in JSON row i is row i of the embeddings of
    the queries; in a `.safetensors` queries are named by the ids of their items."""
    bank: str | None = None
    """The candidates, a row for each, in the order of their embeddings; None if they are the items of `data`."""


ENCODERS: dict[str, type[Any]] = {"stored": StoredEncoder, "clip": ClipLora}
"""The options of the group."""


def read_encoder(config: Any, beams: Any, table: BeamTable, seed: int = 0, device: str = "cpu") -> ClipEncoder | None:
    """The encoder that a config of group `encoder` names, with LoRA weights that change nothing yet; None for stored
    embeddings. Raises InputError: no such folder or file, items that are not those of the beams, an image that cannot
    be read, packages that are missing."""
    if not isinstance(config, ClipLora):
        return None
    import torch

    from knobwise.agents.selector.clip_encoder import ClipEncoder, ClipItems

    if not hasattr(beams, "path"):
        raise InputError("encoder=clip: the built-in beams have no pictures and questions for CLIP; give beams=files")
    if not Path(config.folder).is_dir():
        raise InputError(f"encoder.folder={config.folder}: no such folder; save a CLIP model and its processor there")
    queries, bank = _items(config, table, by_id=beams.path.endswith(".safetensors"))
    rows = {item: row for row, item in enumerate(dict.fromkeys([*queries, *bank]))}
    places = [torch.tensor([rows[item] for item in items]) for items in (queries, bank)]
    items = ClipItems.read(config.folder, [*rows])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ClipEncoder.pretrained(config.folder, items, *places).to(device).eval()


def _items(config: ClipLora, table: BeamTable, by_id: bool) -> tuple[list[VQAItem], tuple[VQAItem, ...]]:
    """Those of the queries and of the candidates of a table."""
    from knobwise.profiling.measuring.questions import read_vqa_data

    data = read_vqa_data(config.data, config.bank)
    if len(data.bank) != len(table.candidates):
        raise InputError(
            f"{config.bank or config.data}: has {len(data.bank)} items for {len(table.candidates)} candidates of "
            f"{table.name!r}; it needs an item for each, in order (encoder.bank is for candidates of their own)"
        )
    known = {item.id if by_id else str(row): item for row, item in enumerate(data.queries)}
    if missing := [query for query in table.query_ids if query not in known]:
        names = "the ids of items" if by_id else "row numbers, from 0"
        raise InputError(f"{config.data}: has no item for query {missing[0]!r} of {table.name!r}; queries are {names}")
    queries = [known[query] for query in table.query_ids]
    images = [*(table.query_images or [""] * len(queries)), *(table.candidate_images or [""] * len(data.bank))]
    named = set(images)
    for item, image in zip([*queries, *data.bank], images, strict=True):
        if image and item.image_id != image and item.image_id in named:  # other names are paths or digests
            raise InputError(
                f"{config.data}: item {item.id!r} shows image {item.image_id}, and in {table.name!r} {image}; items "
                "must be those of the beams, in the same order"
            )
    return queries, data.bank


def load_lora(encoder: ClipEncoder | None, loaded: Loaded) -> None:
    """Take over the LoRA weights of a checkpoint. Raises InputError: it was trained with the other kind of encoder."""
    lora = loaded.extra.get("lora")
    if encoder is not None and lora is not None:
        encoder.load_lora_state(lora)
    elif encoder is not None or lora is not None:
        known = "encoder=stored" if lora is None else "encoder=clip, with encoder.folder and encoder.data"
        raise InputError(f"the selector was trained with {known}; give the same")


def stored_embeddings(table: BeamTable, encoder: ClipEncoder | None, loaded: Loaded | None = None) -> StoredEmbeddings:
    """Queries and candidates of a table, embedded once; with the LoRA weights of a checkpoint if there is one."""
    from knobwise.agents.selector.selector import StoredEmbeddings

    if loaded is not None:
        load_lora(encoder, loaded)
    return StoredEmbeddings(table.queries, table.candidates) if encoder is None else encoder.stored()
