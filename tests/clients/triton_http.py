"""Triton's own HTTP client against the models of tests/conformance: GATEWAY. Tensors are tested in v2_rest.py.

Run in the clients' environment; prints "done" if every check passed.
"""

import sys

import numpy as np
import tritonclient.http as triton
from refusals import refused

client = triton.InferenceServerClient(sys.argv[1], network_timeout=60)
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def text_input(name, text, binary=True):
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object), binary_data=binary)
    return tensor


assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready("chunks")
assert client.get_model_metadata("chunks")["outputs"] == [{"name": "OUTPUT", "datatype": "BYTES", "shape": [1]}]
assert client.get_model_config("chunks")["model_transaction_policy"]["decoupled"] is True

# Text, as binary data and as JSON, both ways.
stories = set()
for binary in (True, False):
    outputs = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    text = [text_input("text_input", PROMPT, binary)]
    answer = client.infer("storyteller", text, outputs=outputs, request_id="one", parameters=GREEDY)
    assert answer.get_response()["id"] == "one"
    story = answer.as_numpy("text_output")[0]
    stories.add(story.decode() if binary else story)
assert len(stories) == 1
waiting = [client.async_infer("storyteller", text, parameters=GREEDY) for _ in range(3)]
assert {call.get_result(timeout=60).as_numpy("text_output")[0].decode() for call in waiting} == stories

refused("400", "temperature", client.infer, "storyteller", text, parameters={"temperature": -1})
refused("400", "the context is 1024", client.infer, "storyteller", [text_input("text_input", "once " * 1500)])
refused("400", "more than one response", client.infer, "chunks", [text_input("INPUT", "ab")])
refused("404", "no model 'nobody'", client.infer, "nobody", text)
refused("404", "version '2'", client.infer, "storyteller", text, model_version="2")
refused("500", "the model failed", client.infer, "chunks", [text_input("INPUT", "ab")], parameters={"size": 1001})
waits = {"inputs": [text_input("INPUT", "a")], "parameters": {"waits": True}}
refused("504", "deadline", client.infer, "chunks", headers={"x-timeout-ms": "300"}, **waits)


def states():
    return {model["name"]: model["state"] for model in client.get_model_repository_index()}


assert states()["spare"] == "UNAVAILABLE"
client.load_model("spare")
assert client.is_model_ready("spare")
assert client.infer("spare", text).as_numpy("text_input")[0].decode() == PROMPT
client.unload_model("spare")
assert states()["spare"] == "UNAVAILABLE"
assert not client.is_model_ready("spare")
refused("404", "spare", client.infer, "spare", text)
refused("404", "nobody", client.load_model, "nobody")
assert client.infer("storyteller", text, parameters=GREEDY).as_numpy("text_output")[0].decode() in stories
client.close()
print("done")
