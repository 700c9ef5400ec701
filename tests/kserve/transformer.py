"""KServe's own transformer before a predictor: `python transformer.py MODEL PREDICTOR…`; prints "done" for
each predictor.

A subclass of kserve.Model that calls its predictor as KServe does (`--predictor_protocol=grpc-v2`).
"""

import asyncio
import sys

import numpy as np
from kserve import InferInput, InferRequest, Model
from kserve.context import set_predictor_config
from kserve.predictor_config import PredictorConfig


class Transformer(Model):
    def __init__(self, name):
        super().__init__(name)
        self.ready = True

    async def preprocess(self, payload, headers=None):
        array = payload.inputs[0].as_numpy() + 1
        tensor = InferInput("x", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array, binary_data=True)
        return InferRequest(model_name=self.name, infer_inputs=[tensor], request_id=payload.id)

    async def postprocess(self, result, headers=None, response_headers=None):
        return result.outputs[0].as_numpy() * 2


async def main(model, *predictors):
    for predictor in predictors:
        await call(predictor, model)


async def call(predictor, model):
    set_predictor_config(PredictorConfig(predictor_host=predictor, predictor_protocol="grpc-v2"))
    transformer = Transformer(model)
    array = np.arange(200_000, dtype=np.float32)

    async def one(offset):
        tensor = InferInput("x", [len(array)], "FP32")
        tensor.set_data_from_numpy(array + offset, binary_data=True)
        answer, *_ = await transformer(InferRequest(model_name=model, infer_inputs=[tensor], request_id=str(offset)))
        np.testing.assert_array_equal(answer, (array + offset + 1) * 2)

    await asyncio.gather(*(one(offset) for offset in range(32)))
    print("done")


asyncio.run(main(*sys.argv[1:]))
