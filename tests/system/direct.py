"""Models whose ModelInfer calls the gateway sends directly to a predictor, which begins within seconds."""

import grpc

from headrace_protos.inference_pb2 import ModelInferRequest
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel
from tests.waiting import until


async def hop_of(gateway: str, model: str) -> str:
    """The service that answers for the model: the hop of the error for an id that is too long."""
    async with channel(gateway) as open_channel:
        try:
            await GRPCInferenceServiceStub(open_channel).ModelInfer(
                ModelInferRequest(model_name=model, id="7" * 10_000), timeout=20
            )
        except grpc.aio.AioRpcError as error:
            return str(dict(error.trailing_metadata() or ()).get("x-failed-hop", ""))
    raise AssertionError(f"{model} takes any id")


async def until_direct(gateway: str, model: str) -> None:
    async def is_direct() -> bool:
        return await hop_of(gateway, model) == "predictor"

    await until(is_direct)
