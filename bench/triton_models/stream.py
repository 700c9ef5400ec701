"""A decoupled Triton model: 64 answers to each request, the n-th with the number n."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(64):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("n", np.array([number]))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
