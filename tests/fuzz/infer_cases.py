"""Wrong requests to `ModelInfer` and `ModelStreamInfer`: texts, tensors, and token ids at the predictor."""

from __future__ import annotations

from random import Random

from headrace.oip.tensors import bytes_tensor, encode_raw
from headrace_protos import inference_pb2 as pb
from tests.fuzz.case import Case, GrpcCall
from tests.fuzz.messages import INFERENCE, add_tensor, bytes_case, tensor_infer, text_infer

_NAN, _INF = float("nan"), float("inf")


def model_infer(random: Random) -> Case:
    """`ModelInfer` through the gateway: text and tensors."""
    if random.random() < 0.03:
        return Case("no message", GrpcCall(f"{INFERENCE}/ModelInfer", (), random.choice(("", "predictor"))))
    return _infer_case(random, f"{INFERENCE}/ModelInfer", "")


def model_stream_infer(random: Random) -> Case:
    """The same on a stream, sometimes followed by a valid request."""
    case = _infer_case(random, f"{INFERENCE}/ModelStreamInfer", "")
    call = case.call
    assert isinstance(call, GrpcCall)
    more = (text_infer(),) if random.random() < 0.3 else ()
    metadata = (("triton_grpc_error", "true"),) if random.random() < 0.3 else ()
    return Case(case.what, GrpcCall(call.path, call.messages + more, "", metadata), case.must_fail)


def predictor(random: Random) -> Case:
    """`ModelInfer` and `ModelStreamInfer` with the authority `predictor`."""
    path = f"{INFERENCE}/{random.choice(('ModelInfer', 'ModelStreamInfer'))}"
    if random.random() < 0.4:
        return _infer_case(random, path, "predictor", text="ids")
    shape: list[int] = [3]
    ids, name, datatype = [5, 6, 7], "input_ids", "INT64"
    request = pb.ModelInferRequest(model_name="storyteller", id="r")
    request.parameters["max_tokens"].int64_param = 1
    way = random.choice(("ids", "shape", "datatype", "name", "empty", "long", "parameter", "output_ids", "outputs"))
    match way:
        case "ids":
            ids = [random.choice((-1, 1536, 2**31, 2**63 - 1, -(2**63)))] * 3
        case "shape":
            shape = random.choice(([3, 1], [1, 1, 3], [2], [-3], [3, 0], [2**62, 4], []))
        case "datatype":
            datatype = random.choice(("INT16", "FP64", "BYTES", "UINT64", "", "INT65"))
        case "name":
            name = random.choice(("ids", "", "INPUT_IDS", "x" * 2000))
        case "empty":
            ids, shape = [], [0]
        case "long":
            ids, shape = [5] * 2000, [2000]
        case "parameter":
            _set_bad_parameter(random, request)
        case "output_ids":
            bad = random.choice(([-1], [99999], [5] * 2000))
            request.inputs.add(name="output_ids", datatype="INT64", shape=[len(bad)])
            request.raw_input_contents.append(b"".join(each.to_bytes(8, "little", signed=True) for each in bad))
        case _:
            request.outputs.add(name=random.choice(("nope", "", "top_logprobs", "text_output")))
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(b"".join(each.to_bytes(8, "little", signed=True) for each in ids))
    return Case(way, GrpcCall(path, (request.SerializeToString(),), "predictor"))


def _infer_case(random: Random, path: str, authority: str, text: str = "text") -> Case:
    """A wrong ModelInferRequest."""
    way = random.random()
    if way < 0.3:
        good = text_infer() if text == "text" else tensor_infer().SerializeToString()
        return bytes_case(random, path, good, pb.ModelInferRequest, "model_name", authority)
    what, request = _bad_text(random) if text == "text" and way < 0.55 else _bad_tensor(random)
    return Case(what, GrpcCall(path, (request.SerializeToString(),), authority))


def _bad_text(random: Random) -> tuple[str, pb.ModelInferRequest]:
    request = pb.ModelInferRequest.FromString(text_infer())
    way = random.choice(
        ("input", "utf-8", "two", "parameter", "sampling", "outputs", "version", "flag", "id", "missing")
    )
    match way:
        case "input":
            add_tensor(request, "bogus", "BYTES", [1], encode_raw(bytes_tensor("x", [b"x"])))
        case "utf-8":
            request.raw_input_contents[0] = encode_raw(bytes_tensor("x", [b"\xff\xfe" + random.randbytes(5)]))
        case "two":
            request.inputs[0].shape[:] = [2]
            request.raw_input_contents[0] = encode_raw(bytes_tensor("x", [b"a", b"b"]))
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
        case "id":
            request.id = "i" * random.randint(257, 50_000)
        case _:
            del request.inputs[:]
            del request.raw_input_contents[:]
    return f"text, {way}", request


def _bad_tensor(random: Random) -> tuple[str, pb.ModelInferRequest]:
    request = tensor_infer(random.choice(("identity", "declared", "embedder", "classifier")))
    tensor = request.inputs[0]
    way = random.choice(
        ("shape", "datatype", "size", "both", "twice", "nameless", "raw", "typed", "many", "version", "text")
    )
    match way:
        case "shape":
            tensor.shape[:] = random.choice(
                ([-1, -3], [-3], [2**62, 2**62], [2**63 - 1], [4], [0], [3] * 40, [1] * 33, [3, -1])
            )
        case "datatype":
            tensor.datatype = random.choice(("", "FLOAT", "fp32", "INT256", "x" * 5000))
        case "size":
            request.raw_input_contents[0] = random.randbytes(random.choice((0, 1, 11, 13, 4000)))
        case "both":
            tensor.contents.fp32_contents.extend([1, 2, 3])
        case "twice":
            add_tensor(request, tensor.name, tensor.datatype, list(tensor.shape), request.raw_input_contents[0])
        case "nameless":
            tensor.name = ""
        case "raw":
            request.raw_input_contents.extend([b"x"] * random.choice((1, 5, 5000)))
        case "typed":
            del request.raw_input_contents[:]
            tensor.contents.int64_contents.extend([1] * random.choice((1, 3, 9999)))
            tensor.contents.bytes_contents.append(b"x")
        case "many":
            for _ in range(random.choice((10, 3000))):
                add_tensor(request, tensor.name, "FP32", [1], b"1234")
        case "version":
            request.model_version = "7"
        case _:
            request.model_name = random.choice(("nobody", "", "identity\x00", "n" * 20_000))
    return f"{request.model_name[:20]}, {way}", request


def _set_bad_parameter(random: Random, request: pb.ModelInferRequest) -> None:
    name, field, value = random.choice(
        (
            ("max_tokens", "int64_param", 0),
            ("max_tokens", "int64_param", -(2**63)),
            ("max_tokens", "string_param", "many"),
            ("temperature", "double_param", _NAN),
            ("temperature", "double_param", -0.1),
            ("temperature", "string_param", "9" * 50_000),
            ("top_p", "string_param", "1.5"),
            ("top_p", "double_param", _INF),
            ("seed", "string_param", "9" * 40),
            ("bogus", "int64_param", 1),
            ("bogus", "bool_param", True),
            ("ignore_eos", "string_param", "maybe"),
            ("min_p", "bool_param", True),
            ("stop_token_ids", "string_param", "[1,"),
            ("", "int64_param", 1),
            ("x" * 9999, "string_param", "y"),
        )
    )
    setattr(request.parameters[name], field, value)
