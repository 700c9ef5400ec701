"""What all users share: connections, closed and open load, failures.

Closed load: a request, its answer, the think time. Open load: each user sends requests at the times of a Poisson
process, or at those of the payload log, whether earlier ones have been answered or not; a request that could not be
sent in time is measured from the time at which it should have been (no coordinated omission).

A failure is reported as its status and the hop that failed, without details that differ from call to call, so that
equal failures count together.
"""

# ruff: noqa: S311  (random numbers here are not secrets)
import http.client
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import gevent
import grpc
from gevent.pool import Pool
from grpc.experimental import ChannelOptions
from locust import User, task

from headrace_protos.inference_pb2 import ModelMetadataResponse
from loadtest.gateway import GatewayError, key_headers, parse_address
from loadtest.options import REPLAY
from loadtest.prompts import Prompt
from loadtest.session import DEFAULT_HOST, session_of
from loadtest.users.call import Call, CallFailedError

# More requests of one user wait to be sent, and their times go on.
_IN_FLIGHT = 1000
# After the stack did not say what a user needs to know.
_PATIENCE_S = 1.0


class StackUser(User):
    """A user of the gateway at the host; `request` sends one request. `row` and `kind`: its row in Locust's table."""

    abstract = True
    host = DEFAULT_HOST
    row: ClassVar[str]
    kind: ClassVar[str] = "gRPC"
    # Whether it needs a model that takes prompts.
    text: ClassVar[bool] = True

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.session = session_of(environment)
        self.options = self.session.options
        self.address = parse_address(self.host or "")
        self.metadata = tuple(key_headers(self.options.key).items())
        self.found: ModelMetadataResponse | None = None
        self._requests = Pool(_IN_FLIGHT)

    def wait_time(self) -> float:
        return random.uniform(*self.options.think_time)

    def on_stop(self) -> None:
        self._requests.kill()
        self.close()

    def close(self) -> None:
        """Closes connections."""

    def find_model(self) -> ModelMetadataResponse:
        """The model, with its inputs where the user needs them; raises GatewayError."""
        return ModelMetadataResponse(name=self.session.model_name(text=self.text))

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        """Sends one request and reads its answer, within `measured`."""
        raise NotImplementedError

    @property
    def model(self) -> ModelMetadataResponse:
        """The model that `find_model` found."""
        if self.found is None:
            raise CallFailedError("no model")
        return self.found

    @task
    def load(self) -> None:
        if self.found is None and not self._find():
            gevent.sleep(_PATIENCE_S)
        elif self.options.arrivals == REPLAY:
            self._replay()
        elif self.options.arrivals is not None:
            self._arrive(self.options.arrivals)
        else:
            self.request(time.perf_counter(), *self.options.workload.draw())

    def _find(self) -> bool:
        """Finds the model; a failure counts as a failed request."""
        try:
            self.found = self.find_model()
        except GatewayError as error:
            self._fail(error)
        return self.found is not None

    def _fail(self, error: GatewayError) -> None:
        with self.measured(time.perf_counter()):
            raise CallFailedError(str(error)) from error

    def _arrive(self, rate: float) -> None:
        """Poisson arrivals, until the user is stopped."""
        arrival = time.perf_counter()
        while True:
            arrival += random.expovariate(rate)
            self._send_at(arrival, *self.options.workload.draw())

    def _replay(self) -> None:
        """The arrivals of the payload log, over and over, until the user is stopped."""
        try:
            schedule = self.session.schedule()
        except GatewayError as error:
            self._fail(error)
            gevent.sleep(_PATIENCE_S)
            return
        began = time.perf_counter()
        # Between the last request and the first of the next round: the mean time between two.
        pause = max(schedule[-1][0] / len(schedule), 1e-3)
        while True:
            for offset, prompt in schedule:
                self._send_at(began + offset, prompt.text, self._length(prompt))
            began += schedule[-1][0] + pause

    def _length(self, prompt: Prompt) -> int:
        return prompt.max_tokens or self.options.workload.draw_output()

    def _send_at(self, arrival: float, prompt: str, max_tokens: int) -> None:
        gevent.sleep(max(0.0, arrival - time.perf_counter()))
        self._requests.spawn(self._request_alone, arrival, prompt, max_tokens)

    def _request_alone(self, arrival: float, prompt: str, max_tokens: int) -> None:
        """A request in a greenlet of its own: what it raises is the user's error, as in a task."""
        try:
            self.request(arrival, prompt, max_tokens)
        except Exception as error:
            self.environment.events.user_error.fire(user_instance=self, exception=error, tb=error.__traceback__)

    @contextmanager
    def measured(self, arrival: float) -> Iterator[Call]:
        """A request; what the block raises is its failure. One that Locust stops is not counted."""
        call = Call(self.session, self.row, self.kind, arrival)
        failure: CallFailedError | None = None
        try:
            yield call
        except grpc.RpcError as error:
            failure = CallFailedError(_status(error))
        except CallFailedError as error:
            failure = error
        except (OSError, http.client.HTTPException) as error:
            failure = CallFailedError(f"connection: {type(error).__name__}")
        except gevent.GreenletExit:
            call.forget()
            raise
        call.end(failure)


class GrpcUser(StackUser):
    """A user with a gRPC channel to the host; its calls have `authority` as authority."""

    abstract = True
    authority: ClassVar[str] = ""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        options: list[tuple[str, Any]] = [
            # Without its own pool each user would share one connection with all the others.
            ("grpc.use_local_subchannel_pool", 1),
            # A stream is read where it is consumed, and not by way of another thread: twice as many messages a second.
            (ChannelOptions.SingleThreadedUnaryStream, 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if self.authority:
            options.append(("grpc.default_authority", self.authority))
        if self.address.secure:
            self.channel = grpc.secure_channel(self.address.target, grpc.ssl_channel_credentials(), options)
        else:
            self.channel = grpc.insecure_channel(self.address.target, options)

    def close(self) -> None:
        self.channel.close()

    def metadata_of(self, call: Call) -> tuple[tuple[str, str], ...]:
        return (*self.metadata, ("x-request-id", call.request_id))


class HttpUser(StackUser):
    """A user with HTTP connections to the host, one for each request in flight; they are used again."""

    abstract = True
    kind = "HTTP"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def posted(self, path: str, body: bytes, call: Call) -> Iterator[http.client.HTTPResponse]:
        """The successful response to a POST of JSON; its connection closes unless the block read to the end."""
        headers = {
            "content-type": "application/json",
            "x-request-id": call.request_id,
            "x-timeout-ms": str(round(self.options.deadline * 1000)),
            **dict(self.metadata),
        }
        connection, response = self._post(path, body, headers)
        try:
            call.trace_id = response.getheader("x-trace-id", "")
            if response.status != http.client.OK:
                hop = response.getheader("x-failed-hop")
                raise CallFailedError(f"{response.status}" + (f" at the {hop}" if hop else f" {response.reason}"))
            yield response
        except BaseException:
            connection.close()
            raise
        if response.isclosed():
            self._idle.append(connection)
        else:
            connection.close()

    def _post(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends on a connection that is idle, or on a new one where the gateway has closed that."""
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else self.address.connect(self.options.deadline)
            try:
                connection.request("POST", path, body=body, headers=headers)
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                if not used:
                    raise
            except BaseException:
                connection.close()
                raise


def _status(error: Any) -> str:
    """Status and failed hop of a grpc.RpcError, which is also a call."""
    hop = dict(error.trailing_metadata() or ()).get("x-failed-hop")
    return f"{error.code().name} at the {hop}" if hop else f"{error.code().name}: {error.details()}"
