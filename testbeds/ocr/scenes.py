"""Pictures with text and a question about it, as TextVQA asks: signs drawn on real photographs.

A scene depends on its number alone, so there are as many fresh ones as anybody wants. The
photographs are those that scikit-learn ships (CC BY 2.0), the fonts Source Sans Pro and Source
Serif Pro (OFL-1.1) and Pillow's own.
"""

from __future__ import annotations

import io
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import DrawnQuestions

SEED = 1
INSTALL = install_command("ocr")
WIDTH = 960
HEIGHT = 720
"""Pixels of a picture."""
FONTS = {
    "font_source_sans_pro": tuple(
        f"SourceSansPro-{face}" for face in ("Regular", "Bold", "Light", "It", "Black")
    ),
    "font_source_serif_pro": ("SourceSerifPro-Regular", "SourceSerifPro-Bold", "SourceSerifPro-It"),
}
Colour = tuple[int, ...]

# the words on the signs: the first and the second of a title, what is sold, and what hangs around
FIRST, SECOND, ITEMS, CLUTTER = map(
    str.split,
    (
        "Golden Silver Green River Harbor Old Royal Sunny Blue Maple Corner Central Grand Little "
        "North Crystal",
        "Bakery Garage Market Books Garden Kitchen Hotel Pharmacy Cinema Tailor Museum Florist "
        "Studio Diner",
        "Coffee Tea Bread Cheese Apples Honey Butter Salad Soup Juice Olives Pasta Rice Cake Milk "
        "Pepper Sugar Lemon Onion Garlic Salmon Yogurt Waffles Noodles Ticket Poster Batteries "
        "Candles Umbrella Notebook",
        "SALE OPEN EXIT NEW Welcome Parking Push Pull Taxi Bus Stop Free Today Only Menu Closed "
        "Station Way Avenue Street Please Wait Here Tickets Express Daily Fresh Original Quality "
        "Since Special Offer",
    ),
)


class OCRScene(NamedTuple):
    """A picture, a question about it, the right answer, and the kind of the question.

    The kind is what the question asks for: `title`, `phone`, `code`, `total`, `price`, or `below`,
    the item in the next row."""

    image: Image.Image
    question: str
    answer: str
    kind: str


@lru_cache(maxsize=1)
def draw_scene(row: int) -> OCRScene:
    """Draw a scene. Raises InputError if the packages that ship fonts are missing."""
    return _Drawing(np.random.default_rng((SEED, row))).scene()


class DrawnPicture(NamedTuple):
    """The picture of a scene. It is drawn only when it is converted, because memory does not hold
    2,000 pictures."""

    row: int

    def convert(self, mode: str) -> Image.Image:
        """Return the picture in a mode of PIL."""
        return draw_scene(self.row).image.convert(mode)


class Scenes(DrawnQuestions):
    """All scenes, by their numbers. The shipped profile has the first 2,000."""

    def draw(self, row: int) -> VQAItem:
        """Return a scene as an item that is judged by ANLS."""
        scene = draw_scene(row)
        return VQAItem(
            str(row),
            DrawnPicture(row),
            scene.question,
            (scene.answer,),
            question_type=scene.kind,
            metric="anls",
        )


@cache
def photographs() -> tuple[Image.Image, ...]:
    """Load the photographs, in RGB."""
    from sklearn.datasets import load_sample_images

    return tuple(Image.fromarray(pixels) for pixels in load_sample_images().images)


@cache
def font_files() -> tuple[bytes | None, ...]:
    """Read every font as the bytes of its file; None stands for Pillow's own."""
    contents: list[bytes | None] = [None]
    try:
        for package, names in FONTS.items():
            folder = resources.files(package) / "files"
            contents += [(folder / f"{name}.ttf").read_bytes() for name in names]
    except ModuleNotFoundError as error:
        raise InputError(f"model=ocr: {error.name} is not installed; {INSTALL}") from error
    return tuple(contents)


