"""`knobwise serve`: a controller in front of language models, as an OpenAI-compatible proxy.

    client ─▶ routes ─▶ chat: its limits, its own knobs ─▶ decision ─▶ upstream ─▶ client, log

Nothing here needs torch.
"""
