"""Encodes parts of records as frames of the spool (headrace_protos/spool.proto), after the rules have redacted them.

On the writer thread. If a part cannot be encoded or redacted, the exception is raised: nothing of the part may reach
the disk. Rules for answers must see the whole answer: with them a chunk's frame has only the offset, and the END has
all chunks once more. Chunks that are written together are one frame.

The BEGIN of a long request has the first characters of its prompt and parameters. The whole texts follow when the
answer begins, or with the END; never if the request is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.payload.ids import as_text
from headrace.payload.outbox.merge import is_callers_own, shorten_refused
from headrace.payload.parts import (
    BEGIN_CHARACTERS,
    BeginPart,
    ChunkPart,
    DeferredTensors,
    EndPart,
    Fields,
    InputsPart,
    Tensors,
    is_long,
)
from headrace.payload.rules import PayloadRules
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord, PayloadTensor, PredictorPart
from headrace_protos.spool_pb2 import Frame

_TEXTS = Fields._fields[:-1]


class OpenRecord:
    """The state of a record between its begin and its end."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.is_short = False  # Whether the rest of a long prompt, or of long parameters, is not written yet.
        self.is_answered = False
        self.is_redacted = False  # Whether rules have changed the prompt or the parameters.
        self.incomplete = False
        self.dropped = False
        self.has_ttft = False
        self.held: list[PayloadChunk] = []  # Chunks that wait for the end, to be redacted.
        self.held_bytes = 0


class FrameEncoder:
    """Encodes parts as frames; `held_max` is the most bytes of chunks that may wait to be redacted."""

    def __init__(self, rules: PayloadRules, held_max: int) -> None:
        self._rules = rules
        self._holds = rules.redacts_answers
        self._held_max = held_max
        self._held_bytes = 0

    def begin(self, part: BeginPart, opened: OpenRecord) -> bytes:
        """The first frame of a record."""
        fields = part.fields
        if is_long(fields):
            opened.is_short = True
            if not self._rules.redactions:
                fields = fields._replace(prompt=_cut(fields.prompt), parameters=_cut(fields.parameters))
        record = PayloadRecord(**_begin_fields(part, fields))
        self._rules.redact(record)
        opened.is_redacted = bool(self._rules.redactions) and _is_changed(record, fields)
        if opened.is_short:
            # Cut after redaction: a match may lie across the cut.
            record.prompt, record.parameters = _cut(record.prompt), _cut(record.parameters)
        return _frame(part.record_id, Frame.BEGIN, record)

    def request(self, record_id: bytes, opened: OpenRecord) -> bytes:
        """The frame with the whole prompt and parameters of a long request."""
        record = PayloadRecord()
        _add_rest(record, opened)
        self._rules.redact(record)
        return _frame(record_id, Frame.CHUNK, record)

    def inputs(self, part: InputsPart) -> bytes:
        """The frame with the request's tensors."""
        record = PayloadRecord()
        self._add_tensors(part.tensors, record.inputs)
        self._rules.redact(record)
        return _frame(part.record_id, Frame.CHUNK, record)

    def chunks(self, parts: Sequence[ChunkPart], record: OpenRecord) -> bytes:
        """The frame of chunks of one record; marks the record incomplete if `held_max` has no room for their contents.

        If it raises, it has changed nothing.
        """
        written = PayloadRecord()
        first = None if record.has_ttft else next((part for part in parts if len(part.token_ids)), None)
        if first is not None:
            written.ttft_ms = first.offset_ms
        for part in parts:
            chunk = written.chunks.add(offset_ms=part.offset_ms)
            if not self._holds:
                self._fill(chunk, part)
        if self._holds:
            self._hold(parts, record)
        else:
            self._rules.redact(written)
        record.is_answered = True
        record.has_ttft |= first is not None
        return _frame(parts[0].record_id, Frame.CHUNK, written)

    def _hold(self, parts: Sequence[ChunkPart], record: OpenRecord) -> None:
        """Keeps chunks for the end, where the whole answer is redacted."""
        held = []
        held_bytes, incomplete = 0, False
        for part in parts:
            chunk = PayloadChunk(offset_ms=part.offset_ms)
            if self._held_bytes + held_bytes + part.cost > self._held_max:
                incomplete = True
            else:
                self._fill(chunk, part)
                held_bytes += part.cost
            held.append(chunk)
        record.held += held
        record.held_bytes += held_bytes
        self._held_bytes += held_bytes
        record.incomplete |= incomplete

    def end(self, part: EndPart, record: OpenRecord) -> bytes:
        """The last frame of a record."""
        ended = PayloadRecord(**_end_fields(part))
        if record.is_short and (_is_answered(part, record) or not is_callers_own(part.status)):
            _add_rest(ended, record)
        self._add_tensors(part.outputs, ended.outputs)
        ended.chunks.extend(record.held)
        if record.is_redacted:
            ended.ClearField("prompt_ids")  # They would reveal what is redacted.
        self._rules.redact(ended)
        return _frame(part.record_id, Frame.END, ended, replaces_chunks=bool(record.held))

    def whole(self, begin: BeginPart, inputs: Sequence[InputsPart], end: EndPart) -> bytes:
        """The only frame of a record that is not long and has no chunks."""
        record = PayloadRecord(**_begin_fields(begin, begin.fields), **_end_fields(end))
        for part in inputs:
            self._add_tensors(part.tensors, record.inputs)
        self._add_tensors(end.outputs, record.outputs)
        self._rules.redact(record)
        if self._rules.redactions and _is_changed(record, begin.fields):
            record.ClearField("prompt_ids")
        shorten_refused(record)
        return _frame(begin.record_id, Frame.WHOLE, record)

    @staticmethod
    def whole_without_contents(payload: bytes) -> bytes:
        """The only frame of a record, without the contents of its tensors."""
        frame = Frame.FromString(payload)
        record = PayloadRecord.FromString(frame.part[0])
        for tensor in (*record.inputs, *record.outputs):
            tensor.ClearField("data")
        frame.part[0] = record.SerializeToString()
        return frame.SerializeToString()

    def end_without_contents(self, part: EndPart) -> bytes:
        """The last frame of a record whose end could not be encoded."""
        ended = PayloadRecord(status="UNKNOWN", duration_ms=part.duration_ms, incomplete=True)
        return _frame(part.record_id, Frame.END, ended)

    def forget(self, record: OpenRecord) -> None:
        """Releases the chunks that a record holds, at its end."""
        self._held_bytes -= record.held_bytes
        record.held.clear()
        record.held_bytes = 0

    def _fill(self, chunk: PayloadChunk, part: ChunkPart) -> None:
        chunk.text = storable(part.text)
        chunk.token_ids.extend(part.token_ids)
        if len(part.logprobs):
            chunk.logprobs.extend(part.logprobs)
        if part.outputs:
            self._add_tensors(part.outputs, chunk.outputs)

    def _add_tensors(self, tensors: Tensors, to: RepeatedCompositeFieldContainer[PayloadTensor]) -> None:
        for tensor in tensors.read() if isinstance(tensors, DeferredTensors) else tensors:
            added = to.add(name=storable(tensor.name), datatype=storable(tensor.datatype), shape=tensor.shape)
            if tensor.data is not None:
                added.size = len(tensor.data)
                added.digest = self._rules.tensor_digest.of(tensor.data)
                if len(tensor.data) <= self._rules.tensor_bytes:
                    added.data = bytes(tensor.data)
            elif tensor.size is not None:
                added.size = tensor.size


