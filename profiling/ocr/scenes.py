"""Pictures with text and a question about it, as TextVQA asks: signs drawn on real photographs.

A scene depends on its number alone, so there are as many fresh ones as anybody wants. The
photographs are those that scikit-learn ships (CC BY 2.0), the fonts Source Sans Pro and Source
Serif Pro (OFL-1.1) and Pillow's own.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.answer_metrics import answer_accuracy

SEED = 1
INSTALL = "pip install 'knobwise[ocr]'"
WIDTH = 960
HEIGHT = 720
"""Pixels of a picture."""
_FONTS = {
    "font_source_sans_pro": tuple(
        f"SourceSansPro-{face}" for face in ("Regular", "Bold", "Light", "It", "Black")
    ),
    "font_source_serif_pro": ("SourceSerifPro-Regular", "SourceSerifPro-Bold", "SourceSerifPro-It"),
}


_Colour = tuple[int, ...]


def _words(text: str) -> list[str]:
    return text.split()


_FIRST = _words(
    "Golden Silver Green River Harbor Old Royal Sunny Blue Maple Corner Central Grand Little "
    "North Crystal"
)
_SECOND = _words(
    "Bakery Garage Market Books Garden Kitchen Hotel Pharmacy Cinema Tailor Museum Florist "
    "Studio Diner"
)
_ITEMS = _words(
    "Coffee Tea Bread Cheese Apples Honey Butter Salad Soup Juice Olives Pasta Rice Cake Milk "
    "Pepper Sugar Lemon "
    "Onion Garlic Salmon Yogurt Waffles Noodles Ticket Poster Batteries Candles Umbrella Notebook"
)
_CLUTTER = _words(
    "SALE OPEN EXIT NEW Welcome Parking Push Pull Taxi Bus Stop Free Today Only Menu Closed "
    "Station Way Avenue Street "
    "Please Wait Here Tickets Express Daily Fresh Original Quality Since Special Offer"
)


@dataclass(frozen=True)
class Scene:
    """A picture, a question about it, and the right answer."""

    image: Image.Image
    question: str
    answer: str
    kind: str
    """What the question asks for: title, phone, code, total, price, below."""


class Scenes:
    """All scenes, as `Requests` whose ids are their numbers: those of the shipped profile, and
    beyond them fresh ones without end."""

    def __init__(self) -> None:
        self._answers = dict[int, str]()  # of the scenes that were drawn

    def __getitem__(self, row: int) -> Scene:
        """Draw a scene. Raises InputError if the packages that ship fonts are missing."""
        scene = _Drawing(np.random.default_rng((SEED, row))).scene()
        self._answers[row] = scene.answer
        return scene

    def ids(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and sample_id.isascii() and sample_id.isdigit()

    def request(self, sample_id: str) -> Request:
        scene = self[int(sample_id)]
        return Request(scene.image, scene.question)

    def score(self, sample_id: str, answer: str) -> float:
        """Return the ANLS of an answer, in [0, 1]."""
        row = int(sample_id)
        return answer_accuracy("anls", answer, (self._answers.get(row) or self[row].answer,))


@cache
def photographs() -> tuple[Image.Image, ...]:
    """Load the photographs, in RGB."""
    from sklearn.datasets import load_sample_images

    return tuple(Image.fromarray(pixels) for pixels in load_sample_images().images)


@cache
def _font_files() -> tuple[bytes | None, ...]:
    """Read every font as the bytes of its file; None stands for Pillow's own."""
    files = []
    try:
        for package, names in _FONTS.items():
            folder = resources.files(package) / "files"
            files += [folder / f"{name}.ttf" for name in names]
    except ModuleNotFoundError as error:
        raise InputError(f"model=ocr: {error.name} is not installed; {INSTALL}") from error
    return None, *(file.read_bytes() for file in files)


@cache
def _font(number: int, size: int) -> Any:
    content = _font_files()[number]
    if content is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(io.BytesIO(content), size)


