"""Triton's own client against the models of tests/system/test_tensor_models.py: GATEWAY SOCKET.

Run in the clients' environment; prints "done" if every check passed. Each request continues after
bytes on its connection to SOCKET, so that a chunk is read before the model generates the next one.
"""

import queue
import socket
import sys

import tritonclient.grpc as triton

gateway, path = sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
answers = queue.Queue()
client = triton.InferenceServerClient(gateway)
assert client.is_model_ready("paced")
assert client.get_model_config("paced").config.model_transaction_policy.decoupled
assert not client.get_model_config("identity").config.model_transaction_policy.decoupled
assert client.get_model_metadata("embedder").outputs[0].name == "embedding"
assert client.get_inference_statistics("identity").model_stats[0].name == "identity"
client.start_stream(callback=lambda result, error: answers.put((result, error)))


def ask(id, **parameters):
    client.async_stream_infer(
        "paced", [], request_id=id, parameters={"gate": path, **parameters}, enable_empty_final_response=True
    )
    gate, _ = server.accept()
    return gate


gate = ask("counting", n=100)
for i in range(100):
    result, error = answers.get(timeout=60)
    assert error is None, error
    assert result.get_response().id == "counting"
    assert result.as_numpy("i").tolist() == [i]
    assert not result.get_response().parameters["triton_final_response"].bool_param
    if i < 99:  # The end follows the last one by itself.
        assert answers.empty()
        gate.sendall(b".")
result, error = answers.get(timeout=60)
assert result.get_response().parameters["triton_final_response"].bool_param
assert len(result.get_response().outputs) == 0

ask("failing", n=3, fail_at=0)
result, error = answers.get(timeout=60)
assert "the model failed on this request" in str(error), error
assert "secret" not in str(error)

ask("after", n=1)
result, error = answers.get(timeout=60)
assert result.as_numpy("id").tolist() == [b"after"]
client.stop_stream()

print("done")
