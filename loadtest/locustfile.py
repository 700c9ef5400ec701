"""Locust's entry point: the users against the gateway at `--host`, their form fields, and the tab "Streams".

gRPC must be patched for gevent before it opens anything; otherwise one waiting call blocks every user. Its streams
then wait in threads of gevent's pool, one each: with the usual 10 threads, ten streams that wait for their first token
would delay the messages of all others.
"""

import sys
from pathlib import Path

import gevent
from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()
gevent.get_hub().threadpool.maxsize = 1000

# Locust runs this file by its path: the repository's packages are one folder up.
sys.path.insert(0, str(Path(__file__).parents[1]))

import loadtest.wiring  # noqa: E402, F401  # It connects the users to Locust.
from loadtest.users.streams import CancelUser, ChatUser, SlowReaderUser, StreamUser, TritonStreamUser  # noqa: E402  # noqa: E402
from loadtest.users.tensors import TensorRestUser, TensorUser  # noqa: E402

__all__ = [
    "CancelUser",
    "ChatUser",
    "SlowReaderUser",
    "StreamUser",
    "TensorRestUser",
    "TensorUser",
    "TritonStreamUser",
]
