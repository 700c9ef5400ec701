"""The output of `up`: a line for each process that becomes ready, and four lines with next steps.

`--verbose` adds every address, the pages of the metrics, and a call by gRPC. Colours are for terminals only.
"""

import json
import os
import time

from headrace_runner.process import Say
from headrace_runner.settings import IS_CHECKOUT
from headrace_runner.stack import Stack
from headrace_runner.terminal import BOLD, GREEN, Painter, short

_METHOD = "headrace.v1.TextGeneration/Generate"
# Settings of `make up` that `make smoke` also needs.
_GATEWAY_SETTINGS = ("GATEWAY_BIND", "GATEWAY_PORT", "PORT_OFFSET")


class Report:
    """Prints the start of one stack, line by line."""

    def __init__(self, stack: Stack, say: Say, *, coloured: bool = False, verbose: bool = False) -> None:
        self._stack = stack
        self._say = say
        self._paint = Painter(coloured)
        self._verbose = verbose
        self._started = time.monotonic()

    def starting(self) -> None:
        self._say(f"starting; logs are in {short(self._stack.folder.logs)}")

    def ready(self, name: str) -> None:
        name = "gateway" if name == "envoy" else name
        seconds = f"{self._seconds():5.1f} s"
        self._say(f"{self._label(name)} {self._stack.addresses[name]:<21} {self._paint(GREEN, seconds)}")

    def all_ready(self) -> None:
        """Reports the whole stack as ready, in one write: other programs may wait for one of the lines."""
        if self._verbose:
            for name, value in self._details():
                self._say(f"{self._label(name)} {value}")
        lines = [f"{self._label(name)} {value}" for name, value in self._next_steps()]
        self._say("\n".join([self._paint(GREEN, f"ready in {self._seconds():.1f} s"), *lines]))

    def _details(self) -> list[tuple[str, str]]:
        stack = self._stack
        pages = [page for kind in stack.metrics_pages.values() for page in kind]
        request = json.dumps({"model": stack.settings.first_model, "prompt": "Once upon a time"})
        return [
            ("management", f"127.0.0.1:{stack.settings.management_port}"),
            ("inner", stack.addresses["inner"]),
            ("admin", f"127.0.0.1:{stack.settings.gateway_admin_port}"),
            *(("metrics", f"http://{host}:{port}{path}") for host, port, path in pages),
            ("grpc", f"grpcurl -plaintext -d '{request}' {stack.gateway} {_METHOD}"),
            ("", f"buf curl --protocol grpc --http2-prior-knowledge -d '{request}' http://{stack.gateway}/{_METHOD}"),
        ]

    def _next_steps(self) -> list[tuple[str, str]]:
        stack, settings = self._stack, self._stack.settings
        request = {"model": settings.first_model, "stream": True, "prompt": "Once upon a time"}
        key = " -H 'Authorization: Bearer KEY'" if settings.gateway_keys or settings.gateway_jwks else ""
        return [
            *([("with TLS", f"https://{settings.gateway_with_tls}/")] if settings.gateway_tls else []),
            ("playground", f"http://{stack.gateway}/"),
            ("call", f"curl -N http://{stack.gateway}/v1/completions{key} -d '{json.dumps(request)}'"),
            ("check", self._check()),
            ("logs", short(stack.folder.logs)),
        ]

    def _check(self) -> str:
        if not IS_CHECKOUT:
            return f"headrace smoke --gateway {self._stack.gateway}"
        return "make smoke" + "".join(f" {name}={os.environ[name]}" for name in _GATEWAY_SETTINGS if name in os.environ)

    def _label(self, name: str) -> str:
        return self._paint(BOLD, f"{name:<12}")

    def _seconds(self) -> float:
        return time.monotonic() - self._started
