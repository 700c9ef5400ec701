"""One transformer: its parts, made of the settings, and its life from the first health check to the last call."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headrace.payload.tap import PayloadTap
from headrace.rpc.client.channel import open_channel, watch_serving
from headrace.rpc.http2.server import HttpServer
from headrace.rpc.limits.admission import Admission
from headrace.rpc.server.listeners import READY
from headrace.rpc.server.server import Server
from headrace.telemetry.page import PickerMetrics
from headrace.threads import FairThreads, run_in_daemon_thread
from headrace_protos import rest_pb2_grpc
from headrace_protos.headrace_pb2_grpc import (
    PayloadLogStub,
    add_DevelopmentServicer_to_server,
    add_TextGenerationServicer_to_server,
)
from headrace_transformer.batches.line_calls import methods_of
from headrace_transformer.batches.runner import BatchRunner, store_of
from headrace_transformer.batches.running import Resources
from headrace_transformer.batches.servicer import BatchesServicer
from headrace_transformer.frontends.anthropic.answers import anthropic_error
from headrace_transformer.frontends.anthropic.servicer import AnthropicServicer
from headrace_transformer.frontends.grpc.inference_servicer import InferenceServicer
from headrace_transformer.frontends.grpc.text_generation_servicer import (
    DevelopmentServicer,
    RestTextGenerationServicer,
    TextGenerationServicer,
)
from headrace_transformer.frontends.http import error_body, http_methods
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.models import FrontEnd
from headrace_transformer.frontends.openai.servicer import OpenAIServicer
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.frontends.responses.servicer import ResponsesServicer
from headrace_transformer.frontends.v2_rest.servicer import OpenInferenceServicer
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.repeating import RecordedTokens
from headrace_transformer.generation.resume_ids import signer_of
from headrace_transformer.generation.token_quota import MonthBudget, TokenQuota, used_by_log
from headrace_transformer.inference.encoder_calls import EncoderCalls
from headrace_transformer.inference.infer import Inference
from headrace_transformer.keys import KeyFile
from headrace_transformer.models.catalogue import Catalogue
from headrace_transformer.models.processors import RunningProcessor
from headrace_transformer.predictors.discovery.replicas import Replicas
from headrace_transformer.predictors.engines.pools import Engines
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.resume.resuming import ResumingGenerator
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.gateway_files import list_direct_models, list_endpoints
from headrace_transformer.routing.router import Router
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.text.answer_parser import SyntaxSettings
from headrace_transformer.text.tokenizer import start_rendering

logger = logging.getLogger(__name__)

# The public services, for reflection and health. The payload log is the logger's, behind the same address.
_OWN = ("inference.GRPCInferenceService", "headrace.v1.TextGeneration")
_PAYLOAD_LOG = "headrace.v1.PayloadLog"
_TAP_DRAIN_S = 3.0
_WORKER_READY_S = 2.0


class Transformer:
    """Made and run on the event loop."""

    def __init__(self, settings: TransformerSettings) -> None:
        self._settings = settings
        self._bodies = BodyProcesses()
        self._batch_bodies = BodyProcesses()  # Apart from those of requests that somebody waits for.
        self._tap = _started_tap(settings)
        self._log = open_channel(settings.logger, "logger")
        self._log_stub = PayloadLogStub(self._log)
        self._tokenizing = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        places = settings.processor_threads + settings.processor_waiting
        self._work = FairThreads(settings.processor_threads, places, "processor")
        self._processors = {source.name: RunningProcessor(source, self._work) for source in settings.processors}
        self._predictor = PredictorClient(settings.predictor, settings.predictor_wait, settings.predictor_start_wait)
        self._replicas = Replicas(settings.predictor_replicas, self._predictor)
        self._links = Links(settings.predictor_replicas or (settings.predictor,), settings.silence_limit)
        self._engines = Engines(settings.all_engines, settings.silence_limit)
        PickerMetrics(lambda: self._links.pickable() | {name: pool.load for name, pool in self._engines.pools.items()})
        self._catalogue = Catalogue(
            settings.own_models,
            self._predictor,
            self._replicas,
            self._tokenizing,
            self._bodies,
            self._processors,
            self._engines,
        )
        self._router = Router(self._catalogue, settings.model_routes, self._can_begin)
        self._quota = TokenQuota(MonthBudget(used_by_log(self._log_stub)))
        self._pipeline = self._made_pipeline()
        public = (*_OWN, _PAYLOAD_LOG, *(["headrace.v1.Development"] if settings.development else ()))
        self._server = Server("transformer", settings, public, Admission.of(settings, settings.max_calls))
        self._server.limits.add(self._quota.remaining)
        self._add_grpc()
        self._batches = self._add_http()

    async def run(self, keys: KeyFile | None) -> None:
        """Serves until it is told to stop."""
        settings, server, catalogue = self._settings, self._server, self._catalogue
        for name in ("", READY, *_OWN, _PAYLOAD_LOG):
            await server.set_serving(name, False)
        self._own_tasks(keys)
        server.at_drain(catalogue.drain)
        for stop in (self._log.close, self._predictor.close, self._replicas.close):
            server.at_stop(stop)
        server.at_stop(partial(self._tap.stop, _TAP_DRAIN_S))
        server.at_stop(self._bodies.close)
        server.at_stop(self._batch_bodies.close)
        if settings.listen == "take-over":
            await self._load()
            server.own("watch", catalogue.watch(self._report_ready))
            await catalogue.wait_ready(_WORKER_READY_S)
        else:
            # It listens while it loads, so that a long download can be distinguished from a hang.
            server.own("load-and-watch", self._load_and_watch())
        await server.run()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._work.close()

    def _made_pipeline(self) -> Pipeline:
        settings = self._settings
        key = settings.signing_key.get_secret_value() if settings.signing_key else None
        return Pipeline(
            self._router,
            ResumingGenerator(self._links, self._predictor, settings.resume_limit),
            self._tap,
            self._bodies,
            settings.cached_tokens == "all",
            self._quota,
            RecordedTokens(self._log_stub),
            SyntaxSettings(settings.tool_formats, settings.reasoning_formats),
            signer_of(key, settings.payload_spool),
        )

    def _add_grpc(self) -> None:
        """The front ends that speak gRPC, and those by REST to which the gateway transcodes."""
        pipeline, bodies, router, grpc = self._pipeline, self._bodies, self._router, self._server.grpc
        requests = Inference(pipeline, router, self._predictor, self._tap, self._quota)
        inference = InferenceServicer(
            requests, self._catalogue, router, self._predictor, self._replicas, self._engines.pools
        )
        inference.add_to_server(grpc)
        text = TextGenerationServicer(pipeline)
        add_TextGenerationServicer_to_server(text, grpc)
        rest_pb2_grpc.add_TextGenerationServicer_to_server(RestTextGenerationServicer(pipeline, text, bodies), grpc)
        v2_rest = OpenInferenceServicer(inference, pipeline, bodies, self._links, self._settings.sse_keep_alive)
        rest_pb2_grpc.add_OpenInferenceServicer_to_server(v2_rest, grpc)
        if self._settings.development:
            add_DevelopmentServicer_to_server(DevelopmentServicer(self._replicas), grpc)

    def _add_http(self) -> BatchRunner | None:
        """The front ends for the HTTP server, and the batches that two of them answer."""
        settings, pipeline, bodies, router = self._settings, self._pipeline, self._bodies, self._router
        http = HttpServer(self._server.interceptor, error_body(openai_error), shares_port=settings.listen != "alone")
        encoders = EncoderCalls(router, self._predictor, self._tap, bodies, self._quota)
        models, keep_alive_s = self._engines.pools.keys(), settings.sse_keep_alive
        passing = Passing(router, self._predictor, self._tap, self._quota, pipeline, models, keep_alive_s)
        front = FrontEnd(pipeline, router, bodies, passing, keep_alive_s)
        openai, responses = OpenAIServicer(front, encoders), ResponsesServicer(front, self._log_stub)
        store, methods, batch_bodies = store_of(settings), methods_of(openai, responses), self._batch_bodies
        http.add(*http_methods("OpenAI", openai, openai_error))
        http.add(*http_methods("Responses", responses, openai_error))
        http.add(*http_methods("Anthropic", AnthropicServicer(front), anthropic_error))
        http.add(*http_methods("Batches", BatchesServicer(store, methods, batch_bodies), openai_error))
        self._server.add_port(http, settings.http_port)
        if store is None:
            return None
        return BatchRunner(Resources(store, batch_bodies, methods, router.wait_for, settings.batch_concurrency))

    def _own_tasks(self, keys: KeyFile | None) -> None:
        settings, server = self._settings, self._server
        server.own("chat-templates", start_rendering(self._bodies))
        server.own("links", self._links.run())
        server.own("engines", self._engines.run())
        if settings.direct_models is not None:
            server.own("direct-models", list_direct_models(settings.direct_models, self._router))
        if settings.gateway_endpoints is not None:
            server.own("gateway-endpoints", list_endpoints(settings.gateway_endpoints, self._links))
        if settings.model_routes is not None:
            server.own("model-routes", self._router.follow())
        if keys is not None:
            server.own("keys", keys.follow())
        report = partial(server.set_serving, _PAYLOAD_LOG)
        server.own("payload-log-health", watch_serving(self._log, _PAYLOAD_LOG, report))

    def _can_begin(self, model: str) -> bool:
        """Whether a predictor, or an engine, could begin a generation now."""
        return self._links.can_resume(model, "") or self._engines.serve(model)

    async def _report_ready(self, is_ready: bool) -> None:
        await self._server.set_serving(READY, is_ready)

    async def _load(self) -> None:
        await run_in_daemon_thread("load-tokenizers", self._catalogue.load_all)
        for processor in self._processors.values():
            await processor.load()
        for name in ("", *_OWN):
            await self._server.set_serving(name, True)
        if self._batches is not None:
            self._server.own("batches", self._batches.run(self._server.stopping))

    async def _load_and_watch(self) -> None:
        await self._load()
        await self._catalogue.watch(self._report_ready)


def _started_tap(settings: TransformerSettings) -> PayloadTap:
    tap = PayloadTap(settings, "transformer")
    tap.start()
    tap.observe()
    for name in settings.unknown_logged_models:
        logger.warning("TRANSFORMER_PAYLOAD_LOG names the model %s, which is not configured here", name)
    return tap
