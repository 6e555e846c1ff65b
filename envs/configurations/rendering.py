"""What a person sees of one decision: in words, as a picture, in a window."""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from knobwise.envs.tables.profile_table import Knob

SIZE = (900, 520)
_SCALE = 2  # drawn twice as large and scaled down, because the edges of Pillow's shapes are not smooth
_INK, _GREY, _PANEL, _WHITE = "#1f2933", "#66727f", "#f1f4f6", "#ffffff"
_CHOSEN, _ON_TIME, _LATE = "#2563a8", "#2e7d4f", "#b93a32"


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
    """A PIL image, or an array as `as_picture` takes it."""
    priced: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "priced", "worth_ms" in self.info)

    @property
    def limit(self) -> str:
        """The budget, or under a mean budget the worth of a right answer, in words."""
        if self.priced:
            return f"a right answer is worth {self.amount('worth_ms')}"
        return f"budget {self.amount('budget_ms')}"

    def amount(self, key: str) -> str:
        """A latency of the info, with its unit."""
        latency = float(self.info[key])
        return f"{latency:.2f} {self.unit}" if latency >= 0.1 or latency == 0 else f"{latency:.3g} {self.unit}"

    def words(self) -> str:
        """The decision as text."""
        question = f"\nQuestion: {self.question}" if self.question else ""
        request = f"Sample {self.info['sample_id']}, {self.limit}"
        if self.reward is None:
            knobs = "".join(f"\n  {knob.name}: {', '.join(map(str, knob.values))}" for knob in self.knobs)
            return f"{request}: what will you set?{question}{knobs}"
        chosen, best = self._outcome(""), self._outcome("oracle_")
        return f"{request}.{question}\nChosen: {chosen}; reward {self.reward:+.3f}.\nOracle: {best}."

    def _outcome(self, prefix: str) -> str:
        knobs = ", ".join(f"{k} = {v}" for k, v in self.info[f"{prefix}configuration"].items())
        late = {None: "", True: ", over budget", False: ", within budget"}[self.info.get(f"{prefix}violation")]
        return f"{knobs}: accuracy {self.info[f'{prefix}accuracy']:.2f}, {self.amount(f'{prefix}latency_ms')}{late}"

    def image(self) -> NDArray[np.uint8]:
        """The decision as a picture, uint8 [520, 900, 3]."""
        canvas = Canvas()
        canvas.text((32, 38), f"Sample {self.info['sample_id']}", 24, width=420)
        canvas.text((868, 38), self.limit[0].upper() + self.limit[1:], 24, anchor="rm", width=400)
        canvas.box((32, 72, 312, 312), _PANEL, radius=8)
        if self.picture is None:
            canvas.text((172, 192), "no picture", 15, _GREY, "mm")
        else:
            canvas.picture(self.picture, (44, 84, 300, 300))
        for number, line in enumerate(wrap(self.question, 16, 280, 3)):
            canvas.text((32, 330 + 20 * number), line, 16)
        self._draw_knobs(canvas)
        canvas.box((32, 392, 868, 496), _PANEL, radius=8)
        if self.reward is None:
            canvas.text((450, 444), "Set one value of each knob to see the outcome.", 17, _GREY, "mm")
        else:
            self._draw_outcomes(canvas, self.reward)
        return np.array(canvas.image.resize(SIZE, Image.Resampling.LANCZOS))

    def _draw_knobs(self, canvas: Canvas) -> None:
        """A row for each knob, its values beside its name; of more than eleven knobs the first ten."""
        drawn = self.knobs if len(self.knobs) <= 11 else self.knobs[:10]
        step = min(52.0, 306 / min(len(self.knobs), 11))
        half, size = min(16.0, step / 2 - 2.5), 16 if step > 30 else 14
        for number, knob in enumerate(drawn):
            middle = 72 + step * (number + 0.5)
            canvas.text((344, middle), knob.name, size, width=150)
            chosen, best = (self.info.get(f"{who}configuration", {}).get(knob.name) for who in ("", "oracle_"))
            left = 504.0
            for value in _fitting(knob, size, {chosen, best}):
                right = left + _chip_width(value, size)
                if value is not None:
                    fill, outline = _CHOSEN if value == chosen else _PANEL, _ON_TIME if value == best else None
                    canvas.box((left, middle - half, right, middle + half), fill, outline)
                colour = _WHITE if value == chosen is not None else _INK
                canvas.text(((left + right) / 2, middle), _label(value, size), size, colour, "mm")
                left = right + 6
        if drawn != self.knobs:
            canvas.text((344, 72 + step * 10.5), f"and {len(self.knobs) - 10} more knobs", size, _GREY)

    def _draw_outcomes(self, canvas: Canvas, reward: float) -> None:
        """The choice above the best configuration, their latencies as bars against the budget."""
        canvas.text((168, 408), "accuracy", 14, _GREY)
        canvas.text((252, 408), "latency", 14, _GREY)
        canvas.text((852, 408), f"reward {reward:+.3f}", 16, anchor="rm")
        latencies = [float(self.info[f"{who}latency_ms"]) for who in ("", "oracle_")]
        limit = 0.0 if self.priced else float(self.info["budget_ms"])
        longest = max(latencies) or 1.0
        scale = 400 / max(longest, min(limit, 3 * longest)) / 1.05
        for middle, title, who, latency in zip((434, 464), ("Chosen", "Best"), ("", "oracle_"), latencies, strict=True):
            late = self.info.get(f"{who}violation")
            canvas.box((48, middle - 7, 62, middle + 7), *((_PANEL, _ON_TIME) if who else (_CHOSEN,)))
            canvas.text((72, middle), title, 16)
            canvas.text((168, middle), f"{self.info[f'{who}accuracy']:.2f}", 16)
            colour = {None: _GREY, True: _LATE, False: _ON_TIME}[late]
            canvas.box((252, middle - 8, 252 + max(3.0, latency * scale), middle + 8), colour, radius=3)
            verdict = {None: "", True: ", late", False: ", on time"}[late]
            canvas.text((852, middle), self.amount(f"{who}latency_ms") + verdict, 16, colour, "rm")
        if limit:
            place = min(252 + limit * scale, 672)
            canvas.box((place - 1, 418, place + 1, 480), _INK, radius=0)
            canvas.text((place, 488), "budget" if place < 672 else "budget, far right", 13, _GREY, "mm")


