"""KServe's ModelServer with a model `echo`, run by the Python of .venv-kserve: `python -m bench.kserve_server …`.

Its arguments are KServe's own. With `--predictor_host` it is a transformer that passes everything on, otherwise a
predictor that answers with its inputs; neither decodes the tensors, which is the least work that KServe can do.
"""

from __future__ import annotations

from typing import Any

from kserve import (  # type: ignore[import-not-found]
    InferOutput,
    InferRequest,
    InferResponse,
    Model,
    ModelServer,
)
from kserve.model_server import args  # type: ignore[import-not-found]

_MODEL = "echo"


class Predictor(Model):  # type: ignore[misc]
    """Answers with its inputs."""

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        outputs = []
        for tensor in payload.inputs:
            output = InferOutput(tensor.name, tensor.shape, tensor.datatype)
            output._data, output._raw_data = tensor._data, tensor._raw_data
            outputs.append(output)
        return InferResponse(payload.id or "1", self.name, outputs)


if __name__ == "__main__":
    model = Model(_MODEL) if args.predictor_host else Predictor(_MODEL)
    model.ready = True
    ModelServer().start([model])
