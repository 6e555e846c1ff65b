import numpy as np
import pytest

from knobwise.profiling.elastic.scenes import (
    COLOURS,
    QUESTIONS,
    TOKEN,
    WORDS,
    draw_samples,
    draw_scenes,
    load_digits,
    soft_score,
    to_words,
)


def test_training_and_held_out_digit_images_are_disjoint_and_complete():
    train, held_out = ({image.tobytes() for image in load_digits(side).images} for side in (False, True))
    assert not train & held_out
    assert len(load_digits(False).labels) + len(load_digits(True).labels) == 1797


def test_answers_say_what_the_scene_shows():
    rng = np.random.default_rng(0)
    scenes = draw_scenes(rng, load_digits(True), 3, 5, QUESTIONS * 20)
    colours = np.array(list(COLOURS.values()))
    columns = (scenes.images, scenes.digits, scenes.prompts, scenes.answers, scenes.questions)
    for image, digits, prompt, answer, question in zip(*columns, strict=True):
        names = np.array([str(n) for n in range(10)] + ["blank"])[digits]
        cells = image.reshape(3, 3, 8, 5, 8).max((2, 4)).transpose(1, 2, 0)  # [rows, columns, rgb]
        nearest = np.array(list(COLOURS))[((cells[:, :, None] - colours) ** 2).sum(-1).argmin(-1)]
        nearest = np.where(digits == 10, "blank", nearest)
        places = [int(WORDS[t][1]) for t in prompt[1:-1] if WORDS[t] != "·"]
        words = to_words(answer)
        if question in ("digit", "colour"):
            assert words == [(names if question == "digit" else nearest)[places[0], places[1]]]
        elif question in ("row", "row_colours"):
            assert words == (names if question == "row" else nearest)[places[0]].tolist()
        elif question == "column":
            assert words == names[:, places[0]].tolist()
        elif question == "largest":
            shown = [int(n) for n in names[places[0]] if n != "blank"]
            assert words == [str(max(shown)) if shown else "blank"]
        elif question == "match":
            a, b = nearest[places[0], places[1]], nearest[places[2], places[3]]
            assert words == [a, b, "same" if a == b else "other"]
        else:
            a, b = names[places[0], places[1]], names[places[2], places[3]]
            x, y = (0 if n == "blank" else int(n) for n in (a, b))
            last = str(x + y) if question == "sum" else "same" if x == y else "first" if x > y else "second"
            assert words == [a, b, last]


def test_samples_depend_on_seed_and_number_alone():
    few, many = draw_samples(3, seed=7), draw_samples(6, seed=7)
    for a, b in zip(few, many, strict=False):
        assert np.array_equal(a.images, b.images)
        assert np.array_equal(a.answers, b.answers)
    assert not all(np.array_equal(a.prompts, b.prompts) for a, b in zip(few, draw_samples(3, seed=8), strict=True))


def test_soft_score_is_the_share_of_right_tokens():
    answer = np.array([TOKEN[w] for w in ("1", "2", "3", "<end>", "·")])
    said = np.array([TOKEN[w] for w in ("1", "5", "3", "4", "<end>")])
    assert soft_score(answer, answer) == 1
    assert soft_score(said, answer) == pytest.approx(2 / 4)
    assert soft_score(np.array([TOKEN["<end>"]]), answer) == 0


@pytest.mark.parametrize(
    ("side", "question", "message"),
    [(1, "row", "2 to 8"), (9, "row", "2 to 8"), (3, "colour of", "unknown question 'colour of'")],
)
def test_impossible_scenes_are_refused(side, question, message):
    with pytest.raises(ValueError, match=message):
        draw_scenes(np.random.default_rng(0), load_digits(True), side, 3, (question,))
