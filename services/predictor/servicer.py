"""The predictor's `GRPCInferenceService`: token ids and tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from millrace import __version__
from millrace.interceptors import Context
from millrace.protos import inference_pb2 as pb
from millrace.protos import inference_pb2_grpc
from millrace.stream_infer import errors_as_status, multiplex
from services.predictor.repository import ModelRepository
from services.predictor.served_model import VERSION, config_of, metadata_of, statistics_of

_EXTENSIONS = ("model_configuration", "statistics", "model_repository", "binary_tensor_data", "parameters")


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Thin: everything is the repository's or the model's."""

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
        return metadata_of(self._repository.get(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=config_of(self._repository.get(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        names = [request.name] if request.name else [source.name for source in self._repository.sources]
        models = [self._repository.get(name, request.version) for name in names]
        return pb.ModelStatisticsResponse(model_stats=[statistics_of(model) for model in models])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        response = pb.RepositoryIndexResponse()
        for name in (source.name for source in self._repository.sources):
            ready = self._repository.is_ready(name)
            if ready or not request.ready:
                state, reason = ("READY", "") if ready else ("LOADING", self._repository.progress(name))
                response.models.add(name=name, version=VERSION, state=state, reason=reason)
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        model = self._repository.get(request.model_name, request.model_version)
        return await model.infer(request, context.time_remaining())

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        async def answer(request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
            model = self._repository.get(request.model_name, request.model_version)
            async with aclosing(model.stream(request, context.time_remaining())) as responses:
                async for response in responses:
                    yield response

        async with aclosing(multiplex(request_iterator, answer, errors_as_status(context))) as responses:
            async for response in responses:
                yield response
