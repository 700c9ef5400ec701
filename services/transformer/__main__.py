"""Starts the transformer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from millrace.channel import open_channel
from millrace.health import watch_serving
from millrace.payload_tap import PayloadTap
from millrace.protos.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from millrace.protos.millrace_pb2_grpc import add_TextGenerationServicer_to_server
from millrace.protos.rest_pb2_grpc import add_OpenAIServicer_to_server, add_OpenInferenceServicer_to_server
from millrace.server import READY, Server
from millrace.service import run_service
from millrace.threads import run_in_daemon_thread
from services.transformer.settings import TransformerSettings

# The public face: what reflection lists and health answers for. The payload log is the logger's, behind the
# same address.
_OWN = ("inference.GRPCInferenceService", "millrace.v1.TextGeneration")
_PAYLOAD_LOG = "millrace.v1.PayloadLog"
_TAP_DRAIN_S = 3.0


async def serve(settings: TransformerSettings) -> None:
    # transformers takes seconds to import: a wrong setting is told before.
    from services.transformer.catalogue import Catalogue
    from services.transformer.inference_servicer import InferenceServicer
    from services.transformer.open_inference_servicer import OpenInferenceServicer
    from services.transformer.openai_servicer import OpenAIServicer
    from services.transformer.pipeline import Pipeline
    from services.transformer.predictor_client import PredictorClient
    from services.transformer.relay import Relay
    from services.transformer.text_generation_servicer import TextGenerationServicer

    predictor = PredictorClient(settings.predictor)
    log = open_channel(settings.logger, "logger")
    tap = PayloadTap(settings.logger, settings.payload_queue_memory, hop="transformer")
    pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    catalogue = Catalogue(settings.models, predictor, pool)
    pipeline = Pipeline(catalogue, predictor, tap)
    server = Server("transformer", settings.host, settings.port, settings.drain_s, (*_OWN, _PAYLOAD_LOG))

    # Methods that a servicer does not override answer UNIMPLEMENTED.
    inference = InferenceServicer(pipeline, catalogue, Relay(predictor, tap))  # type: ignore[abstract]
    add_GRPCInferenceServiceServicer_to_server(inference, server.grpc)
    add_TextGenerationServicer_to_server(TextGenerationServicer(pipeline), server.grpc)
    add_OpenAIServicer_to_server(OpenAIServicer(pipeline), server.grpc)
    add_OpenInferenceServicer_to_server(OpenInferenceServicer(catalogue), server.grpc)

    async def tell(ready: bool) -> None:
        await server.set_serving(READY, ready)

    async def load_and_watch() -> None:
        await run_in_daemon_thread("load-tokenizers", catalogue.load_all)
        for name in ("", *_OWN):
            await server.set_serving(name, True)
        await catalogue.watch(tell)

    async def tell_of_log(serving: bool) -> None:
        await server.set_serving(_PAYLOAD_LOG, serving)

    async def drain_tap() -> None:
        await tap.drain(_TAP_DRAIN_S)

    for name in ("", READY, *_OWN, _PAYLOAD_LOG):
        await server.set_serving(name, False)
    server.own("load-and-watch", load_and_watch())
    server.own("payload-shipper", tap.ship())
    server.own("payload-log-health", watch_serving(log, _PAYLOAD_LOG, tell_of_log))
    server.at_stop(log.close)
    server.at_stop(predictor.close)
    server.at_stop(drain_tap)
    await server.run()
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    run_service("transformer", TransformerSettings, serve)
