"""Wrong messages to the gRPC services: text, tensors, the payload log, the repository; and gRPC-Web."""

import base64
from random import Random
from typing import Any

from google.protobuf.message import Message

from headrace.oip.tensors import bytes_tensor, encode_raw
from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from tests.fuzz.case import Case, GrpcCall, HttpCall
from tests.fuzz.json_cases import JSON
from tests.fuzz.messages import (
    INFERENCE,
    add_tensor,
    bytes_case,
    changed,
    frame,
    is_served,
    tensor_infer,
    text_infer,
    text_message,
)

_GENERATE = "/headrace.v1.TextGeneration/Generate"
_LOG = "/headrace.v1.PayloadLog"
_NAN = float("nan")
_BAD_FIELDS: tuple[dict[str, Any], ...] = (
    *({"model": name} for name in ("", "nobody", "m" * 5000, "../x", "\x00")),
    *({"prompt": prompt} for prompt in ("", "once " * 1500, "x" * 100_000)),
    *({"temperature": number} for number in (-1.0, _NAN, float("inf"), 1e308)),
    *({"max_tokens": count} for count in (0, 1025, 2**32 - 1)),
    *({"stop": texts} for texts in ([""], ["a"] * 5000, ["x" * 1025])),
    *({"stop_token_ids": ids} for ids in ([99999], [1] * 100_000)),
    *({"logit_bias": bias} for bias in ({5: _NAN}, {99999: 1.0}, dict.fromkeys(range(1025), 1.0))),
    {"request_id": "i" * 100_000},
    {"messages": [headrace_pb2.ChatMessage(role="user", content="x")]},  # Together with a prompt.
    *(
        {"prompt": None, "messages": [headrace_pb2.ChatMessage(role=role, content=text)] * count}
        for role, text, count in (("alien", "x", 1), ("", "", 1), ("user", "x" * 100_000, 1), ("user", "x", 5000))
    ),
)


def generate(random: Random) -> Case:
    """`TextGeneration/Generate`."""
    if random.random() < 0.03:
        return Case("no message", GrpcCall(_GENERATE, ()))
    if random.random() < 0.35:
        return bytes_case(random, _GENERATE, text_message(), headrace_pb2.GenerateRequest, "model")
    bad = random.choice(_BAD_FIELDS)
    request = headrace_pb2.GenerateRequest(**{"model": "storyteller", "prompt": "Once", "max_tokens": 1, **bad})
    return Case(str(bad)[:80], GrpcCall(_GENERATE, (request.SerializeToString(),)))


def model_infer(random: Random) -> Case:
    """`ModelInfer` through the gateway: text and tensors."""
    if random.random() < 0.03:
        return Case("no message", GrpcCall(f"{INFERENCE}/ModelInfer", (), random.choice(("", "predictor"))))
    return _infer_case(random, f"{INFERENCE}/ModelInfer")


def model_stream_infer(random: Random) -> Case:
    """The same on a stream, sometimes followed by a valid request."""
    case = _infer_case(random, f"{INFERENCE}/ModelStreamInfer")
    call = case.call
    assert isinstance(call, GrpcCall)
    more = (text_infer(),) if random.random() < 0.3 else ()
    metadata = (("triton_grpc_error", "true"),) if random.random() < 0.3 else ()
    return Case(case.what, GrpcCall(call.path, call.messages + more, "", metadata), case.must_fail)


def predictor(random: Random) -> Case:
    """`ModelInfer` and `ModelStreamInfer` with the authority `predictor`."""
    path = f"{INFERENCE}/{random.choice(('ModelInfer', 'ModelStreamInfer'))}"
    way = random.random()
    if way < 0.2:
        good = tensor_infer().SerializeToString()
        return bytes_case(random, path, good, pb.ModelInferRequest, "model_name", "predictor")
    what, request = _bad_tensor(random) if way < 0.4 else _bad_ids(random)
    return Case(what, GrpcCall(path, (request.SerializeToString(),), "predictor"))


def _infer_case(random: Random, path: str) -> Case:
    """A wrong ModelInferRequest of text or tensors."""
    way = random.random()
    if way < 0.3:
        return bytes_case(random, path, text_infer(), pb.ModelInferRequest, "model_name")
    what, request = _bad_text(random) if way < 0.55 else _bad_tensor(random)
    return Case(what, GrpcCall(path, (request.SerializeToString(),)))


def _bad_ids(random: Random) -> tuple[str, pb.ModelInferRequest]:
    request = pb.ModelInferRequest(model_name="storyteller", id="r")
    request.parameters["max_tokens"].int64_param = 1
    ids, shape, name, datatype = [5, 6, 7], [3], "input_ids", "INT64"
    way = random.choice(("ids", "shape", "datatype", "name", "empty", "long", "parameter", "output_ids"))
    match way:
        case "ids":
            ids = [random.choice((-1, 1536, 2**31, 2**63 - 1, -(2**63)))] * 3
        case "shape":
            shape = random.choice(([3, 1], [2], [-3], [3, 0], [2**62, 4], []))
        case "datatype":
            datatype = random.choice(("INT16", "FP64", "BYTES", "", "INT65"))
        case "name":
            name = random.choice(("ids", "", "x" * 2000))
        case "empty":
            ids, shape = [], [0]
        case "long":
            ids, shape = [5] * 2000, [2000]
        case "parameter":
            _set_bad_parameter(random, request)
        case _:
            add_tensor(request, "output_ids", "INT64", [1], (99999).to_bytes(8, "little"))
    add_tensor(request, name, datatype, shape, b"".join(each.to_bytes(8, "little", signed=True) for each in ids))
    return way, request


