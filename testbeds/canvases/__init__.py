"""The built-in task of the selector: canvases, annotators, and a small in-context learner."""
