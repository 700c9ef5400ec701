"""Frames survive any division of the stream that carries them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frames import MAX_FRAME_BYTES, Frames, framed


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_messages_come_whole_and_in_order(messages, sizes):
    stream = b"".join(map(framed, messages))
    frames, received, at, turn = Frames(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        received += frames.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert received == messages


def test_bytes_that_are_no_frame_are_refused():
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
