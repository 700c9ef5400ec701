"""KServe's own ModelServer with one model and KServe's arguments: `server.py --model_name echo --http_port 8080`.

The model returns its tensors; it fails for a tensor named `fails`, as models of users do.
"""

import argparse

from kserve import InferOutput, InferResponse, Model, ModelServer, model_server
from kserve.errors import InferenceError


class Echo(Model):
    def __init__(self, name):
        super().__init__(name)
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        outputs = []
        for tensor in payload.inputs:
            if tensor.name == "fails":
                raise InferenceError("the model failed")
            array = tensor.as_numpy()
            output = InferOutput(tensor.name, list(array.shape), tensor.datatype)
            output.set_data_from_numpy(array, binary_data=payload.from_grpc)
            outputs.append(output)
        return InferResponse(response_id=payload.id, model_name=self.name, infer_outputs=outputs)


if __name__ == "__main__":
    arguments, _ = argparse.ArgumentParser(parents=[model_server.parser]).parse_known_args()
    ModelServer().start([Echo(arguments.model_name)])
