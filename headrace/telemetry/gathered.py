"""Histograms and counters whose values OpenTelemetry's SDK gets when it collects them, many at a time.

The SDK needs about 12 µs for one value: it copies, cleans, hashes and looks up the attributes. A call has several
values, a stream one for each token. Here a value is appended to a queue, and the thread that collects the metrics
groups the values by their attributes. With `gathered_views` in the MeterProvider a histogram counts each value of a
group; otherwise it counts one, their sum. Such values have no exemplars.

Attributes must not change once they are handed in. Any thread may add values.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

Attributes = Mapping[str, str | int]

_MAX_WAITING = 1024  # Values of an instrument; who adds more hands them over, in about a millisecond.


class Gathered:
    """See the module; made by `histogram` or `counter`. `give` hands values with the same attributes to the SDK."""

    def __init__(self, give: Callable[[list[float], Attributes], None]) -> None:
        self._give = give
        self._waiting: deque[tuple[float, Attributes]] = deque()

    def record(self, value: float, attributes: Attributes) -> None:
        """Adds a value to a histogram, or adds to a count."""
        self._waiting.append((value, attributes))
        if len(self._waiting) >= _MAX_WAITING:
            self.hand_over()

    def hand_over(self) -> None:
        """Gives the SDK the values so far."""
        # First by object, which is cheaper, and the same one for all tokens of a stream.
        by_object: dict[int, tuple[Attributes, list[float]]] = {}
        for value, attributes in _taken(self._waiting):
            by_object.setdefault(id(attributes), (attributes, []))[1].append(value)
        groups: dict[tuple[tuple[str, str | int], ...], list[float]] = {}
        for attributes, values in by_object.values():
            groups.setdefault(tuple(attributes.items()), []).extend(values)
        for items, values in groups.items():
            self._give(values, dict(items))


_by_name: WeakKeyDictionary[Meter, dict[str, Gathered]] = WeakKeyDictionary()


def histogram(meter: Meter | None, name: str, unit: str, description: str, buckets: Sequence[float]) -> Gathered:
    """A histogram of `meter`, None: the global one; the same object for the same name."""
    meter = meter or metrics.get_meter("headrace")
    by_name = _of(meter)
    if name not in by_name:
        made = meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)
        by_name[name] = Gathered(lambda values, attributes: made.record(_Batch(values), attributes))
    return by_name[name]


def counter(meter: Meter | None, name: str, unit: str, description: str) -> Gathered:
    """A counter of `meter`, None: the global one; the same object for the same name."""
    meter = meter or metrics.get_meter("headrace")
    by_name = _of(meter)
    if name not in by_name:
        made = meter.create_counter(name, unit, description)
        by_name[name] = Gathered(lambda values, attributes: made.add(sum(values), attributes))
    return by_name[name]


def gathered_views() -> list[View]:
    """The views of histograms that take batches; the buckets are those that the instruments advise."""
    return [View(instrument_type=metrics.Histogram, aggregation=_BatchHistogram())]


def _of(meter: Meter) -> dict[str, Gathered]:
    """The instruments of a meter; one more, without values of its own, asks for theirs at each collection."""
    by_name = _by_name.get(meter)
    if by_name is None:
        by_name = _by_name[meter] = {}

        def collect(_: CallbackOptions) -> Iterable[Observation]:
            for instrument in tuple(by_name.values()):
                instrument.hand_over()
            return ()

        meter.create_observable_counter("headrace.gathered", [collect])
    return by_name


def _taken(waiting: deque[tuple[float, Attributes]]) -> Iterator[tuple[float, Attributes]]:
    """What waits now; several threads may take at once."""
    for _ in range(len(waiting)):
        try:
            yield waiting.popleft()
        except IndexError:
            return


class _Batch(float):
    """Values that are recorded together, at least one; as a number it is their sum."""

    values: Sequence[float]

    def __new__(cls, values: Sequence[float]) -> Self:
        batch = super().__new__(cls, sum(values))
        batch.values = values
        return batch


class _BatchHistogram(ExplicitBucketHistogramAggregation):
    """Makes the SDK's own aggregations, which get each value of a batch."""

    def _create_aggregation(self, *arguments: Any, **named: Any) -> Any:
        aggregation: Any = super()._create_aggregation(*arguments, **named)
        add = aggregation.aggregate

        def aggregate(measurement: Any, should_sample_exemplar: bool = True) -> None:
            value = measurement.value
            if not isinstance(value, _Batch):
                add(measurement, should_sample_exemplar)
                return
            for each in value.values:
                add(_Value(each), False)

        aggregation.aggregate = aggregate
        return aggregation


class _Value(NamedTuple):
    """All that an aggregation reads of a measurement without exemplars."""

    value: float
