"""The logger's telemetry: a span for each commit, and counts of its records."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from sqlalchemy.exc import OperationalError

from headrace.errors import NotReadyError
from headrace_logger.store import writing
from headrace_logger.store.store import Store
from headrace_logger.telemetry import MAX_LINKS, RECORDS, Commits
from tests.support.measured import Measured
from tests.support.payload_records import answered


def request_of(number, **fields):
    """A request whose record names its own span, unless the fields change that."""
    return answered(number, **{"trace_id": f"{number:032x}", "span_id": f"{number:016x}"} | fields)


class LoggerTelemetry(Measured):
    """The spans and metrics of a logger."""

    def __init__(self, sampler=None):
        super().__init__()
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = tracers.get_tracer("headrace")
        self.commits = Commits(self.tracer, self.meter)

    @property
    def spans(self):
        return self._spans.get_finished_spans()

    @property
    def committed(self):
        [point] = self.points("headrace.payload.committed").values()
        return point.value


@pytest.fixture
def exported():
    return LoggerTelemetry()


@pytest.fixture
async def store(tmp_path, exported):
    store = Store(tmp_path / "payloads.sqlite3", commits=exported.commits)
    yield store
    await store.close()


def links_of(span):
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


@pytest.mark.parametrize(
    "ids",
    [
        {"trace_id": "", "span_id": ""},
        {"trace_id": "0" * 32, "span_id": "1" * 16},
        {"trace_id": "1" * 31, "span_id": "1" * 16},
        {"trace_id": "-" + "1" * 31, "span_id": "1" * 16},
        {"trace_id": "é" * 32, "span_id": "1" * 16},
    ],
)
async def test_a_record_that_names_no_span_is_counted_and_not_linked(store, exported, ids):
    await store.append([request_of(1, **ids), request_of(2)])
    [span] = exported.spans
    assert links_of(span) == [(2, 2)]
    assert span.attributes[RECORDS] == 2
    assert exported.committed == 2


async def test_more_records_than_a_span_can_link_to_are_several_spans_of_one_trace(store, exported):
    count = 2 * MAX_LINKS + 5
    await store.append([request_of(number) for number in range(1, count + 1)])
    first, *others = exported.spans
    assert [span.attributes[RECORDS] for span in exported.spans] == [MAX_LINKS, MAX_LINKS, 5]
    assert [link for span in exported.spans for link in links_of(span)] == [(n, n) for n in range(1, count + 1)]
    assert all(span.dropped_links == 0 for span in exported.spans)
    assert first.parent is None
    assert {span.parent.span_id for span in others} == {first.context.span_id}
    assert len({(span.context.trace_id, span.start_time, span.end_time) for span in exported.spans}) == 1
    assert exported.committed == count


async def test_a_repeated_record_is_counted_once(store, exported):
    await store.append([request_of(1)])
    await store.append([request_of(1)])
    await store.append([request_of(1), request_of(2)])
    assert [links_of(span) for span in exported.spans] == [[(1, 1)], [(2, 2)]]
    assert exported.committed == 2


async def test_a_failed_commit_is_a_span_in_error_without_counted_records(store, exported, monkeypatch):
    def fail(*arguments):
        raise OperationalError("INSERT", ("a secret",), Exception("a secret on a full disk"))

    with monkeypatch.context() as failing:
        failing.setattr(writing, "append", fail)
        with pytest.raises(NotReadyError):
            await store.append([request_of(1)])
    [span] = exported.spans
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert dict(span.attributes) == {RECORDS: 1, "error.type": "OperationalError"}
    assert links_of(span) == [(1, 1)]
    assert "secret" not in span.to_json()
    assert exported.committed == 0
    await store.append([request_of(1)])
    assert exported.committed == 1
