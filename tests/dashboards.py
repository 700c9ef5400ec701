"""Grafana's dashboards, read from their files, and their queries as Prometheus gets them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GRAFANA = Path(__file__).parents[1] / "deploy" / "observability" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}

# Matches the name of a metric in a query, and neither a function, a label nor a label's value.
_METRIC = re.compile(r"\b(?:headrace|gen_ai_(?:server|client)|rpc|otel_sdk|envoy|process)_\w+|\bALERTS\b|\bup\b")
_LABELS = re.compile(r'"[^"]*"|\b(?:by|on) ?\([^)]*\)|\w+(?==~?"|!=")')
_NAME_MATCHER = re.compile(r'__name__=~"([^"]*)"')


class Query(NamedTuple):
    dashboard: str
    panel: str
    expression: str


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The dashboard's panels, without rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    """Each query of each panel, unchanged."""
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield Query(name, panel["title"], target["expr"])


def filled(expression: str, rate_interval: str, time_range: str) -> str:
    """A query as Grafana sends it if every variable is "All"."""
    known = {"$__rate_interval": rate_interval, "$__range": time_range}
    return re.sub(r"\$\w+", lambda found: known.get(found[0], ".*"), expression)


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics in a query."""
    by_matcher = {name for names in _NAME_MATCHER.findall(expression) for name in names.split("|")}
    return by_matcher | set(_METRIC.findall(_LABELS.sub("", expression)))
