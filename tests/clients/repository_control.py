"""Triton's own client against the predictor of tests/system/test_repository.py: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

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
print("done")
