"""Models without text, through the gateway: a user's model.py, identity, classification and embeddings.

That chunks arrive one by one is tested without a clock: the model generates the next one only
when the reader of the stream requests it, through a Unix socket that the request names.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress

import grpc
import numpy as np
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.random_encoders import save_random_encoder
from tests.support.status import refusal
from tests.system.calls import generate, rest, text_of, text_request
from tests.system.own_clients import client_passes

INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL

# Yields 0, 1, 2 … to n; each after the first once a byte has come through the socket `gate`.
PACED = """
import asyncio
import numpy as np
from headrace.errors import InvalidRequestError

async def execute(request):
    n = request.parameters["n"]
    if n < 0:
        raise InvalidRequestError("n must not be negative")
    gate, writer = await asyncio.open_unix_connection(request.parameters["gate"])
    try:
        for i in range(n):
            if i:
                await gate.readexactly(1)
            if i == request.parameters.get("fail_at"):
                raise RuntimeError("secret")
            yield {"i": np.array([i]), "id": np.array([request.id], dtype=object)}
    finally:
        writer.close()
"""


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "paced").mkdir()
    (folder / "paced" / "model.py").write_text(PACED)
    for kind in ("bert-classifier", "bert"):
        save_random_encoder(kind, folder / kind)
    models = {
        "storyteller": "models/storyteller",
        "identity": "models/identity",
        "paced": folder / "paced",
        "classifier": folder / "bert-classifier",
        "embedder": folder / "bert",
    }
    async with stacks.use(models=",".join(f"{name}={where}" for name, where in models.items())) as started:
        yield started


class Gate:
    """The socket's other end: counts the generators that have connected and disconnected."""

    def __init__(self, path):
        self.path = str(path)
        self.begun = self.ended = 0
        self._writers = []

    async def serve(self, reader, writer):
        self.begun += 1
        self._writers.append(writer)
        with suppress(ConnectionError):
            await reader.read()
        self.ended += 1
        writer.close()

    def open(self, steps=1):
        for writer in self._writers:
            writer.write(b"." * steps)


@pytest_asyncio.fixture
async def gate(tmp_path):
    made = Gate(tmp_path / "gate")
    server = await asyncio.start_unix_server(made.serve, made.path)
    yield made
    server.close()


def paced_request(gate, n, id="r", **parameters):
    request = pb.ModelInferRequest(model_name="paced", id=id)
    request.parameters["gate"].string_param = gate.path
    for name, value in {"n": n, **parameters}.items():
        request.parameters[name].int64_param = value
    return request


@asynccontextmanager
async def inference(stack, authority=None):
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    if authority is not None:
        options.append(("grpc.default_authority", authority))
    async with grpc.aio.insecure_channel(stack.gateway, options=options) as open_channel:
        yield GRPCInferenceServiceStub(open_channel)


async def stream(stack, *requests):
    """Every response of one stream with these requests."""

    async def all_requests():
        for request in requests:
            yield request

    async with inference(stack) as stub:
        return [response async for response in stub.ModelStreamInfer(all_requests())]


async def test_tritons_client_streams_the_chunks_of_a_model_py_one_by_one(stack, tmp_path):
    await client_passes("paced_stream", stack.gateway, tmp_path / "socket")


async def test_text_and_tensors_mix_on_one_stream_and_answers_carry_their_ids(stack, gate):
    text = text_request("storyteller", "Once upon a time", max_tokens=5, seed=1, ignore_eos=1)
    text.id = "text"
    ids = pb.ModelInferRequest(model_name="embedder", id="embedding")
    add_input(ids, Tensor("input_ids", "INT64", np.array([5, 6, 7])))
    refused = paced_request(gate, -1, id="refused")
    unknown = pb.ModelInferRequest(model_name="nobody", id="unknown")
    failing = paced_request(gate, 1, id="failing", fail_at=0)
    echoed = pb.ModelInferRequest(model_name="identity", id="echo")
    add_input(echoed, bytes_tensor("word", [b"hello"]))
    responses = await stream(stack, refused, text, unknown, ids, failing, echoed)
    errors = {r.infer_response.id: r.error_message for r in responses if r.error_message}
    assert errors == {
        "refused": "n must not be negative",
        "unknown": "no model 'nobody'",
        "failing": "the model failed on this request",
    }
    answers = Counter(r.infer_response.id for r in responses if not r.error_message)
    assert 1 <= answers.pop("text") <= 5  # Tokens that are generated while the client does not read arrive together.
    assert answers == {"embedding": 1, "echo": 1}
    by_id = {r.infer_response.id: r.infer_response for r in responses}
    assert all(by_id[id].parameters["triton_final_response"].bool_param for id in ("text", *answers))
    assert decode_outputs(by_id["embedding"])["embedding"].array.shape == (1, 32)


async def test_a_model_of_tensors_refuses_text(stack):
    raised = await refusal(generate(stack.gateway, model="identity", prompt="Once"))
    assert raised.code() is INVALID
    assert raised.details() == "model 'identity' takes tensors, not text; call it by ModelInfer"
    answer = await rest(stack.gateway, "POST", "/v1/completions", {"model": "embedder", "prompt": "Once"})
    assert answer.status == 400
    assert "takes tensors" in answer.json["error"]["message"]
    assert text_of(await generate(stack.gateway, model="storyteller", prompt="Once upon a time", max_tokens=3))
