"""Python models made in a test, and requests to them."""

import textwrap
from contextlib import contextmanager

import numpy as np

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_predictor.tensor_models.python_model import PythonModel
from headrace_protos.inference_pb2 import ModelInferRequest


@contextmanager
def python_models(folder):
    """Makes models of code, in folders below `folder`; they end with the block."""
    made = []

    def start(code, name="mine", max_running=8, max_waiting=8, files=(), timeout_s=300.0):
        own = folder / f"model-{len(made)}"
        own.mkdir()
        for file, text in {"model.py": textwrap.dedent(code), **dict(files)}.items():
            (own / file).write_text(text)
        made.append(PythonModel(name, own, max_running, max_waiting, timeout_s))
        return made[-1]

    try:
        yield start
    finally:
        for model in made:
            model.close()


def request(*tensors, outputs=(), **parameters):
    message = ModelInferRequest(model_name="mine", id="r")
    for tensor in tensors or [Tensor("x", "INT32", np.arange(3, dtype=np.int32))]:
        add_input(message, tensor)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


async def infer(model, message):
    return {name: tensor.array for name, tensor in decode_outputs(await model.infer(message)).items()}


def globals_of(model):
    """The variables of the model's file."""
    return model._code.execute.__globals__
