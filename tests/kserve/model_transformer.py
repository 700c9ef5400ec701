"""A transformer as KServe's users write one, with KServe's arguments; its predictor is a server of the protocol.

`python model_transformer.py --model_name identity --predictor_host HOST:PORT --predictor_protocol grpc-v2 …` adds one
to the numbers of a request and doubles those of the answer. Several names are several models.
"""

import argparse

from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server


class Transformer(Model):
    def __init__(self, name):
        super().__init__(name)
        self.ready = True

    async def preprocess(self, payload, headers=None):
        array = payload.inputs[0].as_numpy() + 1
        tensor = InferInput("x", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array, binary_data=False)  # By REST KServe drops the header that binary data needs.
        return InferRequest(self.name, [tensor], request_id=payload.id)

    async def postprocess(self, result, headers=None, response_headers=None):
        array = result.outputs[0].as_numpy() * 2
        output = InferOutput("y", list(array.shape), "FP32")
        output.set_data_from_numpy(array, binary_data=False)
        return InferResponse(response_id=result.id, model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    arguments, _ = argparse.ArgumentParser(parents=[model_server.parser]).parse_known_args()
    ModelServer().start([Transformer(name) for name in arguments.model_name.split(",")])
