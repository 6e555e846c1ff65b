"""The teacher of a controller, its guard, and what is deployed of both."""