def _bad_text(random: Random) -> tuple[str, pb.ModelInferRequest]:
    request = pb.ModelInferRequest.FromString(text_infer())
    way = random.choice(("input", "utf-8", "parameter", "sampling", "outputs", "version", "flag", "missing"))
    match way:
        case "input":
            add_tensor(request, "bogus", "BYTES", [1], encode_raw(bytes_tensor("x", [b"x"])))
        case "utf-8":
            request.raw_input_contents[0] = encode_raw(bytes_tensor("x", [b"\xff\xfe" + random.randbytes(5)]))
        case "parameter":
            _set_bad_parameter(random, request)
        case "sampling":
            wrong = random.choice((b"{", b"[]", b"5", b"[" * 50_000, b'{"bogus":1}', b'{"temperature":"hot"}', b"\xff"))
            add_tensor(request, "sampling_parameters", "BYTES", [1], encode_raw(bytes_tensor("x", [wrong])))
        case "outputs":
            request.outputs.add(name=random.choice(("nope", "", "text_input")))
        case "version":
            request.model_version = random.choice(("2", "-1", "x", "9" * 999))
        case "flag":
            add_tensor(request, "stream", "BOOL", [1], bytes([random.randint(2, 255)]))
        case _:
            del request.inputs[:]
            del request.raw_input_contents[:]
    return f"text, {way}", request


def _bad_tensor(random: Random) -> tuple[str, pb.ModelInferRequest]:
    request = tensor_infer(random.choice(("identity", "declared", "embedder", "classifier")))
    tensor = request.inputs[0]
    way = random.choice(("shape", "datatype", "size", "both", "twice", "raw", "many", "model"))
    match way:
        case "shape":
            tensor.shape[:] = random.choice(([-1, -3], [2**62, 2**62], [2**63 - 1], [4], [0], [3] * 40, [3, -1]))
        case "datatype":
            tensor.datatype = random.choice(("", "FLOAT", "fp32", "INT256", "x" * 5000))
        case "size":
            request.raw_input_contents[0] = random.randbytes(random.choice((0, 1, 11, 13, 4000)))
        case "both":
            tensor.contents.fp32_contents.extend([1, 2, 3])
        case "twice":
            add_tensor(request, tensor.name, tensor.datatype, list(tensor.shape), request.raw_input_contents[0])
        case "raw":
            request.raw_input_contents.extend([b"x"] * random.choice((1, 5, 5000)))
        case "many":
            for _ in range(random.choice((10, 3000))):
                add_tensor(request, tensor.name, "FP32", [1], b"1234")
        case _:
            request.model_name = random.choice(("nobody", "", "identity\x00", "n" * 20_000))
    return f"{request.model_name[:20]}, {way}", request


def _set_bad_parameter(random: Random, request: pb.ModelInferRequest) -> None:
    name, field, value = random.choice(
        (
            ("max_tokens", "int64_param", -(2**63)),
            ("max_tokens", "string_param", "many"),
            ("temperature", "double_param", _NAN),
            ("temperature", "string_param", "9" * 50_000),
            ("bogus", "int64_param", 1),
            ("stop_token_ids", "string_param", "[1,"),
            ("x" * 9999, "string_param", "y"),
        )
    )
    setattr(request.parameters[name], field, value)


_QUERIES = (
    "bogus=1", "page_size=x", "page_size=-1", "page_size=1001", "page_token=!", "page_token=AAAA", "since=yesterday",
    "until=2021-13-45T00:00:00Z", "min_duration_ms=x", "min_ttft_ms={}", "model.x=1", "filter=a%20or%201=1",
)  # fmt: skip


def payload_query(random: Random) -> Case:
    """`PayloadLog` over gRPC and REST, except `Tail`, which does not end."""
    way = random.choice(("bytes", "query", "get", "no record", "parameters", "parameters"))
    match way:
        case "bytes":
            good = headrace_pb2.QueryPayloadsRequest(model="none", page_size=1).SerializeToString()
            return bytes_case(random, f"{_LOG}/Query", good, headrace_pb2.QueryPayloadsRequest, None)
        case "query":
            fields: dict[str, Any] = random.choice(
                ({"page_size": 1001}, {"page_token": "!"}, {"page_token": "x" * 999})
            )
            message: Message = headrace_pb2.QueryPayloadsRequest(**fields)
            return Case(f"{fields}", GrpcCall(f"{_LOG}/Query", (message.SerializeToString(),)))
        case "get":
            keys: dict[str, str] = random.choice(({}, {"record_id": "x" * 9999}, {"request_id": "\x00none"}))
            message = headrace_pb2.GetPayloadRequest(**keys)
            return Case(f"Get {str(keys)[:60]}", GrpcCall(f"{_LOG}/Get", (message.SerializeToString(),)))
        case "no record":
            path = f"/headrace/v1/payloads/{random.choice(('x', '%00', '..%2f', '-', 'a' * 3000))}"
            return Case("no record", HttpCall(path, b"", {}, "GET"))
        case _:
            query = random.choice(_QUERIES)
            return Case(query, HttpCall(f"/headrace/v1/payloads?{query}", b"", {}, "GET"))


