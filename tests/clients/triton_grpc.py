"""Triton's own gRPC client against the models of tests/conformance: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import queue
import sys
import time

import numpy as np
import tritonclient.grpc as triton
from refusals import refused
from tritonclient.utils import triton_to_np_dtype

client = triton.InferenceServerClient(sys.argv[1])
DATATYPES = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")


def text_input(name, text):
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def until_waiting(count):
    """Waits until so many requests in the model wait for their callers to leave."""
    end = time.monotonic() + 30
    while True:
        answer = client.infer("chunks", [text_input("INPUT", "x")], parameters={"count": True})
        if int(answer.as_numpy("OUTPUT")[0]) == count:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


# The server and its models.
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready("storyteller")
assert client.is_model_ready("storyteller", "1")
assert not client.is_model_ready("storyteller", "2")
assert not client.is_model_ready("nobody")
server = client.get_server_metadata(as_json=True)
assert server["name"] == "headrace"
assert {"statistics", "model_repository", "binary_tensor_data"} <= set(server["extensions"])
metadata = client.get_model_metadata("storyteller", as_json=True)
assert metadata["versions"] == ["1"]
assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["1"]}
assert metadata["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": ["1"]}
metadata = client.get_model_metadata("chunks", "1")
assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs] == [("INPUT", "BYTES", [1])]
for name, decoupled in (("storyteller", True), ("chunks", True), ("identity", False)):
    config = client.get_model_config(name).config
    assert (config.name, config.model_transaction_policy.decoupled) == (name, decoupled)
refused("NOT_FOUND", "no model 'nobody'", client.get_model_metadata, "nobody")
refused("NOT_FOUND", "no model 'nobody'", client.get_model_config, "nobody")
refused("NOT_FOUND", "version '2'", client.get_model_metadata, "storyteller", "2")
refused("NOT_FOUND", "no model 'nobody'", client.get_inference_statistics, "nobody")


# One answer to one request: text and tensors.
def succeeded(model):
    (model_statistics,) = client.get_inference_statistics(model).model_stats
    return model_statistics.inference_stats.success.count


before = succeeded("storyteller"), succeeded("identity")
prompt = "Once upon a time"
greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
whole = client.infer("storyteller", [text_input("text_input", prompt)], request_id="whole", parameters=greedy)
assert whole.get_response().id == "whole"
story = whole.as_numpy("text_output")[0].decode()
assert story
echo = triton.InferInput("exclude_input_in_output", [1], "BOOL")
echo.set_data_from_numpy(np.array([False]))
sampling = text_input("sampling_parameters", '{"temperature": "0", "max_tokens": 12, "ignore_eos": true}')
answer = client.infer("storyteller", [text_input("text_input", prompt), echo, sampling])
assert answer.as_numpy("text_output")[0].decode() == prompt + story
sent, inputs = {}, []
for datatype in DATATYPES:
    sent[datatype] = np.arange(6).reshape(2, 3).astype(triton_to_np_dtype(datatype))
    inputs.append(triton.InferInput(datatype, [2, 3], datatype))
    inputs[-1].set_data_from_numpy(sent[datatype])
sent["BYTES"] = np.array([[b"", b"\x00\xff"], ["zwölf".encode(), b"x" * 1000]], dtype=object)
inputs.append(triton.InferInput("BYTES", [2, 2], "BYTES"))
inputs[-1].set_data_from_numpy(sent["BYTES"])
for options in ({}, {"compression_algorithm": "gzip"}, {"compression_algorithm": "deflate"}):
    answer = client.infer("identity", inputs, model_version="1", **options)
    for name, array in sent.items():
        assert answer.as_numpy(name).dtype == array.dtype, name
        assert np.array_equal(answer.as_numpy(name), array), name
later = queue.Queue()
client.async_infer("identity", inputs, callback=lambda result, error: later.put((result, error)), request_id="later")
result, error = later.get(timeout=60)
assert error is None, error
assert (result.get_response().id, result.as_numpy("INT8").tolist()) == ("later", sent["INT8"].tolist())
assert (succeeded("storyteller") - before[0], succeeded("identity") - before[1]) == (2, 4)

# Wrong calls are refused with the right status, and the next call works.
refused("NOT_FOUND", "no model 'nobody'", client.infer, "nobody", inputs)
refused("NOT_FOUND", "version '2'", client.infer, "storyteller", inputs, model_version="2")
refused("INVALID_ARGUMENT", "unknown input", client.infer, "storyteller", inputs)
refused(
    "INVALID_ARGUMENT",
    "temperature",
    client.infer,
    "storyteller",
    [text_input("text_input", prompt)],
    parameters={"temperature": -1},
)
refused("INVALID_ARGUMENT", "more than one response", client.infer, "chunks", [text_input("INPUT", "ab")])
too_large = {"size": 1001}
refused("INTERNAL", "the model failed", client.infer, "chunks", [text_input("INPUT", "ab")], parameters=too_large)
refused("UNIMPLEMENTED", "shared memory", client.get_system_shared_memory_status)
waiting = [text_input("INPUT", "a")], {"waits": True}
refused("DEADLINE_EXCEEDED", "", client.infer, "chunks", waiting[0], parameters=waiting[1], client_timeout=0.5)
until_waiting(0)
call = client.async_infer(
    "chunks", waiting[0], callback=lambda result, error: later.put((result, error)), parameters=waiting[1]
)
until_waiting(1)
call.cancel()
result, error = later.get(timeout=60)
assert error.status() == "StatusCode.CANCELLED", error
until_waiting(0)
answer = client.infer("storyteller", [text_input("text_input", prompt)], parameters=greedy)
assert answer.as_numpy("text_output")[0].decode() == story

# Many requests on one stream, each matched by its id, and errors among them. Waiting tokens are sent together: on a
# busy machine an answer may be one message, unless its tokens are made slowly.
longer = greedy | {"max_tokens": 48, "pace": 25}
answer = client.infer("storyteller", [text_input("text_input", prompt)], parameters=longer)
long_story = answer.as_numpy("text_output")[0].decode()
answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
for number in range(8):
    text = [text_input("text_input", prompt)]
    client.async_stream_infer(
        "storyteller", text, request_id=f"text {number}", parameters=longer, enable_empty_final_response=number % 2 == 1
    )
    pieces = [text_input("INPUT", str(number) * number)]
    # A generator that yields nothing has no answer to mark as the last one; its end is sent on request.
    client.async_stream_infer("chunks", pieces, request_id=f"chunks {number}", enable_empty_final_response=number == 0)
bad = {"nobody": "no model 'nobody'", "chunks": "size must be positive"}
for model in bad:
    client.async_stream_infer(model, [text_input("INPUT", "x")], request_id=model, parameters={"size": 0})
texts, finals, errors = {}, {}, []
while len(finals) < 16 or len(errors) < 2:
    result, error = answers.get(timeout=60)
    if error is not None:
        errors.append(error.message())
        continue
    response = result.get_response()
    assert response.id not in finals, response.id
    if response.parameters["triton_final_response"].bool_param:
        finals[response.id] = len(response.outputs)
    if response.outputs:
        (piece,) = result.as_numpy(response.outputs[0].name)
        texts.setdefault(response.id, []).append(piece.decode())
assert sorted(errors) == sorted(bad.values())
for number in range(8):
    assert "".join(texts[f"text {number}"]) == long_story
    assert len(texts[f"text {number}"]) > 1
    assert finals[f"text {number}"] == (0 if number % 2 else 1)
    assert texts.get(f"chunks {number}", []) == [str(number)] * number
    assert finals[f"chunks {number}"] == (0 if number == 0 else 1)
client.stop_stream()

# A cancelled stream, and one past its deadline, end their requests.
for leave in ("cancel", "deadline"):
    client.start_stream(
        callback=lambda result, error: answers.put((result, error)), stream_timeout=None if leave == "cancel" else 2
    )
    client.async_stream_infer("chunks", waiting[0], request_id=leave, parameters=waiting[1])
    result, error = answers.get(timeout=60)
    assert (error, result.as_numpy("OUTPUT").tolist()) == (None, [b"a"])
    until_waiting(1)
    if leave == "cancel":
        client.stop_stream(cancel_requests=True)
    result, error = answers.get(timeout=60)
    assert error.status() == ("StatusCode.CANCELLED" if leave == "cancel" else "StatusCode.DEADLINE_EXCEEDED"), error
    client.stop_stream()
    until_waiting(0)


# The repository.
def states():
    return {model.name: model.state for model in client.get_model_repository_index().models}


assert states() == {
    "storyteller": "READY", "normalizer": "READY", "identity": "READY", "chunks": "READY", "spare": "UNAVAILABLE"
}  # fmt: skip
refused("NOT_FOUND", "spare", client.infer, "spare", inputs)
client.load_model("spare")
assert client.is_model_ready("spare")
assert client.infer("spare", inputs).as_numpy("FP64").tolist() == sent["FP64"].tolist()
client.unload_model("spare")
assert (states()["spare"], client.is_model_ready("spare")) == ("UNAVAILABLE", False)
refused("NOT_FOUND", "spare", client.infer, "spare", inputs)
refused("NOT_FOUND", "nobody", client.load_model, "nobody")
client.unload_model("normalizer")
date = [text_input("text_input", "date: 3 Mar 2021")]
refused("NOT_FOUND", "normalizer", client.infer, "normalizer", date)
client.load_model("normalizer")
assert client.infer("normalizer", date).as_numpy("text_output").tolist() == [b"2021-03-03"]
assert client.is_server_ready()

# Settings.
levels = client.update_log_settings({"log_verbose_level": 1}, as_json=True)["settings"]
assert levels["log_verbose_level"]["uint32_param"] == 1, levels
assert client.update_log_settings({"log_verbose_level": 0}, as_json=True) == client.get_log_settings(as_json=True)
refused("INVALID_ARGUMENT", "log_file", client.update_log_settings, {"log_file": "/tmp/x"})
traces = client.get_trace_settings(as_json=True)["settings"]
assert traces["trace_mode"]["value"] == ["opentelemetry"]
assert client.update_trace_settings("storyteller", {"trace_count": None}, as_json=True)["settings"] == traces
refused("INVALID_ARGUMENT", "trace_rate", client.update_trace_settings, settings={"trace_rate": "5"})
client.close()
print("done")
