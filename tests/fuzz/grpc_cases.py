"""Wrong messages to the other gRPC services: text, the payload log, the repository; and gRPC-Web."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from random import Random
from typing import Any

from google.protobuf.message import Message

from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from tests.fuzz.case import Case, GrpcCall, HttpCall
from tests.fuzz.infer_cases import model_infer
from tests.fuzz.json_values import bad_transport
from tests.fuzz.messages import INFERENCE, bytes_case, changed, frame, is_served, text_infer, text_message
from tests.fuzz.text_cases import JSON

_GENERATE = "/headrace.v1.TextGeneration/Generate"
_LOG = "/headrace.v1.PayloadLog"

_NAN, _INF = float("nan"), float("inf")
_GENERATE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "model": ("", "nobody", "m" * 5000, "../x", "\x00"),
    "prompt": ("", "once " * 1500, "x" * 100_000),
    "max_tokens": (0, 1025, 2**32 - 1),
    "temperature": (-1.0, 100.5, _NAN, _INF, -_INF, 1e308),
    "top_p": (0.0, -1.0, 1.5, _NAN, _INF),
    "min_p": (-0.1, 1.5, _NAN),
    "repetition_penalty": (0.0, -1.0, 101.0, _NAN),
    "presence_penalty": (101.0, -101.0, _INF),
    "frequency_penalty": (101.0, -101.0, _NAN),
    "min_tokens": (2000, 2**32 - 1),
    "stop": ([""], ["a"] * 17, ["x" * 1025], ["a"] * 5000),
    "chunk_tokens": (0, 4097, 2**32 - 1),
    "chunk_ms": (600_001, 2**32 - 1),
    "stop_token_ids": ([99999], [1] * 65, [2**32 - 1], [1] * 100_000),
    "logit_bias": ({5: 101.0}, {5: _NAN}, {99999: 1.0}, dict.fromkeys(range(1025), 1.0)),
    "allowed_token_ids": ([99999], [1] * 1025, [2**32 - 1]),
    "bad_words": ([""], ["a"] * 65, ["x" * 257]),
    "top_logprobs": (5, 21, 2**32 - 1),
    "request_id": ("i" * 257, "i" * 100_000),
    "cache_salt": ("x" * 257,),
    "messages": ([{"role": "user", "content": "x"}],),  # Together with a prompt.
}


def generate(random: Random) -> Case:
    """`TextGeneration/Generate`."""
    if random.random() < 0.03:
        return Case("no message", GrpcCall(_GENERATE, ()))
    if random.random() < 0.35:
        return bytes_case(random, _GENERATE, text_message(), headrace_pb2.GenerateRequest, "model")
    if random.random() < 0.1:
        conversation = random.choice(
            ([], [("alien", "x")], [("", "")], [("user", "x" * 100_000)], [("user", "x")] * 5000)
        )
        messages = [headrace_pb2.ChatMessage(role=role, content=content) for role, content in conversation]
        request = headrace_pb2.GenerateRequest(model="storyteller", messages=messages, max_tokens=1)
        return Case("messages", GrpcCall(_GENERATE, (request.SerializeToString(),)))
    name = random.choice(list(_GENERATE_FIELDS))
    value = random.choice(_GENERATE_FIELDS[name])
    fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 1, name: value}
    request = headrace_pb2.GenerateRequest(**fields)
    return Case(f"{name}={str(value)[:80]}", GrpcCall(_GENERATE, (request.SerializeToString(),)))


def payload_query(random: Random) -> Case:
    """`PayloadLog` over gRPC and REST, except `Tail`, which does not end."""
    way = random.random()
    if way < 0.35:
        good = headrace_pb2.QueryPayloadsRequest(model="none", page_size=1).SerializeToString()
        return bytes_case(random, f"{_LOG}/Query", good, headrace_pb2.QueryPayloadsRequest, None)
    if way < 0.5:
        fields = random.choice(({"page_size": random.randint(1001, 2**32 - 1)}, {"page_token": random.choice(_TOKENS)}))
        request = headrace_pb2.QueryPayloadsRequest(**fields)
        return Case(f"{fields}", GrpcCall(f"{_LOG}/Query", (request.SerializeToString(),)))
    if way < 0.6:
        keys: dict[str, str] = random.choice(
            ({}, {"record_id": "x" * 9999}, {"record_id": ""}, {"request_id": "\x00none"})
        )
        request = headrace_pb2.GetPayloadRequest(**keys)
        return Case(f"Get {str(keys)[:60]}", GrpcCall(f"{_LOG}/Get", (request.SerializeToString(),)))
    if way < 0.7:
        path = f"/headrace/v1/payloads/{random.choice(('x', '%00', '..%2f', '-', 'a' * 3000))}"
        return Case("no record", HttpCall(path, b"", {}, "GET"))
    if way < 0.95:
        query = random.choice(_QUERIES)
        path = random.choice(("/headrace/v1/payloads", "/headrace/v1/payloads:tail"))
        if query.split("=")[0] in ("page_size", "page_token", "since", "until"):
            path = "/headrace/v1/payloads"
        return Case(query[:80], HttpCall(f"{path}?{query}", b"", {}, "GET"))
    return bad_transport(
        random, "/headrace/v1/generate", b'{"model":"storyteller","prompt":"Once","max_tokens":1}', JSON
    )


_TOKENS = ("!", "AAAA", "x" * 999, "=" * 22, "AZ-" * 9)
_QUERIES = (
    "bogus=1", "Model=x", "page_size=x", "page_size=-1", "page_size=1001", "page_size=99999999999", "page_token=!",
    "page_token=AAAA", "since=yesterday", "since=5", "until=2021-13-45T00:00:00Z", "min_duration_ms=x",
    "min_ttft_ms={}", "model.x=1", "sort=asc", "limit=5", "filter=a%20or%201=1", "min_duration_ms=", "text=x",
)  # fmt: skip


def repository(random: Random) -> Case:
    """Calls about models and the server that must change nothing, over gRPC and REST."""
    authority = random.choice(("", "predictor"))
    name = random.choice(
        ("nobody", "", "../../etc", "/etc/passwd", "a/b/c", "x" * 3000, "\x00", "storyteller/../identity")
    )
    way = random.choice(("index", "load", "unload", "about", "settings", "memory", "bytes", "rest", "unknown"))
    match way:
        case "index":
            message: Message = pb.RepositoryIndexRequest(repository_name=random.choice(("x", "y" * 999)))
            # The gateway has one repository; its name is ignored.
            return Case(way, _about("RepositoryIndex", message, authority), must_fail=authority == "predictor")
        case "load":
            load = pb.RepositoryModelLoadRequest(model_name=name)
            if random.random() < 0.6:
                load.model_name = random.choice((name, "storyteller"))
                load.parameters[
                    random.choice(("config", "file:1/model.py", "source", "bogus"))
                ].string_param = "/etc/passwd"
            return Case(f"load {name[:40]}", _about("RepositoryModelLoad", load, authority))
        case "unload":
            return Case(
                f"unload {name[:40]}",
                _about("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name), authority),
            )
        case "about":
            method = random.choice(("ModelMetadata", "ModelConfig", "ModelStatistics"))
            message = getattr(pb, f"{method}Request")(name=name or "nobody", version=random.choice(("", "9", "x" * 99)))
            return Case(f"{method} {name[:40]}", _about(method, message, authority))
        case "settings":
            if random.random() < 0.5:
                settings = pb.LogSettingsRequest()
                key = random.choice(("log_error", "log_file", "bogus", "log_verbose_level"))
                settings.settings[key].string_param = random.choice(("off", "/etc/passwd"))
                return Case(f"log {key}", _about("LogSettings", settings, authority))
            trace = pb.TraceSettingRequest(model_name=random.choice(("", "nobody")))
            trace.settings[random.choice(("trace_rate", "trace_level", "bogus"))].value.append("17")
            return Case("trace", _about("TraceSetting", trace, authority))
        case "memory":
            method = random.choice(
                ("SystemSharedMemoryRegister", "CudaSharedMemoryStatus", "SystemSharedMemoryUnregister")
            )
            return Case(method, _about(method, getattr(pb, f"{method}Request")(name="x"), authority))
        case "bytes":
            method = random.choice(("ModelMetadata", "ModelConfig", "RepositoryModelLoad", "RepositoryModelUnload"))
            noise = b"\xff" + random.randbytes(random.randint(0, 99))
            return Case(f"{method}, noise", GrpcCall(f"{INFERENCE}/{method}", (noise,), authority))
        case "rest":
            return _rest_repository(random)
        case _:
            path = random.choice((f"{INFERENCE}/Nothing", "/headrace.v1.TextGeneration/Nothing", "/no.Service/Method"))
            return Case(f"unknown {path}", GrpcCall(path, (b"",)))


def _rest_repository(random: Random) -> Case:
    name = random.choice(("nobody", "%00", "..%2f..%2fetc", "x" * 2000, "%ff%fe"))
    path, method, body = random.choice(
        (
            (f"/v2/repository/models/{name}/load", "POST", b""),
            (f"/v2/repository/models/{name}/unload", "POST", b"{}"),
            ("/v2/repository/models/storyteller/load", "POST", b'{"parameters":{"config":"{}"}}'),
            ("/v2/repository/models/storyteller/load", "POST", b'{"parameters":{"file:x":5}}'),
            ("/v2/repository/models/storyteller/load", "POST", b'{"parameters":[1]}'),
            ("/v2/repository/models/storyteller/unload", "POST", b'{"parameters":{"x":1.5}}'),
            ("/v2/repository/index", "POST", b'{"ready":5}'),
            ("/v2/repository/index", "POST", b"[]"),
            ("/v2/repository/index", "POST", b"{"),
            (f"/v2/models/{name}", "GET", b""),
            (f"/v2/models/{name}/config", "GET", b""),
            (f"/v2/models/{name}/stats", "GET", b""),
            ("/v2/models/storyteller/versions/9", "GET", b""),
            ("/v2/logging", "POST", b'{"log_error":5}'),
            ("/v2/logging", "POST", b'{"log_verbose_level":-1}'),
            ("/v2/trace/setting", "POST", b'{"trace_level":{}}'),
            ("/v2/trace/setting", "POST", b'{"bogus":"1"}'),
            ("/v2/systemsharedmemory/status", "GET", b""),
            ("/v2/nonsense/status", "GET", b""),
            ("/v2/cudasharedmemory/region/x/register", "POST", b"{}"),
        )
    )
    return Case(f"{method} {path[:60]} {body!r}", HttpCall(path, body, JSON, method))


def grpc_web(random: Random) -> Case:
    """gRPC-Web: malformed frames, and wrong messages in valid ones."""
    path, good, kind = random.choice(
        (
            (_GENERATE, text_message(), headrace_pb2.GenerateRequest),
            (f"{INFERENCE}/ModelInfer", text_infer(), pb.ModelInferRequest),
        )
    )
    headers = {"content-type": random.choice(("application/grpc-web+proto", "application/grpc-web"))}
    way = random.choice(("bytes", "bytes", "wrong", "frame", "compressed", "text", "path", "content-type"))
    match way:
        case "bytes":
            what, message = changed(random, good)
            wrong = not is_served(message, kind, "model" if path == _GENERATE else "model_name")
            return Case(f"message, {what}", HttpCall(path, frame(message), headers, web=True), must_fail=wrong)
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
        case "text":
            headers = {"content-type": "application/grpc-web-text"}
            body = base64.b64encode(frame(b"\xff" + random.randbytes(20)))
            return Case("text of noise", HttpCall(path, body, headers, web=True))
        case "path":
            path = random.choice(
                ("/", "/headrace.v1.TextGeneration/Nothing", "/headrace.v1.PayloadIngest/Append", "/x")
            )
            return Case(f"path {path}", HttpCall(path, frame(good), headers, web=True))
        case _:
            kind_of_body = random.choice(("application/json", "text/plain", "application/octet-stream"))
            return Case(f"content-type {kind_of_body}", HttpCall(path, frame(good), {"content-type": kind_of_body}))


def _about(method: str, message: Message, authority: str) -> GrpcCall:
    return GrpcCall(f"{INFERENCE}/{method}", (message.SerializeToString(),), authority)
