"""One connection to each predictor of ours, over which all generations of this process go: see steps.proto.

A link is up from its first message on. When it breaks or is silent for too long, every call on it ends with
PredictorLostError, which is treated as half a crash that the request may have caused (progress.py). Exception: if it
was silent, a call that was not accepted, and was submitted more than 1.5 s after the last message, ends with
NotReadyError: a working predictor sends every second, so it had hung before the call. The link then connects again, for
ever. links.py keeps the links; headrace/frames.py is the wire.

The gateway does not carry it: it would have nothing to balance or retry on a connection that stays with one predictor,
each message would pass one more process, and an end of the gateway would cut every link.

Owned by the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count

from headrace.endpoints import host_and_port, steps_port
from headrace.errors import NotReadyError
from headrace.frames import FrameConnection
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors.link.link_call import LinkCall
from headrace_transformer.predictors.resume.progress import PredictorLostError

logger = logging.getLogger(__name__)

METHOD = "/headrace.v1.PredictorSteps/Run"  # In spans.

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.25
# As a step's time grows with the number of prompts, so do the gaps of the streams beside them: twofold.
_MOST_CATCHING_UP = 2
_MESSAGE_BYTES = 8 * 1024 * 1024  # After which a message takes no further submission.
_MOST_QUIET_S = 1.5  # Of a predictor that works: it sends something every second.
_FOREIGN_PAUSE_S = 5.0  # After what is no step.
_BEAT_S = 10.0  # The predictor takes a transformer that sends nothing for much longer for dead.


class PredictorLink:
    """See the module. `changed` is called after changes; `loads` has the models that are ready at this predictor.

    `name` is what callers see of it, in this process alone: another one may name the same predictor differently.
    """

    def __init__(self, address: str, name: str, silence_limit_s: float, changed: Callable[[], None]) -> None:
        self.address = address
        self.name = name
        self.loads: Mapping[str, pb.EngineLoad] = {}
        self.rank = 0  # Of its address.
        self.listed_at = 0.0  # When its address was last behind a name, by the event loop's clock.
        self._leaves = self._is_unlisted = False
        self._catching_up: list[LinkCall] = []
        self._silence_limit_s = silence_limit_s
        self._changed = changed
        self._calls: dict[int, LinkCall] = {}
        self._numbers = count(1)
        self._submitted = 0  # Since the latest report of the load.
        self._heard_at = 0.0  # When the latest message came, by the event loop's clock.
        self._unsent: dict[int, pb.Submission] = {}
        self._cancelled: list[int] = []  # Of the calls that were sent.
        self._connection: FrameConnection | None = None
        self._sent_at = 0.0  # By the event loop's clock.
        self._silence = asyncio.timeout(None)
        self._is_up = False  # A message has come in this session.
        self._send_is_due = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"link-{address}")

    @property
    def is_leaving(self) -> bool:
        """Gets no new calls, and its streams move: the predictor is about to stop, or its address has been removed."""
        return self._leaves or self._is_unlisted

    @property
    def is_idle(self) -> bool:
        return not self._calls

    @property
    def can_catch_up(self) -> bool:
        """Whether the predictor has room for a call whose answer goes on at another one meanwhile."""
        self._catching_up = [call for call in self._catching_up if call.number in self._calls and not call.has_begun]
        return len(self._catching_up) < _MOST_CATCHING_UP

    def catches_up(self, call: LinkCall) -> None:
        """Notes that a call begins with what its answer has already."""
        self._catching_up.append(call)

    def in_flight(self, model: str) -> int:
        """Estimate of the generations of `model` at the predictor: its latest report plus what was submitted since; at
        least this process's own calls. Own calls and submissions of other models are counted too."""
        load = self.loads[model]
        return max(len(self._calls), load.running + load.waiting + self._submitted)

    def submit(self, call: LinkCall, submission: pb.Submission) -> None:
        """Sends a submission, whose number is set here; `call` gets what comes of it."""
        submission.number = call.number = next(self._numbers) & 0xFFFFFFFF
        call.link, call.submitted_at = self, self._loop.time()
        self._calls[call.number] = call
        self._submitted += 1
        self._unsent[call.number] = submission
        self._send_soon()

    def cancel(self, call: LinkCall) -> None:
        """Ends a call at the predictor; does nothing for one that has ended."""
        if self._calls.pop(call.number, None) is not None and self._unsent.pop(call.number, None) is None:
            self._cancelled.append(call.number)
            self._send_soon()

    async def close(self) -> None:
        """Ends the link, and its calls with PredictorLostError."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end_calls(PredictorLostError("the link was closed", hop="predictor"), is_silent=False)

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            is_silent = False
            error = PredictorLostError("the predictor ended the connection", hop="predictor")
            try:
                await self._session()
            except TimeoutError:
                is_silent = True
                logger.warning("the predictor at %s has sent nothing for %g s", self.address, self._silence_limit_s)
                error = PredictorLostError("the predictor fell silent", hop="predictor")
            except OSError as broken:
                logger.debug("the link to %s broke: %s", self.address, broken)
                error = PredictorLostError("the connection to the predictor broke", hop="predictor")
            except Exception:
                logger.exception("the predictor at %s breaks the protocol", self.address)
                error = PredictorLostError("the predictor breaks the protocol", hop="predictor")
                self._is_up, pause_s = False, _FOREIGN_PAUSE_S
            finally:
                was_up = self._is_up
                self._down()
            self._end_calls(error, is_silent)
            pause_s = _FIRST_PAUSE_S if was_up else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _session(self) -> None:
        """One connection, to its end."""
        self._unsent, self._cancelled = {}, []
        host, port = host_and_port(self.address)
        async with asyncio.timeout(self._silence_limit_s) as self._silence:
            connection = await FrameConnection.open(host, steps_port(port), self._receive, self._send)
            self._connection, self._sent_at = connection, self._loop.time()
            try:
                self._send()  # What was submitted before this task went on.
                await connection.ended
            finally:
                self._connection = None
                connection.abort()

    def _receive(self, message: bytes) -> None:
        self._heard_at = self._loop.time()
        self._silence.reschedule(self._heard_at + self._silence_limit_s)
        self._is_up = True
        self._take(pb.Step.FromString(message))
        if self._connection is not None and self._heard_at - self._sent_at > _BEAT_S:
            self._write(pb.StepsRequest(), self._connection)

    def _send_soon(self) -> None:
        """Sends at the end of this turn of the event loop, as one message for all that comes in it."""
        if not self._send_is_due:
            self._send_is_due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Sends what is to be sent, unless the transport has not taken the earlier messages: then once it has."""
        self._send_is_due = False
        connection = self._connection
        if not (self._unsent or self._cancelled) or connection is None or not connection.can_send:
            return
        request, size = pb.StepsRequest(cancelled=self._cancelled), 0
        self._cancelled = []
        while self._unsent and size < _MESSAGE_BYTES:
            submission = self._unsent.pop(next(iter(self._unsent)))
            request.submissions.append(submission.SerializeToString())
            size += len(request.submissions[-1])
        self._write(request, connection)
        if self._unsent:
            self._send_soon()

    def _write(self, request: pb.StepsRequest, connection: FrameConnection) -> None:
        connection.send(request.SerializeToString())
        self._sent_at = self._loop.time()

    def _take(self, step: pb.Step) -> None:
        """Distributes a message to the calls; raises ValueError if it breaks the protocol."""
        calls = self._calls
        for accepted in step.accepted:
            if (call := calls.get(accepted.number)) is not None:
                call.accept(accepted.fingerprint, accepted.span)
        for begun in step.begun:
            if (call := calls.get(begun.number)) is not None:
                call.begin(begun)
        for logprobs in step.logprobs:
            if (call := calls.get(logprobs.number)) is not None:
                call.add_logprobs(logprobs)
        for number in step.alone:
            if (call := calls.get(number)) is not None:
                call.run_alone()
        seconds = step.seconds or (0.0,) * len(step.numbers)  # A predictor of an earlier release sends none.
        for number, token_id, engine_s in zip(step.numbers, step.token_ids, seconds, strict=True):
            # A number that is not known has been cancelled.
            if (call := calls.get(number)) is not None:
                call.chunk.token_ids.append(token_id)
                call.engine_s = engine_s
                if call.waiter is not None:
                    call.wake_for_tokens()
        for ended in step.ended:
            if (call := calls.pop(ended.number, None)) is not None:
                call.end(ended)
        if step.HasField("loads"):
            self._submitted = 0
            self._load(step.loads)
        if step.leaving:
            if not self._leaves:
                self._leaves = True
                self._changed()
            for call in tuple(calls.values()):
                call.wake()

    def set_unlisted(self, is_unlisted: bool) -> None:
        """Notes whether no name has the address any more."""
        if is_unlisted != self._is_unlisted:
            self._is_unlisted = is_unlisted
            self._changed()
            for call in tuple(self._calls.values()):
                call.wake()

    def _load(self, loads: pb.EngineLoads) -> None:
        before, self.loads = self.loads, {load.model: load for load in loads.models}
        if before.keys() != self.loads.keys() or any(
            before[model].fingerprint != load.fingerprint for model, load in self.loads.items()
        ):
            self._changed()

    def _down(self) -> None:
        self.loads, self._leaves, self._is_up = {}, False, False

    def _end_calls(self, error: PredictorLostError, is_silent: bool) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            # An acceptance waits a moment for the first token: without one, an earlier call may have caused the hang.
            came_later = call.submitted_at > self._heard_at + _MOST_QUIET_S
            is_away = is_silent and came_later and not call.is_accepted
            call.fail(NotReadyError("the predictor does not answer", hop="predictor") if is_away else error)
