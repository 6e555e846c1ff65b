"""Show one decision to a person: in words, and as a picture."""

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
smooth; all other sizes in this module are those of the large drawing."""
_INK = "#1f2933"
_GREY = "#66727f"
_PANEL = "#f1f4f6"
_WHITE = "#ffffff"
_CHOSEN = "#2563a8"
_ON_TIME = "#2e7d4f"
_LATE = "#b93a32"
_VERDICTS = {
    None: ("", "", _GREY),
    True: (", over budget", ", late", _LATE),
    False: (", within budget", ", on time", _ON_TIME),
}
"""Whether the budget was missed → what words and the picture say, and the colour."""
_font = functools.cache(ImageFont.load_default)


@dataclass(frozen=True)
class View:
    """One decision as a person sees it, before the step or after it."""

    knobs: tuple[Knob, ...]
    unit: str
    info: dict[str, Any]
    """The info that `reset` or `step` returned."""
    reward: float | None
    """None before the step."""
    question: str = ""
    picture: Any = None
    """A PIL image, or an array [h, w] or [h, w, 3], uint8 or floats in 0–1."""

    def words(self) -> str:
        """Return the decision as text."""
        question = f"\nQuestion: {self.question}" if self.question else ""
        request = f"Sample {self.info['sample_id']}, {self._limit()}"
        if self.reward is None:
            knobs = [f"  {knob.name}: {', '.join(map(str, knob.values))}" for knob in self.knobs]
            return "\n".join([f"{request}: what will you set?{question}", *knobs])
        return (
            f"{request}.{question}\nChosen: {self._outcome('')}; reward {self.reward:+.3f}.\n"
            f"Oracle: {self._outcome('oracle_')}."
        )

    def _limit(self) -> str:
        if "worth_ms" in self.info:
            return f"a right answer is worth {self._amount('worth_ms')}"
        return f"budget {self._amount('budget_ms')}"

    def _amount(self, key: str) -> str:
        value = float(self.info[key])
        digits = ".2f" if value >= 0.1 or value == 0 else ".3g"
        return f"{value:{digits}} {self.unit}"

    def _outcome(self, who: str) -> str:
        knobs = ", ".join(f"{k} = {v}" for k, v in self.info[f"{who}configuration"].items())
        late = _VERDICTS[self.info.get(f"{who}violation")][0]
        return (
            f"{knobs}: accuracy {self.info[f'{who}accuracy']:.2f}, "
            f"{self._amount(f'{who}latency_ms')}{late}"
        )

    def image(self) -> NDArray[np.uint8]:
        """Return the decision as a picture, uint8 [520, 900, 3]."""
        canvas = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), _WHITE)
        draw = ImageDraw.Draw(canvas)
        # on top the sample and its limit, below them the picture on the left
        limit = self._limit()
        _text(draw, (64, 76), f"Sample {self.info['sample_id']}", 48, width=840)
        _text(draw, (1736, 76), limit[0].upper() + limit[1:], 48, anchor="rm", width=800)
        draw.rounded_rectangle((64, 144, 624, 624), 16, _PANEL)
        if self.picture is None:
            _text(draw, (344, 384), "no picture", 30, _GREY, "mm")
        else:
            canvas.paste(_fitted(self.picture, (512, 432)), (88, 168))
        # the question under the picture, indented by 4, because some letters reach to the left
        for i, line in enumerate(textwrap.wrap(self.question, 36, max_lines=3, placeholder="…")):
            _text(draw, (68, 660 + 40 * i), line, 32, width=556)
        # the knobs on the right, one below the other
        step = min(104, 612 // len(self.knobs))
        for i, knob in enumerate(self.knobs):
            self._draw_knob(draw, knob, 144 + step * i + step // 2, step)
        # the outcome at the bottom
        draw.rounded_rectangle((64, 784, 1736, 992), 16, _PANEL)
        if self.reward is None:
            hint = "Set one value of each knob to see the outcome."
            _text(draw, (900, 888), hint, 34, _GREY, "mm")
        else:
            self._draw_outcomes(draw, self.reward)
        return np.array(canvas.resize(SIZE, Image.Resampling.LANCZOS))

    def _draw_knob(self, draw: Draw, knob: Knob, middle: int, step: int) -> None:
        """Draw a row `step` high: the knob's name and its values.

        The chosen value and the best one are marked. Where not all values fit, the last ones that
        are not marked are left out.
        """
        half = min(32, 3 * step // 8)
        size = min(32, step // 2)
        _text(draw, (688, middle), knob.name, size, width=300)
        marked = [
            self.info.get(f"{who}configuration", {}).get(knob.name) for who in ("", "oracle_")
        ]
        labels = {value: cut(str(value), size, 200) for value in knob.values}
        widths = {value: 40 + _font(size).getlength(label) for value, label in labels.items()}
        # marked values first, so that the others are dropped until the rest fits
        kept = sorted(knob.values, key=lambda value: value not in marked)
        while sum(widths[value] + 14 for value in kept) > 700:
            kept.pop()
        left = 1008.0
        for value in sorted(kept, key=knob.values.index):
            right = left + widths[value]
            chosen, best = (value == mark for mark in marked)
            _chip(draw, (left, middle - half, right, middle + half), chosen, best)
            colour = _WHITE if chosen else _INK
            _text(draw, ((left + right) / 2, middle), labels[value], size, colour, "mm")
            left = right + 14
        if len(kept) < len(knob.values):
            _text(draw, (left, middle), "…", size)

    def _draw_outcomes(self, draw: Draw, reward: float) -> None:
        """Draw the choice above the best configuration, each with its latency as a bar.

        The budget is a line across the bars.
        """
        _text(draw, (336, 816), "accuracy", 28, _GREY)
        _text(draw, (504, 816), "latency", 28, _GREY)
        _text(draw, (1704, 816), f"reward {reward:+.3f}", 32, anchor="rm")
        budget = self.info.get("budget_ms", 0.0)
        longest = max(self.info["latency_ms"], self.info["oracle_latency_ms"]) or 1.0
        # a budget of more than three times the longest bar is off the scale
        scale = 760 / max(longest, min(budget, 3 * longest))
        for middle, title, who in (868, "Chosen", ""), (928, "Best", "oracle_"):
            _, verdict, colour = _VERDICTS[self.info.get(f"{who}violation")]
            _chip(draw, (100, middle - 11, 122, middle + 11), title == "Chosen", title == "Best")
            _text(draw, (144, middle), title, 32)
            _text(draw, (336, middle), f"{self.info[f'{who}accuracy']:.2f}", 32)
            end = 504 + max(6.0, self.info[f"{who}latency_ms"] * scale)
            draw.rounded_rectangle((504, middle - 16, end, middle + 16), 6, colour)
            latency = self._amount(f"{who}latency_ms") + verdict
            _text(draw, (1704, middle), latency, 32, colour, "rm", 380)
        if budget:
            x = 504 + min(budget * scale, 800)
            label = "budget" if budget <= 3 * longest else "budget, off the scale"
            draw.rectangle((x - 2, 836, x + 1, 960), _INK)
            _text(draw, (x, 976), label, 26, _GREY, "mm")


def _chip(
    draw: Draw, box: tuple[float, float, float, float], is_chosen: bool, is_best: bool
) -> None:
    """Draw the background of a value: filled if chosen, ringed if best."""
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
    """Return the text in letters that Pillow's font has, cut off with … at a width.

    Accents are dropped, and letters that the font lacks become ?.
    """
    letters = unicodedata.normalize("NFKD", " ".join(text[:200].split()))
    kept = (c for c in letters if not unicodedata.combining(c))
    text = "".join(c if c.isprintable() and c.isascii() else "?" for c in kept)
    while _font(size).getlength(text) > width:
        text = f"{text[:-2]}…"
    return text


def _fitted(picture: Any, size: tuple[int, int]) -> Image.Image:
    """Return a picture in RGB, as large as fits, on a panel of this size.

    The pixels of a small picture stay visible.
    """
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        if array.dtype.kind == "f":
            array = (array.clip(0, 1) * 255).round()
        picture = Image.fromarray(array.astype(np.uint8))
    methods = Image.Resampling
    method = methods.NEAREST if max(picture.size) < 128 else methods.LANCZOS
    return ImageOps.pad(picture.convert("RGB"), size, method, _PANEL)
