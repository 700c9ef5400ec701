"""A Triton model that streams the ids that it gets, `max_tokens` of them, an answer each."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            count = min(len(ids), json.loads(request.parameters())["max_tokens"])
            sender = request.get_response_sender()
            for token in ids[:count]:
                output = pb_utils.Tensor("output_ids", np.array([token], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
                time.sleep(0.05)  # The pace of a model; answers that come together would be one message.
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
