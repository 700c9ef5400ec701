"""Encodes parts of records as serialized PayloadRecords, after the rules have redacted them.

On the thread that writes. A part that cannot be encoded or redacted raises: nothing of it may reach the disk. Rules
for answers must see the whole answer: with them a part has only the time of its last chunk, and the end has all chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from headrace.payload.parts import Begin, Chunk, DeferredTensors, End, OpenRecord, Tensors
from headrace.payload.records import answer_of, as_text
from headrace.payload.rules import Digest, PayloadRules
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord, PayloadTensor

INCOMPLETE = PayloadRecord(incomplete=True).SerializeToString()


class Encoder:
    """`held_max` is the most bytes of chunks that may wait to be redacted."""

    def __init__(self, rules: PayloadRules, held_max: int) -> None:
        self._rules = rules
        self._digest, self._tensor_bytes = rules.tensor_digest, rules.tensor_bytes
        self._reads_contents = self._digest is not Digest.OFF or self._tensor_bytes > 0
        self._holds = rules.redacts_answers
        self._held_max = held_max
        self._held_bytes = 0

    def begin(self, opened: OpenRecord) -> bytes:
        """The first part of a record."""
        begin = opened.begin
        record = _begin_record(opened.id, begin)
        if self._rules.redactions:
            self._rules.redact(record)
            opened.is_redacted = (record.prompt, record.parameters) != (begin.prompt, begin.parameters)
        return record.SerializeToString()

    def inputs(self, opened: OpenRecord) -> bytes:
        record = PayloadRecord()
        self._add_tensors(opened.inputs, record.inputs)
        self._rules.redact(record)
        return record.SerializeToString()

    def chunks(self, chunks: Sequence[Chunk], opened: OpenRecord) -> bytes:
        """Chunks of a record; marks it incomplete if `held_max` has no room for them. If it raises, nothing changed."""
        record = PayloadRecord()
        first = None if opened.has_ttft else next((chunk for chunk in chunks if len(chunk.token_ids)), None)
        if first is not None:
            record.ttft_ms = first.offset_ms
        if self._holds:
            self._hold(chunks, opened)
            record.duration_ms = chunks[-1].offset_ms
        else:
            self._fill_all(record, chunks)
            self._rules.redact(record)
        opened.has_ttft |= first is not None
        return record.SerializeToString()

    def end(self, end: End, opened: OpenRecord) -> bytes:
        """The last part of a record."""
        fields: dict[str, Any] = {}
        for name, value in end.fields.items():
            if isinstance(value, str):
                if value:  # Most are empty: what is not passed on costs nothing.
                    fields[name] = storable(value)
            elif isinstance(value, bytes):
                raise TypeError(f"{name} is bytes, not text")
            elif value or value == 0:
                fields[name] = value
        record = PayloadRecord(**fields)
        self._add_tensors(end.outputs, record.outputs)
        record.chunks.extend(opened.held)
        if opened.is_redacted:
            record.ClearField("prompt_ids")  # They would reveal what is redacted.
        self._rules.redact(record)
        return record.SerializeToString()

    def forget(self, opened: OpenRecord) -> None:
        """Releases the chunks that a record holds, at its end."""
        if opened.held:
            self._held_bytes -= opened.held_bytes
            opened.held, opened.held_bytes = [], 0

    def _hold(self, chunks: Sequence[Chunk], opened: OpenRecord) -> None:
        """Keeps chunks for the end, where the whole answer is redacted."""
        held: list[PayloadChunk] = []
        held_bytes, incomplete = 0, False
        for chunk in chunks:
            kept = PayloadChunk(offset_ms=chunk.offset_ms)
            if self._held_bytes + held_bytes + chunk.cost > self._held_max:
                incomplete = True
            else:
                self._fill(kept, chunk)
                held_bytes += chunk.cost
            held.append(kept)
        opened.held += held
        opened.held_bytes += held_bytes
        self._held_bytes += held_bytes
        opened.incomplete |= incomplete

    def _fill_all(self, record: PayloadRecord, chunks: Sequence[Chunk]) -> None:
        """Adds chunks. Those of a stream of tensors are mostly like the one before but for their contents."""
        size, like, tensor = -1, b"", PayloadTensor()
        for chunk in chunks:
            added = record.chunks.add()
            message = chunk.outputs.message if isinstance(chunk.outputs, DeferredTensors) else None
            if message is None or len(message) != size or not message.startswith(like):
                self._fill(added, chunk)
                size, like = _head_of(chunk.outputs) if message and not self._reads_contents else (-1, b"")
                tensor = added.outputs[0] if like else tensor
            else:
                added.offset_ms = chunk.offset_ms
                added.outputs.append(tensor)

    def _fill(self, to: PayloadChunk, chunk: Chunk) -> None:
        to.offset_ms = chunk.offset_ms
        if chunk.text:
            to.text = storable(chunk.text)
        if len(chunk.token_ids):
            to.token_ids.extend(chunk.token_ids)
        if len(chunk.logprobs):
            to.logprobs.extend(chunk.logprobs)
        if chunk.outputs:
            self._add_tensors(chunk.outputs, to.outputs)

    def _add_tensors(self, tensors: Tensors, to: RepeatedCompositeFieldContainer[PayloadTensor]) -> None:
        for name, datatype, shape, data, size in tensors.read() if isinstance(tensors, DeferredTensors) else tensors:
            if data is None:
                to.add(name=name, datatype=datatype, shape=shape, size=size)
                continue
            added = to.add(name=name, datatype=datatype, shape=shape, size=len(data))
            if self._digest is not Digest.OFF:
                added.digest = self._digest.of(data)
            if len(data) <= self._tensor_bytes:
                added.data = bytes(data)


def _head_of(tensors: Tensors) -> tuple[int, bytes]:
    """The size of the message of a single tensor, and all of it but the contents, with which it ends."""
    if isinstance(tensors, DeferredTensors) and tensors.message and len(found := tensors.read()) == 1:
        message, data = tensors.message, found[0].data
        if data and message.endswith(data):
            return len(message), message[: -len(data)]
    return -1, b""


def changed(data: bytes, change: Callable[[PayloadRecord], None]) -> bytes:
    """A serialized record, changed."""
    record = PayloadRecord.FromString(data)
    change(record)
    return record.SerializeToString()


def fitted(data: bytes, max_bytes: int) -> bytes | None:
    """A serialized record shrunk to a size, the least important fields first; None if it does not fit even so."""
    record = PayloadRecord.FromString(data)
    record.text = answer_of(record)
    for leave_out in (_clear_tokens, lambda record: record.ClearField("chunks"), clear_contents):
        if record.ByteSize() <= max_bytes:
            break
        leave_out(record)
        record.incomplete = True
    return record.SerializeToString() if record.ByteSize() <= max_bytes else None


def _clear_tokens(record: PayloadRecord) -> None:
    for chunk in record.chunks:
        chunk.ClearField("token_ids")
        chunk.ClearField("logprobs")
    record.ClearField("prompt_ids")


def clear_contents(record: PayloadRecord) -> None:
    """Leaves out the contents of tensors."""
    for tensor in (*record.inputs, *record.outputs, *(each for chunk in record.chunks for each in chunk.outputs)):
        tensor.ClearField("data")


def storable(text: str) -> str:
    """The text as protobuf accepts it: JSON may contain halves of surrogate pairs, which UTF-8 cannot encode."""
    if str.isascii(text):  # A quarter of the cost of encoding.
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _begin_record(record_id: bytes, begin: Begin) -> PayloadRecord:
    """What is known of a record when its request arrives."""
    texts = zip(Begin._fields[:-2], begin[:-2], strict=True)  # Without metadata and time.
    named: dict[str, Any] = {name: storable(text) for name, text in texts if text}
    record = PayloadRecord(**named)
    record.record_id = as_text(record_id)
    record.time.seconds, microseconds = divmod(begin.time_us, 1_000_000)
    record.time.nanos = microseconds * 1000
    for key, value in begin.metadata.items():
        record.metadata[storable(key)] = storable(value)
    return record
