"""The predictor's `GRPCInferenceService`: inference on token ids and tensors, and the model repository.

`headrace.v1.PredictorDevelopment` kills this predictor while it generates for a request: for demonstrations, registered
only if the settings allow it. The process ends as by SIGKILL: it drains nothing, hands nothing back and closes nothing.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import replace

from headrace import __version__
from headrace.clients import ANYONE, Client, account, client_of
from headrace.errors import InvalidRequestError, NotFoundError, NotImplementedMethodError
from headrace.oip.model_description import config_of, metadata_of
from headrace.oip.settings_servicer import OpenInferenceBase
from headrace.oip.stream_infer import errors_as_status, multiplex, takes_joined
from headrace.payload.call import is_direct, is_recorded, recorded
from headrace.payload.recording import Recording
from headrace.payload.tap import PayloadTap
from headrace.payload.tensors import answer_tensors, request_tensors, streamed_tensors
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.rpc.server.call_context import (
    call_context,
    check_development,
    check_request_id,
    deadline_of,
    first_token_timeout_s,
)
from headrace_predictor.models.served_model import VERSION, Caller
from headrace_predictor.repository.entry import State
from headrace_predictor.repository.lease import Serving
from headrace_predictor.repository.repository import ModelRepository
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb

_SERVICE = "inference.GRPCInferenceService"
_EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "statistics",
    "trace",
    "logging",
    "binary_tensor_data",
    "parameters",
)
_SOURCE = "source"
_DEPENDENTS = "unload_dependents"

_ANSWER_S = 0.02  # Time for the response to leave.


class InferenceServicer(OpenInferenceBase):
    """A thin layer over the repository and its models.

    With a tap, the requests that the gateway sends straight here are recorded, and with `records_addressed` those that
    address the predictor as well.
    """

    def __init__(
        self, repository: ModelRepository, tap: PayloadTap | None = None, records_addressed: bool = False
    ) -> None:
        self._repository = repository
        self._tap = tap
        self._records_addressed = records_addressed

    def check_model(self, name: str) -> None:
        self._repository.get(name)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._repository.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        _client_of(context).check_model(request.name)
        return pb.ModelReadyResponse(ready=self._repository.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="headrace-predictor", version=__version__, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = self._serving(request.name, request.version, context).model
        return metadata_of(model.name, [VERSION], model.description)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        model = self._serving(request.name, request.version, context).model
        config = config_of(model.name, model.description)
        # The transformer loads the model's tokenizer from there.
        config.parameters[_SOURCE].string_value = self._repository.source(request.name)
        if (base := self._repository.base(request.name)) is not None:
            config.parameters["base"].string_value = base.name
            config.parameters["base_source"].string_value = base.where
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        if request.name:
            served = [self._serving(request.name, request.version, context)]
        elif request.version in ("", VERSION):
            client = _client_of(context)
            served = [serving for serving in self._repository.served if client.may_use(serving.model.name)]
        else:
            raise NotFoundError(f"no model has a version {request.version!r}, only {VERSION}")
        return pb.ModelStatisticsResponse(model_stats=[serving.statistics() for serving in served])

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        _check_repository_name(request.repository_name)
        response = pb.RepositoryIndexResponse()
        client = _client_of(context)
        for row in await self._repository.index():
            if client.may_use(row.name) and (row.state is State.READY or not request.ready):
                response.models.add(name=row.name, version=VERSION, state=row.state, reason=row.reason)
        return response

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        _check_repository_name(request.repository_name)
        _check_parameters(request.parameters, {_SOURCE: "string_param"})
        source = request.parameters[_SOURCE].string_param if _SOURCE in request.parameters else ""
        await self._repository.load(request.model_name, source, deadline_of(context))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        _check_repository_name(request.repository_name)
        _check_parameters(request.parameters, {_DEPENDENTS: "bool_param"})
        # The adapters of a base depend on it.
        dependents = _DEPENDENTS in request.parameters and request.parameters[_DEPENDENTS].bool_param
        await self._repository.unload(request.model_name, deadline_of(context), dependents)
        return pb.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        with self._recorded(request, context, "ModelInfer") as recording:
            check_request_id(request.id)
            serving = self._serving(request.model_name, request.model_version, context)
            response = await serving.infer(request, _caller(context))
            if recording is not None:
                recording.end("OK", outputs=answer_tensors(response))
                await recording.flushed()
            return response

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        caller = _caller(context)

        async def answer(request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
            with self._recorded(request, context, "ModelStreamInfer") as recording:
                serving = self._serving(request.model_name, request.model_version, context)
                of_request = replace(caller, deadline=deadline_of(context))
                async with aclosing(serving.stream(request, of_request)) as responses:
                    async for response in responses:
                        if recording is not None:
                            recording.chunk("", outputs=streamed_tensors(response))
                            await recording.flushed()
                        yield response

        joins = takes_joined(context)
        async with aclosing(multiplex(request_iterator, answer, errors_as_status(context), joins)) as responses:
            async for response in responses:
                yield response

    def _serving(self, name: str, version: str, context: Context) -> Serving:
        """The model that a call names; raises NotFoundError, and ForbiddenError if its client may not use it."""
        _client_of(context).check_model(name)
        return self._repository.get(name, version)

    def _recorded(
        self, request: pb.ModelInferRequest, context: Context, method: str
    ) -> AbstractContextManager[Recording | None]:
        """Records the request that the block handles, unless its caller records it or it is not recorded."""
        if self._tap is None or is_recorded(context) or not (self._records_addressed or is_direct(context)):
            return nullcontext()
        call = call_context(context, f"{_SERVICE}/{method}", request.id)
        inputs = request_tensors(request)
        return recorded(self._tap, call, request.model_name, inputs=inputs)


def _caller(context: Context) -> Caller:
    metadata = call_metadata(context)
    return Caller(account(client_of(metadata), metadata), deadline_of(context), first_token_timeout_s(metadata))


def _client_of(context: Context) -> Client:
    """The client; ANYONE for calls that the transformer records, because it has checked the client already."""
    return ANYONE if is_recorded(context) else client_of(call_metadata(context))


def _check_repository_name(name: str) -> None:
    if name:
        raise NotImplementedMethodError("repository_name is not supported: there is one repository")


def _check_parameters(parameters: Mapping[str, pb.ModelRepositoryParameter], known: Mapping[str, str]) -> None:
    for name, parameter in parameters.items():
        if name not in known:
            raise InvalidRequestError(f"parameter {name!r} is not supported; known: {', '.join(known)}")
        if parameter.WhichOneof("parameter_choice") != known[name]:
            raise InvalidRequestError(f"parameter {name!r} must be a {known[name].removesuffix('_param')}")


class DevelopmentServicer(headrace_pb2_grpc.PredictorDevelopmentServicer):
    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def Kill(
        self, request: headrace_pb2.KillPredictorRequest, context: Context
    ) -> headrace_pb2.KillPredictorResponse:
        check_development(context)
        if not request.request_id or not any(
            request.request_id in serving.request_ids for serving in self._repository.served
        ):
            raise NotFoundError(f"no request {request.request_id!r} is in flight here")
        asyncio.get_running_loop().call_later(_ANSWER_S, _die)
        return headrace_pb2.KillPredictorResponse()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # The kernel ignores a signal that the first process of a container sends to itself.
    os._exit(128 + signal.SIGKILL)
