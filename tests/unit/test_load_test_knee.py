"""The search for the knee finds it in few levels, is not misled by one pause, and reports what it could not measure."""

import json

import pytest

from loadtest.knee.search import Knee, KneeSearch, is_lost, measured, write
from tests.unit.test_load_test_measures import counted


def find(search, holds):
    levels = []
    while not search.done:
        levels.append(search.level)
        assert len(levels) < 100
        search.record(holds(search.level))
    return levels


@pytest.mark.parametrize("start", [1, 7, 64, 300])
@pytest.mark.parametrize("knee", [1, 2, 5, 17, 100, 299])
@pytest.mark.parametrize("precision", [0.05, 0.01, 0.0])
def test_the_knee_is_found_with_the_given_precision(start, knee, precision):
    search = KneeSearch(start, 400, precision)
    levels = find(search, lambda level: level <= knee)
    assert search.bounded
    assert knee - max(1, precision * knee) < search.knee <= knee
    assert len(set(levels)) <= 18


def test_a_knee_above_the_maximum_has_no_upper_bound():
    search = KneeSearch(3, 20)
    assert find(search, lambda level: True) == [3, 6, 12, 20]
    assert (search.knee, search.bounded) == (20, False)


def test_a_search_in_which_no_level_holds_reports_none():
    search = KneeSearch(8, 20)
    assert find(search, lambda level: False) == [8, 8, 4, 4, 2, 2, 1, 1]
    assert (search.knee, search.bounded) == (0, True)


def test_a_level_that_fails_once_is_measured_again():
    search, seen = KneeSearch(4, 16), []

    def holds(level):
        seen.append(level)
        return level <= 8 and seen.count(level) != 1

    find(search, holds)
    assert search.knee == 8


def test_a_level_that_is_lost_is_not_measured_again():
    search = KneeSearch(8, 20)
    search.record(held=False, lost=True)
    assert search.level == 4


@pytest.mark.parametrize(
    ("good_of_10", "lost_after"),
    [
        ([0] * 20, 12),  # Bad for longer than half of the time, and for 5 % of it more.
        ([8] * 20, 16),
        ([10] * 5 + [0] * 10 + [10] * 5, None),  # One pause, though half of the requests were bad.
        ([0, 10] * 10, 13),
        ([9] * 20, None),  # It broke: 90 %. But without its worst half 95 % are good.
        ([10] * 20, None),
    ],
)
def test_a_level_is_lost_if_it_breaks_without_its_worst_half(good_of_10, lost_after):
    course = [counted(10, good) for good in good_of_10]
    found = (second for second in range(1, 21) if is_lost(course[:second], 20, 95.0))
    assert next(found, None) == lost_after


def test_a_start_out_of_bounds_is_refused():
    with pytest.raises(ValueError, match="between 1 and 4"):
        KneeSearch(5, 4)


def test_the_reports(tmp_path, monkeypatch):
    # Without matplotlib, as where only the load test is installed.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    levels = [measured(counted(10, good), users, 5, 95.0) for users, good in ((4, 10), (8, 5), (8, 5), (6, 10))]
    knees = [
        Knee("StreamUser", "Generate", 6, True, levels),
        Knee("ChatUser", "chat/completions", 0, True, levels[1:2]),
    ]
    conditions = {"objective": "TTFT <= 300 ms", "good_percent": 95.0, "model": "mine"}
    paths = write(tmp_path / "knee", conditions, knees)
    assert [path.name for path in paths] == ["knee.json", "knee.md"]
    report = json.loads(paths[0].read_text())
    assert report["knees"][0]["knee"] == report["knees"][0]["at_knee"]["users"] == 6
    assert report["knees"][1]["at_knee"] is None
    text = paths[1].read_text()
    assert "| StreamUser | 6 | 2.00 | 0.0 | - | - |" in text
    assert "| ChatUser | 0 | - | - | - | - |" in text
    assert "| model | mine |" in text
    assert "| 8 | 50.0 | 10 | 0 | 1.00 | 0.0 | - | - |" in text