class Canvas:
    """Drawing in pixels of the finished picture."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (SIZE[0] * _SCALE, SIZE[1] * _SCALE), _WHITE)
        self._draw = ImageDraw.Draw(self.image)

    def text(
        self, place: tuple[float, float], text: str, size: int, colour: str = _INK, anchor: str = "lm", width: int = 900
    ) -> None:
        """Write a line, cut off at `width`; `anchor` as Pillow has it."""
        scaled = (place[0] * _SCALE, place[1] * _SCALE)
        self._draw.text(scaled, cut(text, size, width), colour, _font(size), anchor)

    def box(
        self, corners: tuple[float, float, float, float], fill: str, outline: str | None = None, radius: float = 5
    ) -> None:
        scaled = [corner * _SCALE for corner in corners]
        self._draw.rounded_rectangle(scaled, radius * _SCALE, fill, outline, 2 * _SCALE)

    def picture(self, picture: Any, corners: tuple[int, int, int, int]) -> None:
        """Fit a picture into a box. A small one keeps its pixels."""
        image = as_picture(picture)
        left, top, right, bottom = (corner * _SCALE for corner in corners)
        ratio = min((right - left) / image.width, (bottom - top) / image.height)
        size = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
        how = Image.Resampling.NEAREST if ratio > 4 else Image.Resampling.LANCZOS
        self.image.paste(image.resize(size, how), ((left + right - size[0]) // 2, (top + bottom - size[1]) // 2))


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size * _SCALE)


def text_width(text: str, size: int) -> float:
    return float(_font(size).getlength(text)) / _SCALE


def cut(text: str, size: int, width: float) -> str:
    """The text in letters that Pillow's font has (no accents, others as ?), cut off with … at a width."""
    letters = (c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = "".join(c if c.isascii() or c == "…" else "?" for c in letters)
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text.rstrip()}…"


def wrap(text: str, size: int, width: float, most: int) -> list[str]:
    """The text in lines of a width, at most so many; the last is cut off where the text goes on."""
    words, lines = text.split(), list[str]()
    while words:
        count = len(words)
        while len(lines) < most - 1 and count > 1 and text_width(" ".join(words[:count]), size) > width:
            count -= 1
        lines.append(cut(" ".join(words[:count]), size, width))
        words = words[count:]
    return lines


def _label(value: Any, size: int) -> str:
    return "…" if value is None else cut(str(value), size, 100)


def _chip_width(value: Any, size: int) -> float:
    return text_width(_label(value, size), size) + (4 if value is None else 20)


def _fitting(knob: Knob, size: int, marked: set[Any]) -> list[Any]:
    """The knob's values as far as they fit into their row, marked ones in any case; None where some are left out."""
    left_out: set[Any] = set()
    for value in [None, *reversed(knob.values)]:
        left_out |= {value} - marked - {None}
        values = [None if v in left_out else v for v in knob.values]
        values = [v for v, before in zip(values, ["", *values], strict=False) if v is not None or before is not None]
        if sum(_chip_width(v, size) + 6 for v in values) <= 370:
            break
    return values


def as_picture(picture: Any) -> Image.Image:
    """A PIL image in RGB, from one or from an array [h, w] or [h, w, 3], uint8 or floats in 0–1."""
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    array = np.asarray(picture)
    if array.dtype.kind == "f":
        array = (array.clip(0, 1) * 255).round()
    return Image.fromarray(array.astype(np.uint8)).convert("RGB")


class Window:
    """A window on the screen. Raises gymnasium's DependencyNotInstalled if there is no pygame."""

    def __init__(self, title: str) -> None:
        try:
            import pygame
        except ImportError as error:
            raise gymnasium.error.DependencyNotInstalled(
                'render_mode="human" opens a window with pygame: pip install pygame-ce'
            ) from error
        self._pygame = pygame
        pygame.display.init()
        pygame.display.set_caption(title)
        self._screen, self._clock = pygame.display.set_mode(SIZE), pygame.time.Clock()

    def show(self, image: NDArray[np.uint8], frames_per_second: float) -> None:
        """Show a picture, no sooner than the rate allows."""
        self._screen.blit(self._pygame.surfarray.make_surface(image.swapaxes(0, 1)), (0, 0))
        self._pygame.event.pump()
        self._clock.tick(frames_per_second)
        self._pygame.display.flip()

    def close(self) -> None:
        self._pygame.display.quit()
