"""Reading text in pictures with RapidOCR, a third-party model: scenes, the model behind knobs, its
profile."""
