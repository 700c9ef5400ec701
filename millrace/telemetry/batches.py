"""Several values of a histogram as one measurement, for values of every token.

Most of a measurement's cost does not depend on the number of values: its attributes are cleaned, hashed and looked up.
A `Batch` is recorded like any other measurement. With `batch_views` in the MeterProvider the histogram adds each of its
values, without exemplars; otherwise it adds one value, their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

INTER_TOKEN_LATENCY = "millrace.inter_token_latency"  # noqa: S105


class Batch(float):
    """Values that are recorded together, at least one; as a number it is their sum."""

    values: tuple[float, ...]

    def __new__(cls, values: Iterable[float]) -> Self:
        kept = tuple(values)
        batch = super().__new__(cls, sum(kept))
        batch.values = kept
        return batch


def batch_views() -> list[View]:
    """The views of the histograms that take batches; the buckets are those that the instruments advise."""
    return [View(instrument_name=name, aggregation=_BatchHistogram()) for name in (INTER_TOKEN_LATENCY,)]


class _BatchHistogram(ExplicitBucketHistogramAggregation):
    """Makes the SDK's own aggregations, which get each value of a batch."""

    def _create_aggregation(self, *arguments: Any, **named: Any) -> Any:
        aggregation: Any = super()._create_aggregation(*arguments, **named)
        add = aggregation.aggregate

        def aggregate(measurement: Any, should_sample_exemplar: bool = True) -> None:
            value = measurement.value
            if not isinstance(value, Batch):
                add(measurement, should_sample_exemplar)
                return
            for each in value.values:
                add(_Value(each), False)

        aggregation.aggregate = aggregate
        return aggregation


class _Value(NamedTuple):
    """All that an aggregation reads of a measurement without exemplars."""

    value: float
