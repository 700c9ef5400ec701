"""A fake payload log that keeps its records, for tests of their senders."""

import asyncio
import errno
from contextlib import asynccontextmanager

import grpc

from headrace.payload.parts import Begin
from headrace.payload.records import answer_of
from headrace.payload.rules import PayloadRules
from headrace.payload.settings import RecordingSettings
from headrace.payload.tap import PayloadTap
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendResponse
from tests.support.logger_process import free_port

OPTIONS = (("grpc.max_receive_message_length", -1),)


class Ingest(headrace_pb2_grpc.PayloadIngestServicer):
    """Accepts records; acknowledges each while `acknowledging`, ends the call after `end_after` of them."""

    target: str

    def __init__(self):
        self.calls = []
        self.messages = 0
        self.acknowledging = True
        self.end_after = None
        self.refuses = lambda request: None  # The status that refuses a record, or None.
        self.changed = asyncio.Condition()

    async def Append(self, request_iterator, context):  # noqa: N802
        received = []
        self.calls.append(received)
        async for request in self._each_alone(request_iterator):
            if (refusal := self.refuses(request)) is not None:
                await context.abort(refusal, "no")
            async with self.changed:
                received.append(request)
                self.changed.notify_all()
            if self.end_after is not None and len(received) > self.end_after:
                return
            if self.acknowledging:
                yield AppendResponse(sequence=request.sequence)

    async def _each_alone(self, messages):
        """The requests of messages that have several."""
        async for message in messages:
            self.messages += 1
            more = list(message.more)
            message.ClearField("more")
            for request in (message, *more):
                request.record.text = answer_of(request.record)
                yield request

    async def until(self, condition):
        async with self.changed:
            await self.changed.wait_for(condition)

    @property
    def requests(self):
        """The received requests, in the order of the calls, each sequence of a source once."""
        requests = {}
        for call in self.calls:
            for request in call:
                known = requests.setdefault((request.source, request.sequence), request)
                assert known == request, "a repeat says the same"
        return list(requests.values())

    @property
    def records(self):
        """The received records, each once."""
        return [request.record for request in self.requests]


@asynccontextmanager
async def listening(target=None):
    """An ingest that listens at `ingest.target`."""
    ingest = Ingest()
    ingest.target = target or f"127.0.0.1:{free_port()}"
    server = grpc.aio.server(options=OPTIONS)
    headrace_pb2_grpc.add_PayloadIngestServicer_to_server(ingest, server)
    server.add_insecure_port(ingest.target)
    await server.start()
    try:
        yield ingest
    finally:
        await server.stop(None)


class Taps:
    """Makes taps, and closes the open ones at the end."""

    def __init__(self, spool):
        self.spool = spool
        self._open = []

    def start(self, target=None, rules=None, **options):
        """A started tap; without a target its logger is absent."""
        tap = tap_of(target or away(), rules, **{"spool": self.spool} | options)
        tap.start()
        self._open.append(tap)
        return tap

    async def close(self, tap):
        self._open.remove(tap)
        await asyncio.to_thread(tap.close)

    async def close_all(self):
        while self._open:
            await self.close(self._open[-1])


def tap_of(target, rules=None, *, spool, spool_max=1 << 30, memory=64 << 20, fsync=False, hop="transformer"):
    """A tap with the settings that give these."""
    rules = rules or PayloadRules()
    settings = RecordingSettings.model_construct(
        logger=target,
        payload_spool=spool,
        payload_spool_max=spool_max,
        payload_queue_memory=memory,
        payload_spool_fsync=fsync,
        payload_log=rules,
        payload_sample=rules.sample,
        payload_redact=rules.redactions,
        payload_metadata=rules.metadata,
        payload_tensor_bytes=rules.tensor_bytes,
        payload_tensor_digest=rules.tensor_digest,
    )
    return PayloadTap(settings, hop)


def away():
    """An address without a logger."""
    return f"127.0.0.1:{free_port()}"


def begin(tap, request_id="r", inputs=(), **fields):
    return tap.begin(Begin(**{"request_id": request_id, "model": "m", "protocol": "p"} | fields), inputs)


def folders(spool):
    """The folders of sources."""
    return [path for path in spool.iterdir() if path.is_dir()]


def segments(spool):
    """The segments of all sources."""
    return sorted(spool.glob("*/*.segment"))


def no_room(*_):
    """A write to a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")
