"""What a millisecond costs while requests wait: a rule on top of a controller, its tuning, and its rivals."""
