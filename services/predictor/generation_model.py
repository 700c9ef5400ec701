"""A model that generates, as the servicer sees it: OIP requests to the engine, its chunks to responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from millrace.errors import MillraceError, StartupError
from millrace.protos import inference_pb2 as pb
from millrace.stream_infer import FINAL
from services.predictor.engine.interface import Chunk, Engine, EngineStatistics, GenerationRequest
from services.predictor.generation import (
    INPUT_IDS,
    LOGPROBS,
    OUTPUT_IDS,
    TOP_LOGPROB_IDS,
    TOP_LOGPROBS,
    merged,
    read_request,
    write_response,
)
from services.predictor.generation_loading import LoadedModel
from services.predictor.served_model import ModelDescription, TensorSpec


class GenerationModel:
    """A ServedModel; the engine's death is its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.name = loaded.name
        self.description = _describe(loaded)
        self._loaded = loaded

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def statistics(self) -> EngineStatistics:
        return self.engine.statistics

    async def infer(self, request: pb.ModelInferRequest, time_remaining_s: float | None) -> pb.ModelInferResponse:
        async with aclosing(self._generate(request, time_remaining_s)) as chunks:
            whole = [chunk async for chunk in chunks]
        return write_response(request, merged(whole))

    async def stream(
        self, request: pb.ModelInferRequest, time_remaining_s: float | None
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        async with aclosing(self._generate(request, time_remaining_s)) as chunks:
            async for chunk in chunks:
                response = write_response(request, chunk)
                response.parameters[FINAL].bool_param = chunk.finish_reason is not None
                yield response

    async def warm_up(self) -> None:
        """Two real tokens through the engine, so that ready means that a generation works."""
        sampling = self._loaded.defaults.changed({"max_tokens": 2, "ignore_eos": True}).resolved(2)
        slot = self.engine.submit(GenerationRequest("warm-up", [0], sampling))
        try:
            while (await slot.read()).finish_reason is None:
                pass
        except MillraceError as error:
            raise StartupError(
                f"model {self.name}: {self._loaded.architecture} is not served: {error.message}"
            ) from None

    async def died(self) -> None:
        await self.engine.died()

    def close(self) -> None:
        self.engine.close()

    async def _generate(
        self, request: pb.ModelInferRequest, time_remaining_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        """One request's chunks; the engine stops when the caller does."""
        slot = self.engine.submit(read_request(self._loaded, request, time_remaining_s))
        try:
            while True:
                chunk = await slot.read()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            slot.cancel()


def _describe(loaded: LoadedModel) -> ModelDescription:
    limits = loaded.engine.limits
    return ModelDescription(
        platform="pytorch_transformers",
        inputs=[TensorSpec(INPUT_IDS, "INT64", [-1]), TensorSpec(OUTPUT_IDS, "INT64", [-1], optional=True)],
        outputs=[
            TensorSpec(OUTPUT_IDS, "INT32", [-1]),
            TensorSpec(LOGPROBS, "FP32", [-1]),
            TensorSpec(TOP_LOGPROB_IDS, "INT32", [-1, -1]),
            TensorSpec(TOP_LOGPROBS, "FP32", [-1, -1]),
        ],
        decoupled=True,
        parameters={
            "architecture": loaded.architecture,
            "device": loaded.device,
            "dtype": loaded.dtype,
            "context_length": str(limits.context_length),
            "vocabulary_size": str(limits.vocabulary_size),
            "is_encoder_decoder": str(limits.is_encoder_decoder).lower(),
            **loaded.engine.description,
        },
    )
