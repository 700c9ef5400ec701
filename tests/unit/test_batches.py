"""A batch counts as each of its values, and plain values are counted beside it."""

from millrace.telemetry.batches import INTER_TOKEN_LATENCY, Batch
from tests.support.measured import Measured


def test_counts_each_value_of_a_batch():
    measured = Measured()
    histogram = measured.meter.create_histogram(INTER_TOKEN_LATENCY, explicit_bucket_boundaries_advisory=(1.0, 2.0))
    histogram.record(Batch([0.5, 1.5, 1.75]), {"model": "a"})
    histogram.record(3.0, {"model": "a"})
    histogram.record(Batch([0.25]), {"model": "b"})
    points = measured.points(INTER_TOKEN_LATENCY)
    point = points[frozenset({("model", "a")})]
    assert (point.bucket_counts, point.count, point.sum) == ((1, 2, 1), 4, 6.75)
    assert (point.min, point.max) == (0.5, 3.0)
    assert points[frozenset({("model", "b")})].bucket_counts == (1, 0, 0)


def test_is_one_value_for_other_histograms():
    measured = Measured()
    measured.meter.create_histogram("other").record(Batch([0.5, 1.5]))
    assert (measured.count("other"), measured.sum("other")) == (1, 2.0)
