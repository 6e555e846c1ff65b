"""In front of a model: the runtime, exports."""
