"""Locust's entry point: two kinds of user against the gateway at `--host`.

gRPC must be patched for gevent before it opens anything; otherwise one waiting call blocks every user.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()

# Locust runs this file by its path: the repository's packages are one folder up.
sys.path.insert(0, str(Path(__file__).parents[1]))

from loadtest.users import StreamingUser, TensorUser  # noqa: E402

__all__ = ["StreamingUser", "TensorUser"]
