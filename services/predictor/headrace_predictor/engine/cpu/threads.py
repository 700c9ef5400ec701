"""How many threads kernels have, and torch's own operations, in steps of few rows and of many."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Own(threading.local):
    threads = 0  # Of the kernels of a thread whose torch computes with one.


_OWN = _Own()


def kernel_threads() -> int:
    """The threads of a kernel that the caller runs: as many as torch's."""
    return _OWN.threads or torch.get_num_threads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """During the block torch's own operations have one thread, of which the caller's kernels take no notice.

    For few rows: to wake another thread takes 50 µs, and torch does that for 128 numbers of a softmax.
    """
    _OWN.threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_OWN.threads)
        _OWN.threads = 0
