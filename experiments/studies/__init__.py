"""The studies behind the pages of results in docs/."""
