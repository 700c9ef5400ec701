"""The payload logger: stores records of requests and answers, and serves queries for them."""

from headrace import plugins  # noqa: F401  # First.
