"""The predictor's `GRPCInferenceService`: token ids and tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from millrace import __version__
from millrace.interceptors import Context
from millrace.protos import inference_pb2 as pb
from millrace.protos import inference_pb2_grpc, model_config_pb2
from millrace.stream_infer import FINAL, errors_as_status, multiplex
from services.predictor.engine.interface import Chunk, EngineStatistics
from services.predictor.generation import INPUT_IDS, LOGPROBS, OUTPUT_IDS, merged, read_request, write_response
from services.predictor.loading import LoadedModel
from services.predictor.repository import VERSION, ModelRepository

_EXTENSIONS = ("model_configuration", "statistics", "model_repository", "binary_tensor_data", "parameters")


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Thin: everything is the repository's or the engine's."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._repository.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._repository.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="millrace-predictor", version=__version__, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = self._repository.get(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform="pytorch_transformers",
            inputs=[tensor(name=name, datatype="INT64", shape=[-1]) for name in (INPUT_IDS, OUTPUT_IDS)],
            outputs=[
                tensor(name=OUTPUT_IDS, datatype="INT32", shape=[-1]),
                tensor(name=LOGPROBS, datatype="FP32", shape=[-1]),
            ],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=_config(self._repository.get(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        names = [request.name] if request.name else [source.name for source in self._repository.sources]
        models = [self._repository.get(name, request.version) for name in names]
        return pb.ModelStatisticsResponse(
            model_stats=[_statistics(model.name, model.engine.statistics) for model in models]
        )

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        response = pb.RepositoryIndexResponse()
        for name in (source.name for source in self._repository.sources):
            ready = self._repository.is_ready(name)
            if ready or not request.ready:
                state, reason = ("READY", "") if ready else ("LOADING", self._repository.progress(name))
                response.models.add(name=name, version=VERSION, state=state, reason=reason)
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        async with aclosing(self._generate(request, context)) as chunks:
            whole = [chunk async for chunk in chunks]
        return write_response(request, merged(whole))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        async def answer(request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
            async with aclosing(self._generate(request, context)) as chunks:
                async for chunk in chunks:
                    response = write_response(request, chunk)
                    response.parameters[FINAL].bool_param = chunk.finish_reason is not None
                    yield response

        async with aclosing(multiplex(request_iterator, answer, errors_as_status(context))) as responses:
            async for response in responses:
                yield response

    async def _generate(self, request: pb.ModelInferRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """One request's chunks; the engine stops when the caller does."""
        model = self._repository.get(request.model_name, request.model_version)
        slot = model.engine.submit(read_request(model, request, context.time_remaining()))
        try:
            while True:
                chunk = await slot.read()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            slot.cancel()


def _config(model: LoadedModel) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig(
        name=model.name,
        platform="pytorch_transformers",
        backend="millrace",
        input=[
            model_config_pb2.ModelInput(name=INPUT_IDS, data_type=model_config_pb2.TYPE_INT64, dims=[-1]),
            model_config_pb2.ModelInput(
                name=OUTPUT_IDS, data_type=model_config_pb2.TYPE_INT64, dims=[-1], optional=True
            ),
        ],
        output=[
            model_config_pb2.ModelOutput(name=OUTPUT_IDS, data_type=model_config_pb2.TYPE_INT32, dims=[-1]),
            model_config_pb2.ModelOutput(name=LOGPROBS, data_type=model_config_pb2.TYPE_FP32, dims=[-1]),
        ],
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
    )
    limits = model.engine.limits
    parameters = {
        "architecture": model.architecture,
        "device": model.device,
        "dtype": model.dtype,
        "context_length": limits.context_length,
        "vocabulary_size": limits.vocabulary_size,
        "is_encoder_decoder": str(limits.is_encoder_decoder).lower(),
    }
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value)
    return config


def _statistics(name: str, counted: EngineStatistics) -> pb.ModelStatistics:
    finished = counted.succeeded + counted.failed + counted.cancelled
    duration = pb.StatisticDuration
    return pb.ModelStatistics(
        name=name,
        version=VERSION,
        last_inference=counted.last_inference_ms,
        inference_count=counted.succeeded,
        execution_count=counted.steps,
        inference_stats=pb.InferStatistics(
            success=duration(count=counted.succeeded, ns=counted.request_ns),
            fail=duration(count=counted.failed),
            queue=duration(count=finished, ns=counted.queue_ns),
            compute_infer=duration(count=finished, ns=counted.compute_ns),
        ),
    )