def repository(random: Random) -> Case:
    """Calls about models and the server that must change nothing, over gRPC and REST."""
    if random.random() < 0.3:
        return _rest_repository(random)
    name = random.choice(("nobody", "../../etc", "/etc/passwd", "a/b/c", "x" * 3000, "\x00", "storyteller/../identity"))
    load = pb.RepositoryModelLoadRequest(model_name="storyteller")
    load.parameters[random.choice(("config", "file:1/model.py", "bogus"))].string_param = "/etc/passwd"
    log = pb.LogSettingsRequest()
    log.settings[random.choice(("log_error", "log_file", "bogus"))].string_param = "/etc/passwd"
    trace = pb.TraceSettingRequest()
    trace.settings[random.choice(("trace_rate", "trace_level", "bogus"))].value.append("17")
    method, message = random.choice(
        (
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name)),
            ("RepositoryModelLoad", load),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name)),
            ("ModelMetadata", pb.ModelMetadataRequest(name=name)),
            ("ModelConfig", pb.ModelConfigRequest(name=name)),
            ("ModelStatistics", pb.ModelStatisticsRequest(name=name, version="x" * 99)),
            ("LogSettings", log),
            ("TraceSetting", trace),
            ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="x")),
            ("Nothing", pb.ServerLiveRequest()),
        )
    )
    is_noise = method.startswith("RepositoryModel") and random.random() < 0.3
    data = b"\xff" + random.randbytes(random.randint(0, 99)) if is_noise else message.SerializeToString()
    what = f"{method}, {'noise' if is_noise else name[:40]}"
    return Case(what, GrpcCall(f"{INFERENCE}/{method}", (data,), random.choice(("", "predictor"))))


def _rest_repository(random: Random) -> Case:
    name = random.choice(("nobody", "%00", "..%2f..%2fetc", "x" * 2000, "%ff%fe"))
    path, method, body = random.choice(
        (
            (f"/v2/repository/models/{name}/load", "POST", b""),
            (f"/v2/repository/models/{name}/unload", "POST", b"{}"),
            ("/v2/repository/models/storyteller/load", "POST", b'{"parameters":{"config":"{}"}}'),
            ("/v2/repository/models/storyteller/unload", "POST", b'{"parameters":{"x":1.5}}'),
            ("/v2/repository/index", "POST", b'{"ready":5}'),
            (f"/v2/models/{name}", "GET", b""),
            (f"/v2/models/{name}/stats", "GET", b""),
            ("/v2/logging", "POST", b'{"log_verbose_level":-1}'),
            ("/v2/trace/setting", "POST", b'{"trace_level":{}}'),
            ("/v2/systemsharedmemory/status", "GET", b""),
        )
    )
    return Case(f"{method} {path[:60]} {body!r}", HttpCall(path, body, JSON, method))


def grpc_web(random: Random) -> Case:
    """gRPC-Web: malformed frames, and wrong messages in valid ones."""
    path, good, kind, name = random.choice(
        (
            (_GENERATE, text_message(), headrace_pb2.GenerateRequest, "model"),
            (f"{INFERENCE}/ModelInfer", text_infer(), pb.ModelInferRequest, "model_name"),
        )
    )
    headers = {"content-type": random.choice(("application/grpc-web+proto", "application/grpc-web"))}
    way = random.choice(("bytes", "bytes", "wrong", "frame", "compressed", "text"))
    match way:
        case "bytes":
            what, message = changed(random, good)
            must_fail = not is_served(message, kind, name)
            return Case(f"message, {what}", HttpCall(path, frame(message), headers, web=True), must_fail)
        case "wrong":
            case = generate(random) if path == _GENERATE else model_infer(random)
            assert isinstance(case.call, GrpcCall)
            body = b"".join(map(frame, case.call.messages))
            return Case(case.what, HttpCall(path, body, headers, web=True), case.must_fail)
        case "frame":
            whole = frame(good)
            longer = whole[:1] + (len(good) + random.randint(1, 2**31)).to_bytes(4, "big") + good
            body = random.choice((b"", whole[: random.randrange(len(whole))], longer))
            return Case("frame that is cut off", HttpCall(path, body, headers, web=True))
        case "compressed":
            return Case("compressed flag", HttpCall(path, frame(good, flags=1), headers, web=True), broken_frame=True)
        case _:
            headers = {"content-type": "application/grpc-web-text"}
            body = base64.b64encode(frame(b"\xff" + random.randbytes(20)))
            return Case("text of noise", HttpCall(path, body, headers, web=True))