@cache
def load_font(index: int, size: int) -> Any:
    """Load the font of `font_files` with this index, at a size in pixels."""
    content = font_files()[index]
    if content is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(io.BytesIO(content), size)


class _Drawing:
    """Draws one scene from a random generator.

    Do not change the order of the draws: every scene would show something else."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def scene(self) -> OCRScene:
        """Draw a photograph with clutter and a sign, seen through a bad camera."""
        rng = self.rng
        picture = self._photograph()
        for _ in range(rng.integers(0, 7)):
            self._clutter(picture)
        sign, facts = self._sign(self._log_uniform(13, 44))
        self._paste(picture, sign)
        # upside down, blurred, noisy
        if rng.random() < 0.12:
            picture = picture.rotate(180)
        if rng.random() < 0.35:
            picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.6)))
        noise = rng.normal(0, rng.uniform(0, 9), (HEIGHT, WIDTH, 1))
        picture = Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
        kind = str(rng.choice(sorted(facts)))
        question, answer = facts[kind]
        return OCRScene(picture, question, answer, kind)

    def _choice(self, *texts: str) -> str:
        return texts[self.rng.integers(len(texts))]

    def _log_uniform(self, low: int, high: int) -> int:
        return int(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def _typeface(self) -> int:
        return int(self.rng.integers(len(font_files())))

    def _photograph(self) -> Image.Image:
        """Draw a part of a photograph, mirrored or not, in other light."""
        rng = self.rng
        photo = photographs()[rng.integers(len(photographs()))]
        width = int(rng.uniform(0.5, 1.0) * min(photo.width, photo.height * WIDTH / HEIGHT))
        height = width * HEIGHT // WIDTH
        left = int(rng.integers(photo.width - width + 1))
        top = int(rng.integers(photo.height - height + 1))
        part = photo.crop((left, top, left + width, top + height))
        part = part.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        if rng.random() < 0.5:
            part = ImageOps.mirror(part)
        return ImageEnhance.Brightness(part).enhance(rng.uniform(0.6, 1.3))

    def _colours(self) -> tuple[Colour, Colour]:
        """Draw the colours of paper and ink, light on dark or dark on light."""
        dark = tuple(self.rng.integers(0, 110, 3).tolist())
        light = tuple(self.rng.integers(165, 256, 3).tolist())
        if self.rng.random() < 0.7:
            return light, dark
        return dark, light

    def _clutter(self, picture: Image.Image) -> None:
        """Draw a word or two somewhere, on the photograph itself or on a plate."""
        rng = self.rng
        paper, ink = self._colours()
        font = load_font(self._typeface(), self._log_uniform(14, 60))
        text = " ".join(self._choice(*CLUTTER) for _ in range(rng.integers(1, 3)))
        _, _, right, bottom = map(int, font.getbbox(text))
        opacity = 255 * (rng.random() < 0.6)
        plate = Image.new("RGBA", (right + 12, bottom + 12), (*paper, opacity))
        ImageDraw.Draw(plate).text((6, 4), text, font=font, fill=(*ink, 255))
        plate = plate.rotate(rng.normal(0, 6), Image.Resampling.BICUBIC, expand=True)
        left = int(rng.uniform(0, max(1, WIDTH - plate.width)))
        top = int(rng.uniform(0, max(1, HEIGHT - plate.height)))
        picture.paste(plate, (left, top), plate)

    def _sign(self, size: int) -> tuple[Image.Image, dict[str, tuple[str, str]]]:
        """Draw a sign, and return it with a question and its answer for each kind.

        `size` is that of the letters below the title, in pixels."""
        rng = self.rng
        paper, ink = self._colours()
        body = load_font(self._typeface(), size)
        heading = load_font(self._typeface(), int(min(64, size * rng.uniform(1.3, 2.4))))
        title = f"{self._choice(*FIRST)} {self._choice(*SECOND)}"
        if rng.random() < 0.3:
            title = title.upper()
        question = self._choice("What does the title say?", "What is the name on the sign?")
        facts = {"title": (question, title)}
        # a list of prices
        names = rng.choice(ITEMS, rng.integers(2, 8), replace=False).tolist()
        prices = [f"{rng.integers(1, 40)}.{rng.integers(0, 100):02}" for _ in names]
        rows = list(zip(names, prices, strict=True))
        i = rng.integers(len(rows))
        question = self._choice(
            f"What is the price of {names[i]}?", f"What stands next to {names[i]}?"
        )
        facts["price"] = question, prices[i]
        j = rng.integers(len(rows) - 1)
        facts["below"] = f"What stands below {names[j]}?", names[j + 1]
        # lines that not every sign has
        if rng.random() < 0.6:
            total = f"{sum(map(float, prices)):.2f}"
            rows.append((self._choice("Total", "TOTAL", "Total:"), total))
            facts["total"] = self._choice("What is the total?", "How much is it in total?"), total
        if rng.random() < 0.6:
            phone = f"{rng.integers(200, 999)}-{rng.integers(200, 999)}-{rng.integers(0, 10000):04}"
            rows.append((self._choice("Tel. ", "Call ", "") + phone, ""))
            question = self._choice("What is the phone number?", "Which number can be called?")
            facts["phone"] = question, phone
        if rng.random() < 0.6:
            letters = "".join(chr(ord("A") + k) for k in rng.integers(0, 26, 2))
            code = f"{letters}-{rng.integers(1000, 10000)}"
            rows.append((self._choice("Code ", "Ref. ", "No. ") + code, ""))
            facts["code"] = self._choice("What is the code?", "Which code is given?"), code
        return self._typeset(title, rows, heading, body, paper, ink), facts

    def _typeset(
        self,
        title: str,
        rows: list[tuple[str, str]],
        heading: Any,
        body: Any,
        paper: Colour,
        ink: Colour,
    ) -> Image.Image:
        """Draw the sign: its title, then rows of two columns. The second column may be empty."""
        step = int(body.size * self.rng.uniform(1.3, 1.8))
        # the second column begins right of the longest text that has something beside it
        indent = max(int(body.getlength(first)) for first, second in rows if second)
        indent += int(body.size * self.rng.uniform(1.5, 5))
        # the widths of the title and of each row; a row ends with its last column
        widths = [int(heading.getlength(title))]
        for first, second in rows:
            widths.append(int(body.getlength(second or first)) + indent * bool(second))
        margin = body.size
        top = margin + int(heading.size * 1.5)
        size = (max(widths) + 2 * margin, top + step * len(rows) + margin)
        sign = Image.new("RGBA", size, (*paper, 255))
        draw = ImageDraw.Draw(sign)
        draw.text((margin, margin // 2), title, font=heading, fill=ink)
        for row, (first, second) in enumerate(rows):
            draw.text((margin, top + row * step), first, font=body, fill=ink)
            draw.text((margin + indent, top + row * step), second, font=body, fill=ink)
        return sign

    def _paste(self, picture: Image.Image, sign: Image.Image) -> None:
        """Put the sign somewhere on the picture. Tilt it often; shrink it if it does not fit."""
        rng = self.rng
        angle = 0.0
        if rng.random() < 0.5:
            angle = rng.normal(0, 8)
        sign = sign.rotate(angle, Image.Resampling.BICUBIC, expand=True)
        scale = min(1.0, WIDTH / sign.width, HEIGHT / sign.height)
        if scale < 1:
            size = int(sign.width * scale), int(sign.height * scale)
            sign = sign.resize(size, Image.Resampling.LANCZOS)
        left = int(rng.integers(WIDTH - sign.width + 1))
        top = int(rng.integers(HEIGHT - sign.height + 1))
        picture.paste(sign, (left, top), sign)
