"""What the shipped profiles were measured on is drawn again here: the same everywhere, by digests.

Those of canvases are in tests/testbeds/canvases/test_demonstrations.py, and the questions are
compared with the file that ships (test_make_questions.py).
"""

import hashlib

from knobwise.testbeds.elastic.scenes import SEED, draw_samples
from knobwise.testbeds.ocr.scenes import draw_scene


def test_the_scenes_of_the_built_in_profile():
    sha = hashlib.sha256()
    for scene in draw_samples(100, SEED):
        sha.update(scene.image.tobytes() + scene.digits.tobytes())
        sha.update(f"{scene.question} {scene.answer}\n".encode())
    assert sha.hexdigest() == "0ba8ad51b09da2df9fac9379984ec895ab1a1a98203984be9f4c1c46b382a633"


def test_the_questions_and_answers_of_the_signs():
    """Their pixels are Pillow's and FreeType's, which versions round differently."""
    sha = hashlib.sha256()
    for scene in map(draw_scene, range(100)):
        sha.update(f"{scene.question} {scene.answer}\n".encode())
    assert sha.hexdigest() == "55ad8c69a2e2bdc8b92ecfbb774847efdf1ecf5cf0115c3213187844b632e33a"
