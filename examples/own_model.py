"""A model of your own, profiled, trained for and served: a forest that reads digits in noise.

knobwise profile model=examples.own_model:DigitForest out=profiles/digits \
    knobs.values="{trees: [5, 40, 250]}"
knobwise train name=digits profile=table profile.path=profiles/digits/table.parquet \
    profile.features=profiles/digits/features.safetensors
knobwise evaluate live=true model=examples.own_model:DigitForest profile=table \
    profile.path=profiles/digits/table.parquet profile.features=profiles/digits/features.safetensors
"""

from contextlib import contextmanager

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier

from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KnobSupport,
    check_configuration,
    clock_ms,
)
from knobwise.profiling.measuring.questions import VQAItem

FITTED = 400  # digits that the forest is fitted on; the others are its questions


class DigitForest:
    name = "digit-forest"
    knobs = (KnobSupport("trees", default=250, least=1, most=250, sets="trees that vote"),)

    def __init__(self):
        pixels, digits = load_digits(return_X_y=True)
        pixels = (pixels + np.random.default_rng(0).normal(0, 5, pixels.shape)).astype(np.float32)
        self.forest = ExtraTreesClassifier(250, random_state=0)
        self.forest.fit(pixels[:FITTED], digits[:FITTED])
        pairs = zip(pixels[FITTED:], digits[FITTED:].astype(str), strict=True)
        self.questions = []
        for number, (image, digit) in enumerate(pairs):
            self.questions.append(VQAItem(str(number), image, "Which digit?", (digit,)))
        self.trees = 250

    @contextmanager
    def set_knobs(self, configuration):
        before = self.trees
        self.trees = check_configuration(self.knobs, configuration)["trees"]
        try:
            yield
        finally:
            self.trees = before

    def first_stage(self, request, features=True):
        start = clock_ms()
        blocks = {"image_features": request.image.copy()} if features else {}
        ms = clock_ms() - start
        return FirstStage(request, blocks, kept=None, total_ms=ms, extra_ms=ms)

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self.vote(stage.request.image) for stage in stages]

    def vote(self, image):
        start = clock_ms()
        trees = self.forest.estimators_[: self.trees]
        votes = sum(tree.predict_proba(image[None])[0] for tree in trees)
        ms = clock_ms() - start
        return Answer(
            str(votes.argmax()), ms, ms, 0.0, vision_tokens=64, language_tokens=2, output_tokens=1
        )
