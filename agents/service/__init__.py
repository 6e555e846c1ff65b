"""What a millisecond costs while requests wait: a policy of prices on top of a controller, and its rivals."""
