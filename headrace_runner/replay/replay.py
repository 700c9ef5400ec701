"""Replays the streams of a source at another stack, a few at a time: one call of `Generate` for each, over one channel.

The calls run on `concurrency` threads; everything else, on the caller's. As many streams again wait for a thread at
most, so that records are read no faster than they are replayed. Calls have the key of HEADRACE_AGAINST_KEY, or without
it that of HEADRACE_KEY.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import grpc

from headrace.errors import RETRY_AFTER_MS, StartupError
from headrace.rpc.client.caller_key import KEY, headers
from headrace_protos.headrace_pb2 import GenerateRequest, PayloadRecord
from headrace_protos.inference_pb2 import ModelConfigRequest, ServerLiveRequest
from headrace_runner.gateway import TIMEOUT_S, Gateway
from headrace_runner.replay.records import LoggedStream, select
from headrace_runner.replay.results import Answer, Difference, Results, compare

AGAINST_KEY = "HEADRACE_AGAINST_KEY"
_TTFT_MS = "x-ttft-ms"

Found = Callable[[LoggedStream, "Difference | FailedError"], None]


class FailedError(Exception):
    """A replayed request failed: with a gRPC status and its message."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Target(Gateway):
    """The other stack; `timeout_s` is the deadline of each request, its repetitions included."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(address, AGAINST_KEY if headers(AGAINST_KEY) else KEY)
        self._timeout_s = timeout_s

    def check(self) -> None:
        """Raises StartupError unless a stack answers."""
        try:
            self.inference.ServerLive(ServerLiveRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise StartupError(f"no stack answers at {self.address}: {error.code().name}: {error.details()}") from None

    def fingerprint(self, model: str) -> str:
        """The fingerprint of the model's weights there; empty if it has none, or if there is no such model."""
        try:
            answer = self.inference.ModelConfig(ModelConfigRequest(name=model), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return ""  # The calls of Generate fail too, and are reported.
        return str(answer.config.parameters["fingerprint"].string_value)

    def generate(self, request: GenerateRequest) -> Answer:
        """The answer to a request; a refusal for lack of capacity is repeated after its `retry-after-ms`.

        Raises FailedError.
        """
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._generate(request, give_up_at - time.monotonic())
            except grpc.RpcError as error:
                pause_s = _retry_after_s(error)
                if pause_s is None or time.monotonic() + pause_s >= give_up_at:
                    raise FailedError(error.code().name, error.details() or "") from None
            time.sleep(pause_s)

    def _generate(self, request: GenerateRequest, timeout_s: float) -> Answer:
        token_ids: list[int] = []
        texts: list[str] = []
        finish_reason = ""
        begun = time.monotonic()
        call = self.text.Generate(request, timeout=timeout_s)
        for response in call:
            token_ids += response.token_ids
            texts.append(response.text)
            finish_reason = response.finish_reason or finish_reason
        duration_ms = (time.monotonic() - begun) * 1000
        trailers = dict(call.trailing_metadata() or ())
        ttft = trailers.get(_TTFT_MS)
        ttft_ms = None if ttft is None else float(ttft)
        return Answer(tuple(token_ids), "".join(texts), finish_reason, ttft_ms, duration_ms)


def _retry_after_s(error: Any) -> float | None:
    """The pause before the request may be repeated; None if it must not be."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    value = dict(error.trailing_metadata() or ()).get(RETRY_AFTER_MS)
    return int(value) / 1000 if isinstance(value, str) and value.isdecimal() else None


class Replay:
    """One run; `limit` is the most streams that it replays, `found` is called with each difference and each failure."""

    def __init__(self, target: Target, *, concurrency: int, limit: int, from_text: bool, found: Found) -> None:
        self.results = Results()
        self._target = target
        self._concurrency = concurrency
        self._limit = limit
        self._from_text = from_text
        self._found = found

    def run(self, records: Iterable[PayloadRecord]) -> Results:
        """Reads and replays all records; raises what reading them raises."""
        threads = ThreadPoolExecutor(self._concurrency, "replay")
        running: dict[Future[Answer], LoggedStream] = {}
        try:
            for stream in self._selected(records):
                running[threads.submit(self._target.generate, stream.request)] = stream
                if len(running) == 2 * self._concurrency:
                    self._take(running)
            while running:
                self._take(running)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        for model in self.results.fingerprints():
            self.results.weights[model] = self._target.fingerprint(model)
        return self.results

    def _selected(self, records: Iterable[PayloadRecord]) -> Iterator[LoggedStream]:
        results, selected = self.results, 0
        for record in records:
            stream = select(record, self._from_text)
            if isinstance(stream, str):
                results.not_comparable[stream] += 1
                continue
            if selected == self._limit:
                results.limit_reached = True
                return
            selected += 1
            results.add_weights(stream)
            yield stream

    def _take(self, running: dict[Future[Answer], LoggedStream]) -> None:
        """Waits for an answer, and compares those that have come."""
        for ended in wait(running, return_when=FIRST_COMPLETED).done:
            stream = running.pop(ended)
            try:
                answer = ended.result()
            except FailedError as failure:
                self.results.add_failure(stream, failure.status, str(failure))
                self._found(stream, failure)
                continue
            difference = compare(stream, answer)
            self.results.add(stream, answer, difference)
            if difference is not None:
                self._found(stream, difference)
