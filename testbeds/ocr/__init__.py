"""Reading text in pictures with RapidOCR, a third-party model: scenes, and the model behind
knobs."""
