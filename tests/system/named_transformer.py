"""The transformer with the addresses of services that a test's name server at NAME_SERVER_PORT has."""

import os

from headrace.rpc.server.service import run_service
from headrace_transformer.__main__ import serve
from headrace_transformer.settings import TransformerSettings
from tests.support.service_records import ask_at

if __name__ == "__main__":
    ask_at(int(os.environ["NAME_SERVER_PORT"]))
    run_service("transformer", TransformerSettings, serve)
