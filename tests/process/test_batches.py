"""Files of batches on a disk that is full."""

import pytest

from headrace.clients import ANYONE
from headrace.errors import OverloadedError
from headrace_transformer.batches.store import Limits, Store
from tests.support.small_disk import small_disk


def test_a_full_disk_refuses_uploads_and_can_be_emptied(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        kept = Store(disk.path, Limits(2**30, 1, 7))
        first, second = (kept.add_file(ANYONE, "a", "batch", b"a\n" * 50_000) for _ in range(2))
        disk.fill()
        with pytest.raises(OverloadedError, match="nothing was kept"):
            kept.add_file(ANYONE, "a", "batch", b"a")
        assert kept.files(ANYONE, "", "", 9, False) == [first, second]
        kept.delete_file(ANYONE, first.id)
        third = kept.add_file(ANYONE, "a", "batch", b"a")
        assert kept.files(ANYONE, "", "", 9, False) == [second, third]
