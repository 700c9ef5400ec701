"""A transformer's call to a predictor, headrace_protos/steps.proto, without the transformer."""

import asyncio
import json

import grpc

from headrace_protos import steps_pb2, steps_pb2_grpc
from tests.waiting import until

SAMPLING = {"seed": 3, "max_tokens": 12, "ignore_eos": True, "temperature": 0.9}


class StepsCaller:
    """One steps call; collects the messages of each sequence."""

    def __init__(self, channel, model="llama"):
        self._model = model
        self._requests = asyncio.Queue()
        self._call = steps_pb2_grpc.PredictorStepsStub(channel).Run(self._sent())
        self.messages = []
        self.tokens, self.ended, self.accepted, self.begun, self.logprobs = {}, {}, {}, {}, {}
        self.seconds = {}
        self.alone = []
        self.leaving = False
        self._reader = None

    async def _sent(self):
        while (request := await self._requests.get()) is not None:
            yield request

    def start(self):
        self._reader = asyncio.create_task(self.read())
        return self

    async def read(self):
        async for step in self._call:
            self.take(step)

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

    async def read_one(self):
        step = await self._call.read()
        self.take(step)
        return step

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
        self._requests.put_nowait(steps_pb2.StepsRequest(submissions=[message]))

    def cancel(self, number):
        self._requests.put_nowait(steps_pb2.StepsRequest(cancelled=[number]))

    def load(self):
        """The model's engine, as last reported by the predictor."""
        return next(message.loads for message in reversed(self.messages) if message.HasField("loads")).models[0]

    async def end_of(self, number=1):
        await until(lambda: number in self.ended)
        return self.ended[number]

    async def error_of(self, number=1):
        return (await self.end_of(number)).error

    async def status(self):
        """The status of the ended call."""
        try:
            await self._reader
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        return grpc.StatusCode.OK, ""

    def half_close(self):
        self._requests.put_nowait(None)

    def leave(self):
        self._call.cancel()
