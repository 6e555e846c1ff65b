"""The small elastic model: the built-in one with a window every 4 pixels, a tenth of the time."""

from pathlib import Path

from knobwise.testbeds.elastic.adapter import ElasticAdaptive
from knobwise.testbeds.elastic.model import read_model

FILE = Path(__file__).with_name("elastic_small.safetensors")


class SmallElastic(ElasticAdaptive):
    """The elastic model with the small one's weights."""

    def __init__(self):
        super().__init__(read_model(FILE), "small_elastic")
