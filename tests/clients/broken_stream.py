"""Triton's own client during the death of a predictor: GATEWAY.

Run in the clients' environment. Prints "begun" once each of its requests on one stream has an answer, reads
a line, which means that the predictor is dead, and prints "done" if every check passed.
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton

REQUESTS = 2
PARAMETERS = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0}


def text_input(name, text):
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def story(number):
    return {"inputs": [text_input("text_input", "Once upon a time")], "parameters": {**PARAMETERS, "seed": number}}


client = triton.InferenceServerClient(sys.argv[1])
right = {
    f"story {number}": client.infer("storyteller", **story(number)).as_numpy("text_output")[0].decode()
    for number in range(REQUESTS)
}
answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
texts, finals, errors = dict.fromkeys(right, ""), set(), []


def take():
    result, error = answers.get(timeout=90)
    if error is not None:
        errors.append(error.message())
        return
    response = result.get_response()
    if response.outputs:
        texts[response.id] = texts.get(response.id, "") + result.as_numpy(response.outputs[0].name)[0].decode()
    if response.parameters["triton_final_response"].bool_param:
        finals.add(response.id)


# A user's own model has unknown state: its stream cannot be resumed elsewhere.
client.async_stream_infer("chunks", [text_input("INPUT", "a")], request_id="own", parameters={"waits": True})
for number in range(REQUESTS):
    client.async_stream_infer("storyteller", request_id=f"story {number}", **story(number))
while not (all(texts.values()) and texts.get("own")):
    take()
assert not finals, "a story ended too soon"
print("begun", flush=True)
sys.stdin.readline()
while not (finals >= right.keys() and errors):
    take()
assert {id: texts[id] for id in right} == right
assert texts["own"] == "a"
(error,) = errors
assert "predictor" in error, error

# The stream itself still works.
client.async_stream_infer("chunks", [text_input("INPUT", "after")], request_id="after", parameters={"size": 2})
while "after" not in finals:
    take()
assert texts["after"] == "after"
assert len(errors) == 1, errors
client.stop_stream()
client.close()
print("done")
