"""The block manager: every block has as many holders as references, and its name is that of its contents."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from headrace_predictor.engine.state.blocks import BlockManager, block_name, first_name


def names_of(ids, salt="", size=4, client=""):
    names = [first_name(client, salt)]
    for start in range(0, len(ids) - size + 1, size):
        names.append(block_name(names[-1], ids[start : start + size]))
    return names[1:]


def test_only_the_known_beginning_is_found_and_whether_the_next_block_is_being_computed():
    blocks = BlockManager(5, 4)
    first, second, third = names_of(range(12))
    held = [blocks.take() for _ in range(3)]
    blocks.name(held[0], first)
    blocks.name(held[2], third)
    assert blocks.find([first, second, third]) == (held[:1], False)
    blocks.announce([second])
    assert blocks.find([first, second, third]) == (held[:1], True)
    blocks.name(held[1], second)
    assert blocks.find([first, second, third]) == (held, False)
    blocks.release(held[1:2], forget=True)
    assert blocks.find([first, second, third]) == (held[:1], False)


def test_the_least_recently_used_block_is_evicted_first_and_the_end_of_a_prefix_before_its_beginning():
    blocks = BlockManager(7, 4)
    old = [blocks.take() for _ in range(3)]
    new = [blocks.take() for _ in range(3)]
    for block, name in zip(old + new, names_of(range(12)) + names_of(range(1, 13)), strict=True):
        blocks.name(block, name)
    blocks.release(old)
    blocks.release(new)
    # Another use makes a block the most recently used.
    blocks.share(old[:1])
    blocks.release(old[:1])
    assert [blocks.take() for _ in range(6)] == [old[2], old[1], new[2], new[1], new[0], old[0]]


operations = st.lists(
    st.tuples(st.sampled_from(["take", "share", "name", "release", "forget"]), st.integers(0, 7), st.integers(0, 5)),
    max_size=60,
)


@given(operations)
def test_references_names_and_order_of_use_agree_with_a_plain_model(steps):
    """The model: holders and names of blocks, and the idle blocks in the order of their eviction."""
    blocks = BlockManager(6, 4)
    names = [bytes([n]) for n in range(6)]
    holders: list[list[int]] = []
    named: dict[int, bytes] = {}
    idle = OrderedDict.fromkeys(range(1, 6))
    for operation, which, index in steps:
        if operation == "take":
            block = blocks.take()
            assert block == next(iter(idle), None)
            if block is not None:
                del idle[block]
                named.pop(block, None)
                holders.append([block])
        elif operation == "share":
            found, _ = blocks.find([names[index]])
            assert found == [block for block, name in named.items() if name == names[index]]
            blocks.share(found)
            for block in found:
                idle.pop(block, None)
                holders.append([block])
        elif holders and operation == "name":
            [block] = holders[which % len(holders)]
            blocks.name(block, names[index])
            if names[index] not in named.values():
                named[block] = names[index]
        elif holders:
            [block] = holders.pop(which % len(holders))
            blocks.release([block], forget=operation == "forget")
            if operation == "forget":
                named.pop(block, None)
            if [block] not in holders:
                idle[block] = None
                if block not in named:
                    idle.move_to_end(block, last=False)
        assert blocks.free == len(idle)
        assert blocks.idle(range(6)) == len(idle)
        for name in names:
            assert blocks.find([name])[0] == [block for block, given in named.items() if given == name]


def test_names_depend_on_the_client_the_salt_and_all_ids_before():
    ids = range(4)
    ways = [("", ""), ("a", ""), ("b", ""), ("", "a"), ("a", "b"), ("b", "a"), ("ab", "")]
    assert len({names_of(ids, salt, client=client)[0] for client, salt in ways}) == len(ways)
    assert names_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != names_of([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert names_of([1, 2, 3, 4, 5, 6, 7, 8])[:1] == names_of([1, 2, 3, 4, 9])
