"""KServe's own ModelServer over REST, with one model `echo`: `python server.py PORT`."""

import sys

from kserve import InferOutput, InferResponse, Model, ModelServer


class Echo(Model):
    def __init__(self):
        super().__init__("echo")
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        outputs = []
        for tensor in payload.inputs:
            array = tensor.as_numpy()
            output = InferOutput(tensor.name, list(array.shape), tensor.datatype)
            output.set_data_from_numpy(array, binary_data=False)
            outputs.append(output)
        return InferResponse(response_id=payload.id, model_name=self.name, infer_outputs=outputs)


ModelServer(http_port=int(sys.argv[1]), enable_grpc=False, workers=1).start([Echo()])
