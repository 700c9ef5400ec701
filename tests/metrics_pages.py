"""Reads the samples of a Prometheus page."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def read_page(port: int, path: str = "/metrics") -> list[Sample]:
    """Every sample of a page on this machine, without the creation times of counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
