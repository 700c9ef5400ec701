"""Valid messages of each kind, and changes of their bytes.

A change of the bytes may leave a valid message, possibly with another meaning.
protobuf's own parser decides: unreadable messages, and those that name a model that is not
served, must be refused.
"""

from collections.abc import Callable
from random import Random

from google.protobuf.message import DecodeError, Message

from headrace.oip.tensors import bytes_tensor, encode_raw
from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from tests.fuzz.case import Case, GrpcCall

INFERENCE = "/inference.GRPCInferenceService"
MODELS = frozenset({"storyteller", "normalizer", "identity", "declared", "embedder", "classifier"})

_WAYS: tuple[Callable[[Random, bytes], bytes], ...] = (
    lambda random, good: random.randbytes(random.randint(1, 400)),
    lambda random, good: good[: random.randrange(len(good))],
    lambda random, good: _flipped(random, good),
    lambda random, good: good + random.randbytes(random.randint(1, 40)),
    lambda random, good: good + b"\x0b" * random.choice((50, 500, 20_000)),  # Groups in groups, without an end.
    lambda random, good: good + b"\x0a\xff\xff\xff\xff\x0f",  # A name of four gigabytes.
    lambda random, good: good + b"\x0a" + b"\xff" * 11,  # A length without end.
    lambda random, good: good + b"\x0a\x02\xc3\x28",  # A model's name that is not UTF-8.
    lambda random, good: good[1:],
    lambda random, good: random.choice((b'{"model":"storyteller"}', b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 99)),
)


def changed(random: Random, good: bytes) -> tuple[str, bytes]:
    """The name of a change, and the changed bytes."""
    way = random.randrange(len(_WAYS))
    return f"change {way}", _WAYS[way](random, good)


def _flipped(random: Random, good: bytes) -> bytes:
    data = bytearray(good)
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def bytes_case(
    random: Random, path: str, good: bytes, kind: type[Message], name: str | None, authority: str = ""
) -> Case:
    """A message whose bytes are changed; `name` is the field of the model's name, if the method needs one."""
    what, message = changed(random, good)
    return Case(what, GrpcCall(path, (message,), authority), must_fail=not is_served(message, kind, name))


def is_served(data: bytes, kind: type[Message], name: str | None) -> bool:
    """Whether a message can be read and names a model that is served: then it may be a valid request."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return False
    return name is None or getattr(message, name) in MODELS


def text_message() -> bytes:
    """A valid GenerateRequest; the model's name is last, so that a cut removes it first."""
    short = headrace_pb2.GenerateRequest(max_tokens=1, prompt="Once upon a time")
    return short.SerializeToString() + headrace_pb2.GenerateRequest(model="storyteller").SerializeToString()


def text_infer() -> bytes:
    request = pb.ModelInferRequest(id="r")
    request.parameters["max_tokens"].int64_param = 1
    add_tensor(request, "text_input", "BYTES", [1], encode_raw(bytes_tensor("text_input", [b"Once"])))
    return request.SerializeToString() + pb.ModelInferRequest(model_name="storyteller").SerializeToString()


def tensor_infer(model: str = "identity") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id="r")
    if model in ("identity", "declared"):
        add_tensor(request, "x", "FP32", [1, 3], b"\x00\x00\x80\x3f" * 3)
    else:
        add_tensor(request, "input_ids", "INT32", [1, 3], b"\x05\x00\x00\x00" * 3)
    return request


def add_tensor(request: pb.ModelInferRequest, name: str, datatype: str, shape: list[int], data: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)


def frame(message: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(message).to_bytes(4, "big") + message
