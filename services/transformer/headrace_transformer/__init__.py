"""The transformer: text to token ids and back, for every front end."""

from headrace import plugins  # noqa: F401  # First.
