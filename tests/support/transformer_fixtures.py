"""A transformer within the test's process, before any server of the protocol."""

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from headrace.models.sources import parse_models
from headrace.rpc.http2.server import HttpServer
from headrace.rpc.server.handlers import Interceptor
from headrace.threads import FairThreads
from headrace_protos.headrace_pb2_grpc import add_TextGenerationServicer_to_server
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_protos.rest_pb2_grpc import add_OpenInferenceServicer_to_server
from headrace_transformer.frontends.grpc.inference_servicer import InferenceServicer
from headrace_transformer.frontends.grpc.text_generation_servicer import TextGenerationServicer
from headrace_transformer.frontends.http import error_body, http_methods
from headrace_transformer.frontends.openai.errors import openai_error
from headrace_transformer.frontends.openai.models import FrontEnd
from headrace_transformer.frontends.openai.servicer import OpenAIServicer
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.frontends.v2_rest.servicer import OpenInferenceServicer
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.resume_ids import Signer
from headrace_transformer.generation.token_quota import TokenQuota
from headrace_transformer.inference.encoder_calls import EncoderCalls
from headrace_transformer.inference.infer import Inference
from headrace_transformer.models.catalogue import Catalogue
from headrace_transformer.models.processors import RunningProcessor, parse_processors
from headrace_transformer.predictors.discovery.replicas import Replicas
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.resume.resuming import ResumingGenerator
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router
from tests.support.http2_client import connected
from tests.support.payload_ingest import tap_of
from tests.waiting import until

NOWHERE = "127.0.0.1:9"


@asynccontextmanager
async def transformer(
    predictor,
    models="",
    processors="",
    replicas=(),
    ready=True,
    silence_limit_s=10.0,
    wait_s=30.0,
    resume_limit=2,
    reports_cached_tokens=False,
    routes=None,
):
    """Its gRPC stub and its catalogue, once a generation would work; `replicas` are as in the settings."""
    bodies = BodyProcesses()
    client, links = PredictorClient(predictor, wait_s), Links(replicas or (predictor,), silence_limit_s)
    predictors = Replicas(replicas, client)
    threads, work = ThreadPoolExecutor(1), FairThreads(2, 3, "processor")
    running = {source.name: RunningProcessor(source, work) for source in parse_processors(processors)}
    catalogue = Catalogue(parse_models(models) if models else (), client, predictors, threads, bodies, running)
    await asyncio.to_thread(catalogue.load_all)
    for processor in running.values():
        await processor.load()
    spool = await asyncio.to_thread(tempfile.TemporaryDirectory)
    tap = tap_of(NOWHERE, spool=Path(spool.name))
    tap.start()
    router = Router(catalogue, routes, lambda model: links.can_resume(model, ""))
    generator, quota = ResumingGenerator(links, client, resume_limit), TokenQuota()
    pipeline = Pipeline(router, generator, tap, bodies, reports_cached_tokens, quota, signer=Signer(b"a key"))
    inference = Inference(pipeline, router, client, tap, quota)
    options = [("grpc.max_receive_message_length", 64 * 1024 * 1024), ("grpc.max_send_message_length", -1)]
    interceptor = Interceptor("transformer")
    server = grpc.aio.server(interceptors=(interceptor,), options=options)
    servicer = InferenceServicer(inference, catalogue, router, client, predictors, {})
    servicer.add_to_server(server)
    add_TextGenerationServicer_to_server(TextGenerationServicer(pipeline), server)
    http = HttpServer(interceptor, error_body(openai_error))
    encoders = EncoderCalls(router, client, tap, bodies, quota)
    passing = Passing(router, client, tap, quota, pipeline, models=(), keep_alive_s=15.0)
    front = FrontEnd(pipeline, router, bodies, passing)
    http.add(*http_methods("OpenAI", OpenAIServicer(front, encoders), openai_error))
    add_OpenInferenceServicer_to_server(OpenInferenceServicer(servicer, pipeline, bodies, links), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http_port = await http.start("127.0.0.1", 0)

    async def openai(method, body, headers=()):
        """The answer to a call of OpenAI's API, whole."""
        async with connected(http_port) as client:
            return await client.post(f"/headrace.rest.v1.OpenAI/{method}", body, headers)

    async def ignore(_):
        pass

    watch = asyncio.create_task(catalogue.watch(ignore))
    linking = asyncio.create_task(links.run())
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    try:
        if ready:
            await until(lambda: catalogue.ready)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub = GRPCInferenceServiceStub(channel)
            stub.channel, stub.router = channel, router  # For tests of other services and of names.
            stub.openai = openai
            yield stub, catalogue
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await server.stop(0)
        await http.stop(0)
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        await bodies.close()
        await asyncio.to_thread(tap.close)
        spool.cleanup()
        await predictors.close()
        await client.close()
        threads.shutdown()
        work.close()
