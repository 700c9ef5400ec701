"""A transformer's call to a predictor, headrace_protos/steps.proto, without the transformer."""

import asyncio
import json
from contextlib import asynccontextmanager

from headrace.frames import FrameConnection
from headrace_protos import steps_pb2
from tests.waiting import until

SAMPLING = {"seed": 3, "max_tokens": 12, "ignore_eos": True, "temperature": 0.9}


class StepsCaller:
    """One connection; collects the messages of each sequence."""

    def __init__(self, model="llama"):
        self._model = model
        self.messages = []
        self.tokens, self.ended, self.accepted, self.begun, self.logprobs = {}, {}, {}, {}, {}
        self.seconds = {}
        self.alone = []
        self.leaving = False
        self.connection = None

    async def connect(self, port):
        self.connection = await FrameConnection.open("127.0.0.1", port, self._receive, lambda: None)

    def _receive(self, message):
        self.take(steps_pb2.Step.FromString(message))

    def take(self, step):
        self.messages.append(step)
        for number, token, seconds in zip(step.numbers, step.token_ids, step.seconds, strict=True):
            self.tokens.setdefault(number, []).append(token)
            self.seconds.setdefault(number, []).append(seconds)
        for name in ("accepted", "begun", "ended"):
            for each in getattr(step, name):
                getattr(self, name).setdefault(each.number, each)
        for each in step.logprobs:
            self.logprobs.setdefault(each.number, []).append(each)
        self.alone += step.alone
        self.leaving |= step.leaving

    def submit(self, number=1, prompt=(5, 6, 7), sampling=SAMPLING, **fields):
        message = steps_pb2.Submission(
            number=number,
            model=self._model,
            request_id=f"r{number}",
            prompt_ids=prompt,
            sampling=json.dumps(sampling).encode(),
        )
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        self._send(steps_pb2.StepsRequest(submissions=[message.SerializeToString()]))

    def cancel(self, number):
        self._send(steps_pb2.StepsRequest(cancelled=[number]))

    def _send(self, request):
        self.connection.send(request.SerializeToString())

    def load(self):
        """The model's engine, as last reported by the predictor."""
        return next(message.loads for message in reversed(self.messages) if message.HasField("loads")).models[0]

    async def end_of(self, number=1):
        await until(lambda: number in self.ended)
        return self.ended[number]

    async def error_of(self, number=1):
        return (await self.end_of(number)).error

    async def closed(self):
        """Waits until the predictor has closed the connection."""
        await asyncio.wait([self.connection.ended])


@asynccontextmanager
async def calling(port):
    """A caller at a predictor's port of generations."""
    caller = StepsCaller()
    await caller.connect(port)
    try:
        yield caller
    finally:
        caller.connection.abort()
        await asyncio.wait([caller.connection.ended])
