"""Locust's entry point for the knee: the shape beside the users of locustfile.py.

A file of its own, because Locust uses the shape of a locustfile in every run without the page.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.knee.shape import KneeShape

__all__ = ["KneeShape"]
