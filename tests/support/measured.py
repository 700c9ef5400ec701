"""The recorded values of OpenTelemetry instruments."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from headrace.telemetry.gathered import gathered_views


class Measured:
    """A meter, and the present values of its instruments; data points are found by their exact attributes."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meter = MeterProvider([self._reader], shutdown_on_exit=False, views=gathered_views()).get_meter("test")

    def points(self, name: str) -> dict[frozenset[tuple[str, Any]], Any]:
        """An instrument's data points by their attributes; none if nothing was recorded."""
        data = self._reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {
            frozenset((point.attributes or {}).items()): point
            for metric in metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    def points_by(self, attribute: str, name: str) -> dict[Any, Any]:
        """An instrument's data points by their only attribute."""
        points = self.points(name)
        assert all({key for key, _ in attributes} == {attribute} for attributes in points)
        return {dict(attributes)[attribute]: point for attributes, point in points.items()}

    def values_by(self, attribute: str, name: str) -> dict[Any, float]:
        """The values of a counter or gauge by an attribute."""
        return {key: point.value for key, point in self.points_by(attribute, name).items()}

    @property
    def names(self) -> set[str]:
        """The names of instruments with data points."""
        data = self._reader.get_metrics_data()
        return set() if data is None else {m.name for s in data.resource_metrics[0].scope_metrics for m in s.metrics}

    def value(self, name: str, attributes: Mapping[str, Any] | None = None) -> float:
        """The value of a counter or gauge; 0 if it has none."""
        point = self.points(name).get(frozenset((attributes or {}).items()))
        return 0 if point is None else point.value

    def count(self, name: str, attributes: Mapping[str, Any] | None = None) -> int:
        """The number of values in a histogram."""
        point = self.points(name).get(frozenset((attributes or {}).items()))
        return 0 if point is None else point.count

    def sum(self, name: str, attributes: Mapping[str, Any] | None = None) -> float:
        """The sum of the values in a histogram."""
        point = self.points(name).get(frozenset((attributes or {}).items()))
        return 0 if point is None else point.sum
