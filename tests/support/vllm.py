"""The interpreter with vLLM, how its engine starts fast enough for tests, and its process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millrace_protos import inference_pb2
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel

PYTHON = Path(__file__).parents[2] / ".venv-bench-vllm" / "bin" / "python"
ARGUMENTS = {"enforce_eager": True}
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no interpreter with vLLM: `make .venv-bench-vllm/.installed`"
)


def vllm_process(predictor: int) -> psutil.Process | None:
    """The process with vLLM of the predictor with this process id."""
    for child in psutil.Process(predictor).children():
        with suppress(psutil.NoSuchProcess):  # Zombies too.
            if "services.predictor.vllm_engine" in child.cmdline():
                return child
    return None


async def check_engines(gateway: str) -> None:
    """Checks that vLLM computes the storyteller, and that the normalizer beside it keeps its own runner."""
    runners = []
    async with channel(gateway) as opened:
        for model in ("storyteller", "normalizer"):
            request = inference_pb2.ModelConfigRequest(name=model)
            response = await GRPCInferenceServiceStub(opened).ModelConfig(request, timeout=60)
            runners.append(response.config.parameters["runner"].string_value)
    assert runners[0].startswith("vllm ")
    assert runners[1] == "ragged decoder"
