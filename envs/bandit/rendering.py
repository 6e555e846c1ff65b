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

from knobwise.common.words import spelled
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import Knob

SIZE = (900, 520)
"""Width and height of pictures. They are drawn twice as large and scaled down, so that edges are
smooth; all other sizes in this module are those of the large drawing."""
_INK = "#1f2933"
_PANEL = "#f1f4f6"
_WHITE = "#ffffff"
_CHOSEN = "#2563a8"
_ON_TIME = "#2e7d4f"
_LATE = "#b93a32"
_VERDICTS = {None: ("", _INK), True: (", late", _LATE), False: (", on time", _ON_TIME)}
"""Whether the budget was missed → what is said of it, and the colour."""
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
    picture: Image.Image | NDArray[Any] | None = None
    """A PIL image, or an array [h, w] or [h, w, 3], uint8 or floats in 0–1."""

    def words(self) -> str:
        """Write the request, the decision and its outcome as lines of text."""
        lines = [self._request()]
        if self.question:
            lines.append(f"Question: {self.question}")
        if self.reward is None:
            lines += [
                f"  {knob.name}: {', '.join(map(str, map(spelled, knob.values)))}"
                for knob in self.knobs
            ]
        return "\n".join([*lines, *self._outcomes()])

    def _request(self) -> str:
        sample = f"Sample {self.info['sample_id']}"
        if "worth_ms" in self.info:
            return f"{sample}, a right answer is worth {self._amount('worth_ms')}"
        return f"{sample}, budget {self._amount('budget_ms')}"

    def _amount(self, key: str) -> str:
        value = float(self.info[key])
        digits = ".2f" if value >= 0.1 or value == 0 else ".3g"
        return f"{value:{digits}} {self.unit}"

    def _outcomes(self) -> dict[str, str]:
        """Return what came of the choice, of the best configuration, and the reward, each with its
        colour; nothing before the step."""
        if self.reward is None:
            return {}
        lines = {}
        for title, who in (("Chosen", ""), ("Best", "oracle_")):
            verdict, colour = _VERDICTS[self.info.get(f"{who}violation")]
            knobs = ", ".join(f"{k} = {v}" for k, v in self.info[f"{who}configuration"].items())
            gain = f"accuracy {self.info[f'{who}accuracy']:.2f}"
            latency = self._amount(f"{who}latency_ms")
            verdict = in_words(verdict, self.unit)
            lines[f"{title}: {gain}, {latency}{verdict}, {knobs}"] = colour
        return lines | {f"Reward: {self.reward:+.3f}": _INK}

    def image(self) -> NDArray[np.uint8]:
        """Return the decision as a picture, uint8 [520, 900, 3]."""
        canvas = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), _WHITE)
        draw = ImageDraw.Draw(canvas)
        # on top the sample and its limit, below them the picture on the left
        _text(draw, (64, 76), self._request(), 48)
        draw.rounded_rectangle((64, 144, 624, 624), 16, _PANEL)
        if self.picture is not None:
            canvas.paste(_fitted(self.picture, (512, 432)), (88, 168))
        # the question under the picture, indented by 4, because some letters reach to the left
        for i, line in enumerate(textwrap.wrap(self.question, 36, max_lines=3, placeholder="…")):
            _text(draw, (68, 660 + 40 * i), line, 32, width=556)
        # the knobs on the right, one below the other
        step = min(104, 612 // len(self.knobs))
        for i, knob in enumerate(self.knobs):
            self._draw_knob(draw, knob, 144 + step * i + step // 2, step)
        # the outcome at the bottom
        for i, (line, colour) in enumerate(self._outcomes().items()):
            _text(draw, (68, 840 + 64 * i), line, 34, colour)
        return np.array(canvas.resize(SIZE, Image.Resampling.LANCZOS))

    def _draw_knob(self, draw: Draw, knob: Knob, middle: int, step: int) -> None:
        """Draw a row `step` high: the knob's name, and a field for each of its values.

        The chosen value is filled, the best one has a rim.
        """
        width = min(96, 728 // len(knob.values))
        half = min(32, 3 * step // 8)
        size = min(32, step // 2, width // 2)
        _text(draw, (688, middle), knob.name, size, width=300)
        chosen, best = (
            self.info.get(f"{who}configuration", {}).get(knob.name) for who in ("", "oracle_")
        )
        for i, value in enumerate(knob.values):
            left = 1008 + width * i
            fill = _CHOSEN if value == chosen else _PANEL
            rim = _ON_TIME if value == best else fill
            ink = _WHITE if value == chosen else _INK
            box = (left, middle - half, left + width - 10, middle + half)
            draw.rounded_rectangle(box, 10, fill, rim, 4)
            _text(
                draw,
                (left + width / 2 - 5, middle),
                str(spelled(value)),
                size,
                ink,
                "mm",
                width - 18,
            )


def _text(
    draw: Draw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: str = _INK,
    anchor: str = "lm",
    width: int = 1660,
) -> None:
    """Draw text in letters that Pillow's font has, cut off with … at a width."""
    letters = unicodedata.normalize("NFKD", " ".join(text[:200].split()))
    text = letters.encode("ascii", "ignore").decode()
    font = _font(size)
    if font.getlength(text) > width:
        while text and font.getlength(f"{text}…") > width:
            text = text[:-1]
        text = f"{text}…"
    draw.text(at, text, colour, font, anchor)


def _fitted(picture: Image.Image | NDArray[Any], size: tuple[int, int]) -> Image.Image:
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
