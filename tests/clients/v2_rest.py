"""Triton's own HTTP clients, sync and asyncio, against the models of tests/system/test_v2_rest.py: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import asyncio
import sys

import ml_dtypes
import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from refusals import refused

(gateway,) = sys.argv[1:]
client = triton.InferenceServerClient(gateway, concurrency=2, network_timeout=60, connection_timeout=60)
ARRAYS = {
    "BOOL": np.array([True, False]),
    "BYTES": np.array([[b"one", "zwei \u00e4".encode()]], dtype=object),
    "FP16": np.arange(6, dtype=np.float16).reshape(2, 3) / 7,
    "BF16": np.arange(4).astype(ml_dtypes.bfloat16),
    "FP32": np.array([0.1, np.nan, -np.inf], dtype=np.float32),
    "FP64": np.array([[0.1], [1e300]]),
    "EMPTY": np.zeros((0, 7), dtype=np.float32),
}
for datatype in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"):
    limits = np.iinfo(datatype.lower())
    ARRAYS[datatype] = np.array([limits.min, limits.max], dtype=limits.dtype)
BINARY_ONLY = ("FP16", "BF16")


def inputs_of(names, binary):
    inputs = []
    for name in names:
        datatype = "FP32" if name == "EMPTY" else name
        inputs.append(triton.InferInput(name, list(ARRAYS[name].shape), datatype))
        inputs[-1].set_data_from_numpy(ARRAYS[name], binary_data=binary or name in BINARY_ONLY)
    return inputs


def check(result, names):
    for name in names:
        answer = result.as_numpy(name)
        assert answer.shape == ARRAYS[name].shape, name
        if name == "BYTES":
            assert [item if isinstance(item, bytes) else item.encode() for item in answer.ravel()] == ARRAYS[
                name
            ].ravel().tolist()
        else:
            assert answer.dtype == ARRAYS[name].dtype, name
            np.testing.assert_array_equal(answer, ARRAYS[name], name)


assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready("identity")
assert client.is_model_ready("identity", "1")
assert not client.is_model_ready("nobody")
assert not client.is_model_ready("identity", "7")
assert client.get_server_metadata()["name"] == "headrace"
metadata = client.get_model_metadata("storyteller")
assert metadata["versions"] == ["1"]
assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
assert client.get_model_metadata("rows", "1")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
config = client.get_model_config("storyteller")
assert config["model_transaction_policy"] == {"decoupled": True}
assert config["input"][0]["data_type"] == "TYPE_STRING"
refused("404", "no model 'nobody'", client.get_model_metadata, "nobody")
index = client.get_model_repository_index()
assert {model["name"] for model in index} >= {"storyteller", "identity"}
assert {model["state"] for model in index} == {"READY"}

# Every datatype: all in binary, all in JSON if possible, and both mixed.
everything = list(ARRAYS)
check(client.infer("identity", inputs_of(everything, True)), everything)
outputs = [triton.InferRequestedOutput(name, binary_data=name in BINARY_ONLY) for name in everything]
check(client.infer("identity", inputs_of(everything, False), outputs=outputs), everything)
mixed = inputs_of(everything[::2], True) + inputs_of(everything[1::2], False)
outputs = [
    triton.InferRequestedOutput(name, binary_data=name in BINARY_ONLY or at % 3 == 0)
    for at, name in enumerate(everything)
]
check(client.infer("identity", mixed, outputs=outputs), everything)

result = client.infer(
    "identity",
    inputs_of(["INT8", "FP64"], True),
    outputs=[triton.InferRequestedOutput("FP64")],
    request_id="one",
    model_version="1",
)
assert [output["name"] for output in result.get_response()["outputs"]] == ["FP64"]
assert (result.get_response()["id"], result.get_response()["model_version"]) == ("one", "1")
big = triton.InferInput("big", [2, 1024, 1024], "FP32")
big.set_data_from_numpy(np.random.default_rng(0).random((2, 1024, 1024), dtype=np.float32))
assert client.infer("identity", [big]).as_numpy("big").tobytes() == big._get_binary_data()
waiting = [client.async_infer("identity", [big]) for _ in range(4)]
assert all(one.get_result(timeout=60).as_numpy("big").shape == (2, 1024, 1024) for one in waiting)

for coding in ("gzip", "deflate"):
    result = client.infer(
        "identity",
        inputs_of(everything, True),
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    check(result, everything)

# Sequence, priority and timeout are for another server's scheduler; they are ignored.
check(
    client.infer("identity", inputs_of(["INT8"], True), sequence_id=7, sequence_start=True, priority=1, timeout=1000),
    ["INT8"],
)

text = triton.InferInput("text_input", [1], "BYTES")
text.set_data_from_numpy(np.array([b"Once upon a time"], dtype=object))
parameters = {"max_tokens": 5, "seed": 3, "temperature": 0.5, "ignore_eos": True}
whole = client.infer("storyteller", [text], parameters=parameters)
text.set_data_from_numpy(np.array([b"Once upon a time"], dtype=object), binary_data=False)
assert client.infer(
    "storyteller",
    [text],
    outputs=[triton.InferRequestedOutput("text_output", binary_data=False)],
    parameters=parameters,
).as_numpy("text_output").tolist() == [whole.as_numpy("text_output")[0].decode()]
before = client.get_inference_statistics("identity")["model_stats"][0]
check(client.infer("identity", inputs_of(["INT8"], True)), ["INT8"])
after = client.get_inference_statistics("identity", "1")["model_stats"][0]
assert after["inference_count"] == before["inference_count"] + 1
assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
assert {model["name"] for model in client.get_inference_statistics()["model_stats"]} >= {"storyteller", "identity"}

refused("404", "no model 'nobody'", client.infer, "nobody", [text])
refused(
    "400",
    "classification extension is not supported",
    client.infer,
    "identity",
    inputs_of(["FP32"], True),
    outputs=[triton.InferRequestedOutput("FP32", class_count=2)],
)
shared = triton.InferInput("x", [1], "FP32")
shared.set_shared_memory("region", 4)
refused("400", "shared memory is not supported", client.infer, "identity", [shared])
refused("400", "more than one response", client.infer, "twice", [])
refused("500", "the model failed on this request", client.infer, "failing", [])
refused("501", "shared memory is not supported", client.get_system_shared_memory_status)
refused("501", "shared memory is not supported", client.register_system_shared_memory, "r", "/k", 4)
refused("501", "shared memory is not supported", client.unregister_system_shared_memory)
refused("501", "shared memory is not supported", client.get_cuda_shared_memory_status, "r")

settings = client.get_trace_settings()
assert (settings["trace_level"] in (["OFF"], ["TIMESTAMPS"]), settings["trace_count"]) == (True, "-1"), settings
assert (
    client.update_trace_settings("identity", {"trace_level": settings["trace_level"], "trace_count": None}) == settings
)
refused("400", "unknown trace setting 'trace_rate'", client.update_trace_settings, "identity", {"trace_rate": 5})
refused("404", "no model 'nobody'", client.get_trace_settings, "nobody")
logging = client.get_log_settings()
assert logging["log_info"] is True
assert client.update_log_settings({"log_info": True, "log_verbose_level": logging["log_verbose_level"]}) == logging
refused("400", "unknown log setting", client.update_log_settings, {"log_colour": True})

client.unload_model("twice")
assert not client.is_model_ready("twice")
states = {model["name"]: model["state"] for model in client.get_model_repository_index()}
assert (states["twice"], states["identity"]) == ("UNAVAILABLE", "READY"), states
client.load_model("twice")
assert client.is_model_ready("twice")
refused("400", "more than one response", client.infer, "twice", [])
refused("404", "nobody", client.load_model, "nobody")
client.close()


async def asynchronous():
    async with triton_aio.InferenceServerClient(gateway) as aio:
        assert await aio.is_server_ready()
        assert await aio.is_model_ready("identity")
        results = await asyncio.gather(*(aio.infer("identity", inputs_of(everything, True)) for _ in range(8)))
        for result in results:
            check(result, everything)
        refusal = await asyncio.gather(aio.infer("nobody", [text]), return_exceptions=True)
        assert "no model 'nobody'" in refusal[0].message(), refusal


asyncio.run(asynchronous())
print("done")
