"""What a person sees of one decision: in words, and as a picture."""

from __future__ import annotations

import functools
import textwrap
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.ImageDraw import ImageDraw as Draw

from knobwise.envs.tables.profile_table import Knob

SIZE = (900, 520)
"""Width and height of pictures. They are drawn twice as large and scaled down, so that edges are
smooth."""
_INK = "#1f2933"
_GREY = "#66727f"
_PANEL = "#f1f4f6"
_WHITE = "#ffffff"
_CHOSEN = "#2563a8"
_ON_TIME = "#2e7d4f"
_LATE = "#b93a32"
_VERDICTS = {None: ("", _GREY), True: (", late", _LATE), False: (", on time", _ON_TIME)}
_font = functools.cache(ImageFont.load_default)


@dataclass(frozen=True)
class View:
    """One decision, before the step or after it."""

    knobs: tuple[Knob, ...]
    unit: str
    info: dict[str, Any]
    """What `reset` or `step` gave."""
    reward: float | None
    """None before the step."""
    question: str = ""
    picture: Any = None
    """A PIL image, or an array [h, w] or [h, w, 3], uint8 or floats in 0–1."""
    cost_name: str = ""
    """Of the further cost."""

    def words(self) -> str:
        """The decision as text."""
        if self.question:
            question = f"\nQuestion: {self.question}"
        else:
            question = ""
        request = f"Sample {self.info['sample_id']}, {self._limit()}"
        if self.reward is None:
            knobs = "".join(
                f"\n  {knob.name}: {', '.join(map(str, knob.values))}" for knob in self.knobs
            )
            return f"{request}: what will you set?{question}{knobs}"
        chosen = self._outcome("")
        best = self._outcome("oracle_")
        return (
            f"{request}.{question}\nChosen: {chosen}; reward {self.reward:+.3f}.\nOracle: {best}."
        )

    def _limit(self) -> str:
        if "worths" in self.info:
            worth_ms, worth = self.info["worths"]
            return (
                f"a right answer is worth {worth_ms:.3g} {self.unit} or "
                f"{worth:.3g} {self.cost_name}"
            )
        if "worth_ms" in self.info:
            return f"a right answer is worth {self._amount('worth_ms')}"
        return f"budget {self._amount('budget_ms')}"

    def _amount(self, key: str) -> str:
        value = float(self.info[key])
        if value >= 0.1 or value == 0:
            return f"{value:.2f} {self.unit}"
        return f"{value:.3g} {self.unit}"

    def _outcome(self, who: str) -> str:
        knobs = ", ".join(f"{k} = {v}" for k, v in self.info[f"{who}configuration"].items())
        late = {None: "", True: ", over budget", False: ", within budget"}[
            self.info.get(f"{who}violation")
        ]
        return (
            f"{knobs}: accuracy {self.info[f'{who}accuracy']:.2f}, "
            f"{self._amount(f'{who}latency_ms')}{late}"
        )

    def image(self) -> NDArray[np.uint8]:
        """The decision as a picture, uint8 [520, 900, 3]."""
        canvas = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), _WHITE)
        draw = ImageDraw.Draw(canvas)
        limit = self._limit()
        _text(draw, (64, 76), f"Sample {self.info['sample_id']}", 48, width=840)
        _text(draw, (1736, 76), limit[0].upper() + limit[1:], 48, anchor="rm", width=800)
        draw.rounded_rectangle((64, 144, 624, 624), 16, _PANEL)
        if self.picture is None:
            _text(draw, (344, 384), "no picture", 30, _GREY, "mm")
        else:
            canvas.paste(_fitted(self.picture, (512, 432)), (88, 168))
        for number, line in enumerate(
            textwrap.wrap(self.question, 36, max_lines=3, placeholder="…")
        ):
            _text(
                draw, (68, 660 + 40 * number), line, 32, width=556
            )  # where letters reach a little to the left
        step = min(104, 612 // len(self.knobs))
        for number, knob in enumerate(self.knobs):
            self._draw_knob(draw, knob, 144 + step * number + step // 2, step)
        draw.rounded_rectangle((64, 784, 1736, 992), 16, _PANEL)
        if self.reward is None:
            _text(
                draw, (900, 888), "Set one value of each knob to see the outcome.", 34, _GREY, "mm"
            )
        else:
            self._draw_outcomes(draw, self.reward)
        return np.array(canvas.resize(SIZE, Image.Resampling.LANCZOS))

    def _draw_knob(self, draw: Draw, knob: Knob, middle: int, step: int) -> None:
        """A row `step` high: the knob's name and its values, the chosen and the best of them
        marked. Where not all fit, the last ones that are not marked are left out."""
        half = min(32, 3 * step // 8)
        size = min(32, step // 2)
        _text(draw, (688, middle), knob.name, size, width=300)
        chosen, best = (
            self.info.get(f"{who}configuration", {}).get(knob.name) for who in ("", "oracle_")
        )
        widths = {
            value: 40 + _font(size).getlength(cut(str(value), size, 200)) for value in knob.values
        }
        kept = sorted(knob.values, key=lambda value: value not in (chosen, best))
        while sum(widths[value] + 14 for value in kept) > 700:
            kept.pop()
        left = 1008.0
        for value in sorted(kept, key=knob.values.index):
            right = left + widths[value]
            _chip(draw, (left, middle - half, right, middle + half), value == chosen, value == best)
            colour = _WHITE if value == chosen else _INK
            _text(draw, ((left + right) / 2, middle), str(value), size, colour, "mm", 200)
            left = right + 14
        if len(kept) < len(knob.values):
            _text(draw, (left, middle), "…", size)

    def _draw_outcomes(self, draw: Draw, reward: float) -> None:
        """The choice above the best configuration, their latencies as bars, the budget as a line
        across them."""
        _text(draw, (336, 816), "accuracy", 28, _GREY)
        _text(draw, (504, 816), "latency", 28, _GREY)
        _text(draw, (1704, 816), f"reward {reward:+.3f}", 32, anchor="rm")
        budget = self.info.get("budget_ms", 0.0)
        longest = max(self.info["latency_ms"], self.info["oracle_latency_ms"]) or 1.0
        scale = 760 / max(longest, min(budget, 3 * longest))
        for middle, title, who in (868, "Chosen", ""), (928, "Best", "oracle_"):
            verdict, colour = _VERDICTS[self.info.get(f"{who}violation")]
            _chip(draw, (100, middle - 11, 122, middle + 11), title == "Chosen", title == "Best")
            _text(draw, (144, middle), title, 32)
            _text(draw, (336, middle), f"{self.info[f'{who}accuracy']:.2f}", 32)
            end = 504 + max(6.0, self.info[f"{who}latency_ms"] * scale)
            draw.rounded_rectangle((504, middle - 16, end, middle + 16), 6, colour)
            _text(
                draw,
                (1704, middle),
                self._amount(f"{who}latency_ms") + verdict,
                32,
                colour,
                "rm",
                380,
            )
        if budget:
            place = 504 + min(budget * scale, 800)
            if budget <= 3 * longest:
                label = "budget"
            else:
                label = "budget, off the scale"
            draw.rectangle((place - 2, 836, place + 1, 960), _INK)
            _text(draw, (place, 976), label, 26, _GREY, "mm")


def _chip(
    draw: Draw, box: tuple[float, float, float, float], is_chosen: bool, is_best: bool
) -> None:
    """The background of a value: filled if chosen, ringed if best."""
    if is_best:
        ring = box[0] - 6, box[1] - 6, box[2] + 6, box[3] + 6
        draw.rounded_rectangle(ring, 14, _WHITE, _ON_TIME, 4)
    draw.rounded_rectangle(box, 10, _CHOSEN if is_chosen else _PANEL)


def _text(
    draw: Draw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: str = _INK,
    anchor: str = "lm",
    width: int = 1800,
) -> None:
    draw.text(at, cut(text, size, width), colour, _font(size), anchor)


def cut(text: str, size: int, width: float) -> str:
    """The text in letters that Pillow's font has (no accents, others as ?), cut off with … at a
    width."""
    letters = unicodedata.normalize("NFKD", " ".join(text[:200].split()))
    text = "".join(
        c if c.isprintable() and c.isascii() else "?"
        for c in letters
        if not unicodedata.combining(c)
    )
    while _font(size).getlength(text) > width:
        text = f"{text[:-2]}…"
    return text


def _fitted(picture: Any, size: tuple[int, int]) -> Image.Image:
    """A picture in RGB, as large as fits, on a panel of this size. A small one keeps its pixels."""
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        if array.dtype.kind == "f":
            array = (array.clip(0, 1) * 255).round()
        picture = Image.fromarray(array.astype(np.uint8))
    if max(picture.size) < 128:
        how = Image.Resampling.NEAREST
    else:
        how = Image.Resampling.LANCZOS
    return ImageOps.pad(picture.convert("RGB"), size, how, _PANEL)
