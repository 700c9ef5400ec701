"""Triton's own client against the predictor of tests/system/test_repository.py: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1], channel_args=[("grpc.default_authority", "predictor")])


def state(name):
    return {model.name: model.state for model in client.get_model_repository_index().models}.get(name)


def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return error.status(), error.message()
    raise AssertionError("was not refused")


tensor = triton.InferInput("x", [3], "FP32")
tensor.set_data_from_numpy(np.array([1, 2, 3], dtype=np.float32))

assert "model_repository" in client.get_server_metadata().extensions
assert state("echo") == "UNAVAILABLE"
assert not client.is_model_ready("echo")
assert refused(client.infer, "echo", [tensor])[0] == "StatusCode.NOT_FOUND"
client.load_model("echo")
assert state("echo") == "READY"
assert client.is_model_ready("echo", "1")
assert not client.is_model_ready("echo", "2")
assert client.infer("echo", [tensor]).as_numpy("x").tolist() == [1, 2, 3]
client.load_model("echo")
assert client.infer("echo", [tensor]).as_numpy("x").tolist() == [1, 2, 3]
# Counted since the last load.
assert client.get_inference_statistics("echo", "1").model_stats[0].inference_stats.success.count == 1

answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
for name in ("a", "b", "c"):
    client.async_stream_infer("echo", [tensor], request_id=name, enable_empty_final_response=name == "c")
client.async_stream_infer("nobody", [tensor], request_id="d")
got = [answers.get(timeout=60) for _ in range(5)]
assert [error.message() for _, error in got if error] == ["no model 'nobody'"]
responses = [result.get_response() for result, error in got if not error]
assert sorted((r.id, r.parameters["triton_final_response"].bool_param, len(r.outputs)) for r in responses) == [
    ("a", True, 1),
    ("b", True, 1),
    ("c", False, 1),
    ("c", True, 0),
]
client.stop_stream()

client.unload_model("echo", unload_dependents=True)
assert state("echo") == "UNAVAILABLE"
assert refused(client.infer, "echo", [tensor])[0] == "StatusCode.NOT_FOUND"
assert refused(client.load_model, "echo", config="{}")[0] == "StatusCode.INVALID_ARGUMENT"

levels = client.update_log_settings({"log_verbose_level": 1}, as_json=True)["settings"]
assert levels["log_verbose_level"]["uint32_param"] == 1, levels
assert client.update_log_settings({"log_verbose_level": 0}, as_json=True) == client.get_log_settings(as_json=True)
assert refused(client.update_log_settings, {"log_file": "/tmp/x"})[0] == "StatusCode.INVALID_ARGUMENT"
traces = client.get_trace_settings(as_json=True)["settings"]
assert traces["trace_mode"]["value"] == ["opentelemetry"]
assert client.update_trace_settings("storyteller", {"trace_count": None}, as_json=True)["settings"] == traces
assert refused(client.update_trace_settings, settings={"trace_rate": "5"})[0] == "StatusCode.INVALID_ARGUMENT"
for call in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
    assert refused(call)[0] == "StatusCode.UNIMPLEMENTED"
assert refused(client.register_system_shared_memory, "r", "/k", 8)[0] == "StatusCode.UNIMPLEMENTED"
print("done")
