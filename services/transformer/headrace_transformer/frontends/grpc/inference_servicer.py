"""The Open Inference Protocol's `GRPCInferenceService`, as the gateway's callers see it.

A thin layer: `Inference` handles requests, and the catalogue, which follows the predictor, has the models. Requests and
answers of relayed models pass as bytes, see `add_to_server`. The REST front end of the protocol calls the same object:
`infer` for the one answer to a request, `answers` for all of them as they come.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from headrace import __version__
from headrace.clients import Client, client_of
from headrace.errors import InvalidRequestError
from headrace.oip.model_description import config_of, metadata_of
from headrace.oip.settings_servicer import OpenInferenceBase
from headrace.oip.stream_infer import errors_as_status, multiplex
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.rpc.server.call_context import CallContext, call_context, deadline_of
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from headrace_transformer.generation import text_tensors
from headrace_transformer.inference import processed
from headrace_transformer.inference.infer import Inference
from headrace_transformer.inference.request import InferRequest
from headrace_transformer.models.catalogue import Catalogue
from headrace_transformer.models.models import Model, ProcessedModel, TextModel
from headrace_transformer.predictors.discovery.replicas import READY, Replicas
from headrace_transformer.predictors.engines.pools import EnginePool
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.oip.oip_call import predictor_answers
from headrace_transformer.routing.router import Router

SERVICE = "inference.GRPCInferenceService"
_INFER, _STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
_EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
    "trace",
)


@dataclass(frozen=True, eq=False)
class InferenceServicer(OpenInferenceBase):
    inference: Inference
    catalogue: Catalogue
    router: Router
    predictor: PredictorClient
    replicas: Replicas
    pools: Mapping[str, EnginePool]  # By the names of the models at engines.

    def check_model(self, name: str) -> None:
        self.router.find(name)

    # ------------------------------------------------------------------ inference

    async def infer(self, request: InferRequest, call: CallContext) -> pb.ModelInferResponse | bytes:
        """The one answer to a request, as a message or as the bytes of one; raises HeadraceError."""
        return await self.inference.infer(request, call)

    async def answers(self, request: InferRequest, call: CallContext) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """All answers to one request, as they come, the last with `triton_final_response`; raises HeadraceError.

        Closing the generator cancels the request.
        """
        async with aclosing(self.inference.stream(request, call)) as answers:
            async for answer in answers:
                if isinstance(answer, bytes):
                    with predictor_answers():
                        answer = pb.ModelStreamInferResponse.FromString(answer).infer_response
                yield answer

    async def ModelStreamInfer(  # type: ignore[override]  # Its requests are those of `add_to_server`.
        self, requests: AsyncIterator[InferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse | bytes, None]:
        def answer(request: InferRequest) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
            return self.inference.stream(request, call_context(context, _STREAM, request.id))

        async with aclosing(multiplex(requests, answer, errors_as_status(context))) as responses:
            async for response in responses:
                yield response

    async def ModelInfer(  # type: ignore[override]  # Its requests are those of `add_to_server`.
        self, request: InferRequest, context: Context
    ) -> pb.ModelInferResponse | bytes:
        return await self.infer(request, call_context(context, _INFER, request.id))

    # ------------------------------------------------------------------ the server and its models

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.catalogue.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        _client(context).check_model(request.name)
        ready = self.router.is_ready(request.name, request.version)
        if ready and not self.router.lists(request.name):
            ready = await self.predictor.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="headrace", version=__version__, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        _client(context).check_model(request.name)
        return await self._metadata(self.router.find(request.name, request.version), request)

    async def _metadata(self, model: Model, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """The metadata of the model, under the name in the request."""
        if isinstance(model, TextModel):
            return metadata_of(request.name, model.versions, text_tensors.describe(model))
        if isinstance(model, ProcessedModel):
            return metadata_of(request.name, model.versions, processed.describe(model))
        answer = await self.replicas.metadata(pb.ModelMetadataRequest(name=model.name, version=request.version))
        if model.name != request.name:
            answer.name = request.name
        return answer

    async def metadata_of_called(self, request: pb.ModelMetadataRequest, call: CallContext) -> pb.ModelMetadataResponse:
        """As ModelMetadata, for a request that calls the model: waits for the model like the call."""
        model = (await self.router.wait_for(request.name, request.version, call)).model
        return await self.predictor.backoff(call.deadline).retry(lambda: self._metadata(model, request))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        _client(context).check_model(request.name)
        model = self.router.find(request.name, request.version)
        if isinstance(model, TextModel):
            return pb.ModelConfigResponse(config=config_of(request.name, text_tensors.describe(model)))
        name = model.processor.model if isinstance(model, ProcessedModel) else model.name
        answer = await self.replicas.config(pb.ModelConfigRequest(name=name, version=request.version))
        if isinstance(model, ProcessedModel):
            described = processed.describe(model, answer.config.model_transaction_policy.decoupled)
            return pb.ModelConfigResponse(config=config_of(request.name, described))
        if model.name != request.name:
            answer.config.name = request.name
        return answer

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """The sums of the counters of predictors, and of engines; what was refused earlier is not included."""
        client, name, found = _client(context), request.name, pb.ModelStatisticsResponse()
        if name:
            client.check_model(name)
            model = self.router.find(name, request.version)
            name = model.processor.model if isinstance(model, ProcessedModel) else model.name
        if name not in self.pools and (name or self.catalogue.has_predictors):
            found = await self.replicas.statistics(pb.ModelStatisticsRequest(name=name, version=request.version))
        found.model_stats.extend(pool.statistics for model, pool in self.pools.items() if name in ("", model))
        if not name:
            return pb.ModelStatisticsResponse(
                model_stats=[each for each in found.model_stats if client.may_use(each.name)]
            )
        for statistics in found.model_stats:
            statistics.name = request.name
        return found

    # ------------------------------------------------------------------ the repository

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        response, may_use = pb.RepositoryIndexResponse(), _client(context).may_use
        for name, model_state in self.router.states.items():
            if may_use(name) and (model_state.state == READY or not request.ready):
                response.models.add(
                    name=name, version=model_state.version, state=model_state.state, reason=model_state.reason
                )
        return response

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Loads a model at every predictor; returns once it can be called.

        A model that should take text and whose tokenizer cannot be read is unloaded again.
        """
        name = request.model_name
        await self.replicas.load(request, deadline_of(context))
        await self.catalogue.refresh(reloaded=name)
        if (reason := self.catalogue.why_unreadable(name)) is not None:
            await self.replicas.unload(pb.RepositoryModelUnloadRequest(model_name=name), deadline_of(context))
            await self.catalogue.refresh()
            raise InvalidRequestError(f"model {name!r} was not loaded: {reason}")
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await self.replicas.unload(request, deadline_of(context))
        await self.catalogue.refresh()
        return pb.RepositoryModelUnloadResponse()

    # ------------------------------------------------------------------ wiring

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers the service; the two inference methods take requests of which only the head is parsed."""
        handlers = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self.ModelInfer, InferRequest, serialized),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.ModelStreamInfer, InferRequest, serialized),
        }
        # The first generic handler of a method wins, and the last registered one; a server uses one of the two kinds.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        add_GRPCInferenceServiceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE, handlers)


def _client(context: Context) -> Client:
    return client_of(call_metadata(context))


def serialized(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
