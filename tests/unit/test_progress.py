"""A sequence that the steps leave out is noticed: the engine ends, so its reader does not wait for ever."""

from headrace_predictor.engine.load import ProgressWatch
from tests.unit.test_scheduler import added, scheduler_of, sequence, step


def test_only_a_sequence_that_every_step_leaves_out_is_stuck():
    watch = ProgressWatch(10.0)
    served, passed_by = sequence(), sequence()
    for now in range(100, 111):
        assert watch.observe([served, passed_by], {served}, float(now)) is None
    assert watch.observe([served, passed_by], {served}, 111.0) is passed_by


def test_a_step_that_serves_a_sequence_or_in_which_it_is_not_due_resets_its_count():
    watch = ProgressWatch(10.0)
    one = sequence()
    for now, (due, served) in zip(
        range(0, 1000, 9), [([one], ()), ([one], [one]), ([one], ()), ([], ())] * 20, strict=False
    ):
        assert watch.observe(due, set(served), float(now)) is None


def test_decoding_sequences_and_the_oldest_are_due_and_an_isolated_one_is_due_alone():
    scheduler = scheduler_of(blocks=60, step_tokens=4)
    oldest, decoding, prompt = added(scheduler, sequence(1), sequence(1), sequence(30))
    step(scheduler)
    assert scheduler.due == [oldest, decoding]
    scheduler.remove(oldest)
    scheduler.remove(decoding)
    step(scheduler)
    assert scheduler.due == [prompt]
    (alone,) = added(scheduler, sequence(9, alone=True))
    step(scheduler)
    assert scheduler.due == [alone]
