"""Recorded passes are few, and each is large enough for its steps."""

from headrace_predictor.engine.runners.decode_graphs import block_bucket, row_bucket


def test_buckets_are_few_and_large_enough():
    for rows in range(1, 257):
        assert rows <= row_bucket(rows) <= max(2 * rows, rows + 15)
    assert [row_bucket(rows) for rows in (1, 2, 3, 5, 9, 16, 17, 25, 33, 64, 65)] == [
        *(1, 2, 4, 8, 16, 16, 24, 32, 48, 64, 80)
    ]
    assert len({row_bucket(rows) for rows in range(1, 65)}) == 9
    assert [block_bucket(blocks) for blocks in (1, 2, 3, 9)] == [1, 2, 4, 16]