def whole_begin(part: BeginPart) -> bytes:
    """The first frame of a record, with the whole texts of a long request, and not redacted."""
    return _frame(part.record_id, Frame.BEGIN, PayloadRecord(**_begin_fields(part, part.fields)))


def storable(text: str) -> str:
    """The text as protobuf accepts it: JSON may contain halves of surrogate pairs, which UTF-8 cannot encode."""
    if str.isascii(text):  # A quarter of the cost of encoding.
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _frame(record_id: bytes, kind: Frame.Kind.ValueType, part: PayloadRecord, replaces_chunks: bool = False) -> bytes:
    contents = [part.SerializeToString()]
    return Frame(record_id=record_id, kind=kind, part=contents, replaces_chunks=replaces_chunks).SerializeToString()


def _begin_fields(part: BeginPart, fields: Fields) -> dict[str, Any]:
    """The fields of a record that are known when its request arrives."""
    seconds, microseconds = divmod(part.time_us, 1_000_000)
    texts: tuple[str, ...] = fields[:-1]  # Without `metadata`, the last one.
    named: dict[str, Any] = {name: storable(text) for name, text in zip(_TEXTS, texts, strict=True) if text}
    named["record_id"] = as_text(part.record_id)
    named["time"] = Timestamp(seconds=seconds, nanos=microseconds * 1000)
    named["protocol"] = storable(part.protocol)
    if fields.metadata:
        named["metadata"] = {storable(key): storable(value) for key, value in fields.metadata.items()}
    return named


def _end_fields(part: EndPart) -> dict[str, Any]:
    """The fields of a record that are known at its end, without tensors."""
    return {
        "status": part.status,
        "message": storable(part.message),
        "failed_hop": storable(part.failed_hop),
        "finish_reason": storable(part.finish_reason),
        "duration_ms": part.duration_ms,
        "resumes": part.resumes,
        "fingerprint": storable(part.fingerprint),
        "served_model": storable(part.served_model),
        "incomplete": part.incomplete,
        "usage": part.usage,
        "ttft_ms": part.ttft_ms,
        "engine_ms": part.engine_ms,
        "predictors": [PredictorPart(predictor=name, offset_ms=at_ms) for name, at_ms in part.predictors],
        "text": storable(part.text or ""),
        "prompt_ids": part.prompt_ids,
        "sampling": part.sampling,
        "prompt_kind": part.prompt_kind,
    }


def _add_rest(record: PayloadRecord, opened: OpenRecord) -> None:
    record.prompt, record.parameters = storable(opened.fields.prompt), storable(opened.fields.parameters)
    opened.is_short = False


def _is_changed(record: PayloadRecord, fields: Fields) -> bool:
    """Whether rules have changed the prompt, or parameters, which may be in the prompt's text too."""
    return (record.prompt, record.parameters) != (fields.prompt, fields.parameters)


def _cut(text: str) -> str:
    return text[:BEGIN_CHARACTERS]


def _is_answered(end: EndPart, record: OpenRecord) -> bool:
    return record.is_answered or bool(end.text or end.outputs) or end.ttft_ms is not None
