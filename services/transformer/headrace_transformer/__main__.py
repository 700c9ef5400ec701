"""Starts the transformer, or several on one port."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headrace.payload.metrics import observe_tap
from headrace.payload.tap import PayloadTap
from headrace.rpc.client.channel import open_channel, watch_serving
from headrace.rpc.http2.server import HttpServer
from headrace.rpc.limits.admission import Admission
from headrace.rpc.server.server import READY, Server
from headrace.rpc.server.service import run_service
from headrace.threads import run_in_daemon_thread
from headrace_protos import rest_pb2_grpc
from headrace_protos.headrace_pb2_grpc import PayloadLogStub, add_TextGenerationServicer_to_server
from headrace_transformer.frontends.grpc import development
from headrace_transformer.keys import KeyFile
from headrace_transformer.settings import TransformerSettings
from headrace_transformer.signing import signer_of
from headrace_transformer.supervisor import open_page, supervise

logger = logging.getLogger(__name__)

# The public services, for reflection and health. The payload log is the logger's, behind the same address.
_OWN = ("inference.GRPCInferenceService", "headrace.v1.TextGeneration")
_PAYLOAD_LOG = "headrace.v1.PayloadLog"
_TAP_DRAIN_S = 3.0
_WORKER_READY_S = 2.0


async def serve(settings: TransformerSettings) -> None:
    """Runs one transformer, or the parent of several."""
    if settings.workers > 1:
        await supervise(settings)
    else:
        await _serve(settings)


async def serve_worker(settings: TransformerSettings, page: int) -> None:
    """Runs one of several transformers; `page` is a descriptor, see supervisor.py."""
    open_page(page)
    # It listens once it can serve; until then other workers take the connections.
    await _serve(settings.model_copy(update={"listen": "take-over", "metrics_port": 0}))


async def _serve(settings: TransformerSettings) -> None:
    keys = KeyFile(settings.keys, settings.key_digests) if settings.keys and settings.key_digests else None
    # Wrong settings are reported before the rest is imported.
    from headrace_transformer.batches.service import BatchService
    from headrace_transformer.frontends.anthropic.errors import anthropic_error
    from headrace_transformer.frontends.anthropic.servicer import AnthropicServicer
    from headrace_transformer.frontends.grpc.inference_servicer import InferenceServicer
    from headrace_transformer.frontends.grpc.text_generation_servicer import (
        RestTextGenerationServicer,
        TextGenerationServicer,
    )
    from headrace_transformer.frontends.openai.http_methods import error_body, http_methods
    from headrace_transformer.frontends.openai.servicer import OpenAIServicer
    from headrace_transformer.frontends.responses.servicer import ResponsesServicer
    from headrace_transformer.frontends.v2_rest.servicer import OpenInferenceServicer
    from headrace_transformer.generation.month_budget import MonthBudget, used_by_log
    from headrace_transformer.generation.pipeline import Pipeline
    from headrace_transformer.generation.repeating import RecordedTokens
    from headrace_transformer.generation.token_quota import TokenQuota
    from headrace_transformer.inference.encoder_calls import EncoderCalls
    from headrace_transformer.inference.infer import Inference
    from headrace_transformer.models.catalogue import Catalogue
    from headrace_transformer.models.processors import RunningProcessor
    from headrace_transformer.models.work_pool import WorkPool
    from headrace_transformer.predictors.client import PredictorClient
    from headrace_transformer.predictors.gateway_endpoints import list_endpoints
    from headrace_transformer.predictors.links import Links
    from headrace_transformer.predictors.relay import Relay
    from headrace_transformer.predictors.replicas import Replicas
    from headrace_transformer.predictors.resuming import ResumingGenerator
    from headrace_transformer.processes.body_processes import BodyProcesses
    from headrace_transformer.routing.direct_models import list_direct_models
    from headrace_transformer.routing.router import Router
    from headrace_transformer.text.answer_syntax import SyntaxSettings
    from headrace_transformer.text.tokenizer import start_rendering

    bodies = BodyProcesses()
    predictor = PredictorClient(settings.predictor, settings.predictor_wait, settings.predictor_start_wait)
    links = Links(settings.predictor_replicas or (settings.predictor,), settings.silence_limit)
    log = open_channel(settings.logger, "logger")
    tap = PayloadTap.of(settings, "transformer")
    tap.start()
    observe_tap(tap)
    for name in settings.unknown_logged_models:
        logger.warning("TRANSFORMER_PAYLOAD_LOG names the model %s, which is not configured here", name)
    pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    replicas = Replicas(settings.predictor_replicas, predictor)
    work = WorkPool(settings.processor_threads, settings.processor_waiting, "processor")
    processors = {source.name: RunningProcessor(source, work) for source in settings.processors}
    catalogue = Catalogue(settings.models, predictor, replicas, pool, bodies, processors)
    generator = ResumingGenerator(links, predictor, settings.resume_limit)
    log_stub = PayloadLogStub(log)
    quota = TokenQuota(MonthBudget(used_by_log(log_stub)))
    router = Router(catalogue, settings.model_routes, lambda model: links.can_resume(model, ""))
    reports_cached = settings.cached_tokens == "all"
    recorded = RecordedTokens(log_stub)
    syntaxes = SyntaxSettings(settings.tool_formats, settings.reasoning_formats)
    key = settings.signing_key.get_secret_value() if settings.signing_key else None
    signer = signer_of(key, settings.payload_spool)
    pipeline = Pipeline(router, generator, tap, bodies, reports_cached, quota, recorded, syntaxes, signer)
    public = (*_OWN, _PAYLOAD_LOG, *development.services(settings.development))
    server = Server("transformer", settings, public, Admission.of(settings, settings.max_calls))
    server.limits.add(quota.remaining)

    requests = Inference(pipeline, router, Relay(predictor), tap, quota)
    inference = InferenceServicer(requests, catalogue, router, predictor, replicas)
    inference.add_to_server(server.grpc)
    text = TextGenerationServicer(pipeline)
    add_TextGenerationServicer_to_server(text, server.grpc)
    rest_pb2_grpc.add_TextGenerationServicer_to_server(RestTextGenerationServicer(pipeline, text, bodies), server.grpc)
    encoders = EncoderCalls(router, predictor, tap, bodies, quota)
    openai = OpenAIServicer(pipeline, router, encoders, bodies, settings.sse_keep_alive)
    http = HttpServer(server.interceptor, error_body, shares_port=settings.listen != "alone")
    http.add(*http_methods("OpenAI", openai))
    responses = ResponsesServicer(pipeline, router, bodies, log_stub, settings.sse_keep_alive)
    http.add(*http_methods("Responses", responses))
    anthropic = AnthropicServicer(pipeline, router, bodies, settings.sse_keep_alive)
    http.add(*http_methods("Anthropic", anthropic, anthropic_error))
    batches = BatchService(settings, openai, responses, router)
    http.add(*batches.http_methods())
    server.add_port(http, settings.http_port)
    v2_rest = OpenInferenceServicer(inference, pipeline, bodies, links, settings.sse_keep_alive)
    rest_pb2_grpc.add_OpenInferenceServicer_to_server(v2_rest, server.grpc)
    if settings.development:
        development.add_to_server(replicas, server.grpc)

    report_ready = partial(server.set_serving, READY)

    async def load() -> None:
        await run_in_daemon_thread("load-tokenizers", catalogue.load_all)
        for processor in processors.values():
            await processor.load()
        for name in ("", *_OWN):
            await server.set_serving(name, True)
        server.own("batches", batches.run(server.stopping))

    async def load_and_watch() -> None:
        await load()
        await catalogue.watch(report_ready)

    for name in ("", READY, *_OWN, _PAYLOAD_LOG):
        await server.set_serving(name, False)
    server.own("chat-templates", start_rendering(bodies))
    server.own("links", links.run())
    if settings.direct_models is not None:
        server.own("direct-models", list_direct_models(settings.direct_models, router))
    if settings.gateway_endpoints is not None:
        server.own("gateway-endpoints", list_endpoints(settings.gateway_endpoints, links))
    if settings.model_routes is not None:
        server.own("model-routes", router.follow())
    if keys is not None:
        server.own("keys", keys.follow())
    server.own("payload-log-health", watch_serving(log, _PAYLOAD_LOG, partial(server.set_serving, _PAYLOAD_LOG)))
    server.at_drain(catalogue.drain)
    server.at_stop(log.close)
    server.at_stop(predictor.close)
    server.at_stop(replicas.close)
    server.at_stop(partial(tap.stop, _TAP_DRAIN_S))
    server.at_stop(bodies.close)
    server.at_stop(batches.close)
    if settings.listen == "take-over":
        await load()
        server.own("watch", catalogue.watch(report_ready))
        await catalogue.wait_ready(_WORKER_READY_S)
    else:
        # It listens while it loads, so that a long download can be distinguished from a hang.
        server.own("load-and-watch", load_and_watch())
    await server.run()
    pool.shutdown(wait=False, cancel_futures=True)
    work.close()


if __name__ == "__main__":
    run_service("transformer", TransformerSettings, serve)
