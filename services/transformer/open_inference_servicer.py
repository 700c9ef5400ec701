"""The V2 protocol's REST: health."""

from __future__ import annotations

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from millrace.errors import NotReadyError
from millrace.interceptors import Context
from millrace.protos import rest_pb2_grpc
from services.transformer.catalogue import Catalogue
from services.transformer.rest import json_body


class OpenInferenceServicer(rest_pb2_grpc.OpenInferenceServicer):
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def Live(self, request: Empty, context: Context) -> HttpBody:
        return json_body({"live": True})

    async def Ready(self, request: Empty, context: Context) -> HttpBody:
        """200 where a generation would work now, else 503: what load balancers look at."""
        ready = self._catalogue.ready
        if not ready:
            await context.send_initial_metadata(NotReadyError("not ready", hop="predictor").trailing_metadata(""))
        return json_body({"ready": ready})