class _Drawing:
    """Draws one scene from a random generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.fonts = len(_font_files())

    def scene(self) -> Scene:
        rng = self.rng
        picture = self._photograph()
        for _ in range(int(rng.integers(0, 7))):
            self._clutter(picture)
        size = int(np.exp(rng.uniform(np.log(13), np.log(44))))  # of the body, in pixels
        sign, facts = self._sign(size)
        self._paste(picture, sign)
        if rng.random() < 0.12:
            picture = picture.rotate(180)
        if rng.random() < 0.35:
            picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.6)))
        noise = rng.normal(0, rng.uniform(0, 9), (HEIGHT, WIDTH, 1))
        picture = Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
        kind = str(rng.choice(sorted(facts)))
        return Scene(picture, *facts[kind], kind)

    def _choice(self, *words: str) -> str:
        return words[int(self.rng.integers(len(words)))]

    def _photograph(self) -> Image.Image:
        """Draw a part of a photograph, mirrored or not, in other light."""
        rng = self.rng
        photo = photographs()[int(rng.integers(len(photographs())))]
        width = int(rng.uniform(0.5, 1.0) * min(photo.width, photo.height * WIDTH / HEIGHT))
        height = width * HEIGHT // WIDTH
        left = int(rng.integers(photo.width - width + 1))
        top = int(rng.integers(photo.height - height + 1))
        part = photo.crop((left, top, left + width, top + height)).resize(
            (WIDTH, HEIGHT), Image.Resampling.BICUBIC
        )
        if rng.random() < 0.5:
            part = ImageOps.mirror(part)
        return ImageEnhance.Brightness(part).enhance(rng.uniform(0.6, 1.3))

    def _colours(self) -> tuple[_Colour, _Colour]:
        """Draw the colours of paper and ink, light on dark or dark on light."""
        dark, light = (
            tuple(self.rng.integers(*limits, 3).tolist()) for limits in ((0, 110), (165, 256))
        )
        if self.rng.random() < 0.7:
            return (light, dark)
        return (dark, light)

    def _clutter(self, picture: Image.Image) -> None:
        """Draw a word somewhere, on the photograph itself or on a plate."""
        rng = self.rng
        paper, ink = self._colours()
        font = _font(
            int(rng.integers(self.fonts)), int(np.exp(rng.uniform(np.log(14), np.log(60))))
        )
        text = " ".join(self._choice(*_CLUTTER) for _ in range(int(rng.integers(1, 3))))
        box = font.getbbox(text)
        plate = Image.new(
            "RGBA", (int(box[2]) + 12, int(box[3]) + 12), (*paper, 255 if rng.random() < 0.6 else 0)
        )
        ImageDraw.Draw(plate).text((6, 4), text, font=font, fill=(*ink, 255))
        plate = plate.rotate(float(rng.normal(0, 6)), Image.Resampling.BICUBIC, expand=True)
        at = (
            int(rng.uniform(0, max(1, WIDTH - plate.width))),
            int(rng.uniform(0, max(1, HEIGHT - plate.height))),
        )
        picture.paste(plate, at, plate)

    def _sign(self, size: int) -> tuple[Image.Image, dict[str, tuple[str, str]]]:
        """Draw a sign whose body has letters of this size; and by kind a question that it answers,
        with the answer."""
        rng = self.rng
        paper, ink = self._colours()
        body = _font(int(rng.integers(self.fonts)), size)
        heading = _font(int(rng.integers(self.fonts)), int(min(64, size * rng.uniform(1.3, 2.4))))
        title = f"{self._choice(*_FIRST)} {self._choice(*_SECOND)}"
        if rng.random() < 0.3:
            title = title.upper()
        facts = {
            "title": (
                self._choice("What does the title say?", "What is the name on the sign?"),
                title,
            )
        }
        names = [str(name) for name in rng.choice(_ITEMS, int(rng.integers(2, 8)), replace=False)]
        prices = [f"{rng.integers(1, 40)}.{rng.integers(0, 100):02}" for _ in names]
        rows: list[tuple[str, str]] = list(zip(names, prices, strict=True))
        i = int(rng.integers(len(rows)))
        ask = self._choice(f"What is the price of {names[i]}?", f"What stands next to {names[i]}?")
        facts["price"] = ask, prices[i]
        j = int(rng.integers(len(rows) - 1))
        facts["below"] = f"What stands below {names[j]}?", names[j + 1]
        if rng.random() < 0.6:
            total = f"{sum(float(price) for price in prices):.2f}"
            rows.append((self._choice("Total", "TOTAL", "Total:"), total))
            facts["total"] = self._choice("What is the total?", "How much is it in total?"), total
        if rng.random() < 0.6:
            phone = f"{rng.integers(200, 999)}-{rng.integers(200, 999)}-{rng.integers(0, 10000):04}"
            rows.append((self._choice("Tel. ", "Call ", "") + phone, ""))
            facts["phone"] = (
                self._choice("What is the phone number?", "Which number can be called?"),
                phone,
            )
        if rng.random() < 0.6:
            letters = "".join(chr(ord("A") + int(k)) for k in rng.integers(0, 26, 2))
            code = f"{letters}-{rng.integers(1000, 10000)}"
            rows.append((self._choice("Code ", "Ref. ", "No. ") + code, ""))
            facts["code"] = self._choice("What is the code?", "Which code is given?"), code
        return self._set(title, rows, heading, body, paper, ink), facts

    def _set(
        self,
        title: str,
        rows: list[tuple[str, str]],
        heading: Any,
        body: Any,
        paper: _Colour,
        ink: _Colour,
    ) -> Image.Image:
        """Draw the sign: title, then rows of two columns; the second one may be empty."""
        step = int(body.size * self.rng.uniform(1.3, 1.8))
        left = max(int(body.getlength(first)) for first, second in rows if second)
        left += int(body.size * self.rng.uniform(1.5, 5))
        widths = [
            int(body.getlength(second or first)) + (left if second else 0) for first, second in rows
        ]
        inner = max(*widths, int(heading.getlength(title)))
        margin = body.size
        top = margin + int(heading.size * 1.5)
        sign = Image.new(
            "RGBA", (inner + 2 * margin, top + step * len(rows) + margin), (*paper, 255)
        )
        draw = ImageDraw.Draw(sign)
        draw.text((margin, margin // 2), title, font=heading, fill=ink)
        for number, (first, second) in enumerate(rows):
            draw.text((margin, top + number * step), first, font=body, fill=ink)
            draw.text((margin + left, top + number * step), second, font=body, fill=ink)
        return sign

    def _paste(self, picture: Image.Image, sign: Image.Image) -> None:
        """Put the sign somewhere on the picture, often tilted, smaller if it does not fit."""
        if self.rng.random() < 0.5:
            angle = float(self.rng.normal(0, 8))
        else:
            angle = 0.0
        sign = sign.rotate(angle, Image.Resampling.BICUBIC, expand=True)
        fits = min(1.0, WIDTH / sign.width, HEIGHT / sign.height)
        if fits < 1:
            sign = sign.resize(
                (int(sign.width * fits), int(sign.height * fits)), Image.Resampling.LANCZOS
            )
        at = (
            int(self.rng.integers(WIDTH - sign.width + 1)),
            int(self.rng.integers(HEIGHT - sign.height + 1)),
        )
        picture.paste(sign, at, sign)
