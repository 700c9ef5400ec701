"""Which predictor gets a generation: the least loaded one, or the one with the prompt's beginning, within a bound."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace_transformer.predictors.link.links import choose, prefix_key

LONG = list(range(1000))


def candidates(*in_flight):
    return {f"10.0.0.{number}:9000": count for number, count in enumerate(in_flight)}


def chosen_of(in_flight, key):
    """The number of the predictor that is chosen."""
    return list(candidates(*in_flight)).index(choose(candidates(*in_flight), key))


def spread(keys, count):
    """How many generations each of `count` predictors gets, none of which ends."""
    in_flight = [0] * count
    for key in keys:
        in_flight[chosen_of(in_flight, key)] += 1
    return in_flight


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_without_a_key_the_least_loaded_predictor_is_chosen(in_flight):
    assert in_flight[chosen_of(in_flight, None)] == min(in_flight)


def test_equally_loaded_predictors_are_all_chosen():
    assert len(Counter(choose(candidates(3, 3, 3), None) for _ in range(100))) == 3


@given(st.binary(min_size=1, max_size=16), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_the_bound_holds_for_every_key(key, in_flight):
    chosen = chosen_of(in_flight, key)
    share = (sum(in_flight) + 1) / len(in_flight)
    assert in_flight[chosen] == min(in_flight) or in_flight[chosen] + 1 <= -(-1.25 * share // 1)


def test_equal_beginnings_go_to_one_predictor_while_it_has_room():
    key = prefix_key("m", "", LONG)
    first = chosen_of([0, 0, 0, 0], key)
    # The share of one predictor is 8 of 32 in flight.
    assert {chosen_of([8, 8, 8, 8], key) for _ in range(20)} == {first}
    crowded = [8, 8, 8, 8]
    crowded[first] = 20
    assert chosen_of(crowded, key) != first


def test_the_same_beginning_for_all_is_spread_within_the_bound_and_many_beginnings_evenly():
    in_flight = spread([prefix_key("m", "", LONG)] * 64, 4)
    assert max(in_flight) <= 1.25 * 64 / 4 + 1
    in_flight = spread([prefix_key("m", str(number), LONG) for number in range(64)], 4)
    assert max(in_flight) <= 1.25 * 64 / 4 + 1


def test_a_predictor_that_joins_or_leaves_moves_only_its_own_keys():
    keys = [prefix_key("m", str(number), LONG) for number in range(200)]
    four, three = candidates(9, 9, 9, 9), candidates(9, 9, 9)
    before = {key: choose(four, key) for key in keys}
    after = {key: choose(three, key) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] in three)


def test_keys_differ_by_client():
    keys = {prefix_key("m", salt, LONG, client) for client, salt in [("", ""), ("a", ""), ("b", ""), ("", "a")]}
    assert len(keys) == 4


def test_keys_depend_on_the_whole_blocks_of_the_beginning_on_the_model_and_on_the_salt():
    key = prefix_key("m", "", LONG[:128])
    assert prefix_key("m", "", LONG[:31]) is None
    assert prefix_key("m", "", LONG[:32]) == prefix_key("m", "", [*LONG[:32], 7]) != key
    assert prefix_key("m", "", LONG) == key
    assert len({key, prefix_key("n", "", LONG), prefix_key("m", "s", LONG), prefix_key("m", "", LONG[1:])}) == 4
