"""A predictor that ends without having been asked to is counted when it is started again, and only then."""

import json
import logging

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from services.predictor.restarts import Restarts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "predictor-0.state"


def test_a_first_life_is_no_restart(path):
    assert Restarts(path).count == 0


def test_an_end_in_order_is_no_restart(path):
    for _ in range(3):
        life = Restarts(path)
        assert life.count == 0
        life.end()


def test_each_end_without_order_is_counted_over_lives(path):
    Restarts(path)  # Killed.
    Restarts(path)  # And again.
    life = Restarts(path)
    assert life.count == 2
    life.end()
    assert Restarts(path).count == 2
    assert Restarts(path).count == 3


def test_the_metric_is_the_count(path):
    Restarts(path)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    Restarts(path, provider.get_meter("millrace"))
    (metric,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.data.data_points
    assert (metric.name, metric.data.is_monotonic, point.value, dict(point.attributes)) == (
        "millrace.engine.restarts",
        True,
        1,
        {},
    )
    provider.shutdown()


def test_without_a_file_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        life = Restarts(None)
        assert life.count == 0
        life.end()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_made(tmp_path):
    path = tmp_path / "new" / "folder" / "state"
    Restarts(path)
    assert Restarts(path).count == 1


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff\xfe", b"running", b"[]", b"7", b"{}", b'{"runs": true}', b'{"runs": 1, "restarts": 1e999}'],
)
def test_garbage_counts_as_a_first_life_and_is_replaced(path, garbage, caplog):
    path.write_bytes(garbage)
    with caplog.at_level(logging.WARNING):
        assert Restarts(path).count == 0
    assert len(caplog.messages) == 1
    assert Restarts(path).count == 1


def test_a_file_that_cannot_be_written_is_warned_of_once_and_harms_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        life = Restarts(tmp_path / "file" / "state")
        assert life.count == 0
        life.end()
    assert len(caplog.messages) == 1
    assert str(tmp_path / "file" / "state") in caplog.messages[0]


def test_what_was_known_is_told_where_it_can_only_be_read(path, monkeypatch, caplog):
    path.write_text(json.dumps({"runs": True, "restarts": 4}))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.predictor.restarts.os.fsync", full)
    with caplog.at_level(logging.WARNING):
        assert Restarts(path).count == 5
    assert len(caplog.messages) == 1
    # What was there before is whole.
    assert json.loads(path.read_text()) == {"runs": True, "restarts": 4}
