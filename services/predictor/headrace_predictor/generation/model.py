"""A generation model as the servicer sees it: passes OIP requests to the engine and its chunks back as responses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from opentelemetry import trace
from opentelemetry.metrics import Meter

from headrace.errors import DrainingError, HeadraceError, StartupError
from headrace.models.generation_config import IGNORED_FIELDS, describe
from headrace.oip.model_description import FINGERPRINT, INPUT_IDS, OUTPUT_IDS, ModelDescription, TensorSpec
from headrace.oip.prompt_scores import PROMPT_LOGPROBS, PROMPT_TOP_LOGPROB_IDS, PROMPT_TOP_LOGPROBS
from headrace.oip.stream_infer import FINAL
from headrace.sampling import LENGTHS
from headrace.telemetry.identity import MODEL
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.generation.loaded_model import Engine, LoadedModel
from headrace_predictor.generation.requests import (
    LOGPROBS,
    TOP_LOGPROB_IDS,
    TOP_LOGPROBS,
    merged,
    read_request,
    write_response,
)
from headrace_predictor.models.served_model import ANY_CALLER, Caller, Responses, ServedModel
from headrace_predictor.telemetry import ObservedGeneration, queue_durations
from headrace_protos import inference_pb2 as pb
from headrace_protos.steps_pb2 import Submission

_PROMPT_OUTPUTS = (
    TensorSpec(PROMPT_LOGPROBS, "FP32", [-1]),
    TensorSpec(PROMPT_TOP_LOGPROB_IDS, "INT32", [-1, -1]),
    TensorSpec(PROMPT_TOP_LOGPROBS, "FP32", [-1, -1]),
)


class GenerationModel(ServedModel):
    """It dies when its engine dies.

    `resumable`: for each sequence that can resume elsewhere, what ends it here with an error, after the tokens that it
    already has. `close` is for an adapter: it takes it out of the engine of its base, which stays.
    """

    def __init__(
        self, loaded: LoadedModel[Engine], meter: Meter | None = None, close: Callable[[], None] | None = None
    ) -> None:
        self.name = loaded.name
        self.description = _describe(loaded)
        self.observe = partial(ObservedGeneration, queue_durations(meter), {MODEL: loaded.name})
        self.resumable: set[Callable[[HeadraceError], None]] = set()
        self.loaded = loaded
        self.engine = loaded.engine
        self.statistics = loaded.engine.statistics
        self._close = close or loaded.engine.close

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        with self._generation(request, caller) as (slot, observed):
            chunks = [observed.take(await slot.read())]
            while chunks[-1].finish_reason is None:
                chunks.append(observed.take(await slot.read()))
        return write_response(request, merged(chunks), caller.client)

    async def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        with self._generation(request, caller) as (slot, observed):
            ended = False
            while not ended:
                chunk = observed.take(await slot.read())
                ended = chunk.finish_reason is not None
                response = write_response(request, chunk, caller.client)
                response.parameters[FINAL].bool_param = ended
                yield response

    def hand_back(self) -> None:
        for hand_back in tuple(self.resumable):
            hand_back(DrainingError(f"model {self.name!r} is handed back"))

    async def warm_up(self) -> None:
        """Draws two tokens with the engine: a model that is ready has generated before."""
        changes = {"max_tokens": 2, "ignore_eos": True, "temperature": 1.0}
        sampling = self.loaded.defaults.changed(changes).resolved(2)
        submission = Submission(
            request_id="warm-up",
            prompt_ids=[0],
            sampling=sampling.model_dump_json().encode(),
            adapter=self.loaded.adapter,
        )
        slot = self.engine.submit(submission)
        try:
            while (await slot.read()).finish_reason is None:
                pass
        except HeadraceError as error:
            raise StartupError(
                f"model {self.name}: {self.loaded.architecture} is not served: {error.message}"
            ) from None

    async def died(self) -> None:
        await self.engine.died()

    def close(self) -> None:
        self._close()

    @contextmanager
    def _generation(
        self, request: pb.ModelInferRequest, caller: Caller
    ) -> Iterator[tuple[MergingSlot, ObservedGeneration]]:
        """Submits a request; yields its output slot and its telemetry. Leaving the block cancels the request."""
        slot = self.engine.submit(read_request(self.loaded, request, caller))
        observed = self.observe(slot.timeline, trace.get_current_span())
        try:
            yield slot, observed
        finally:
            slot.cancel()
            observed.end()


def _describe(loaded: LoadedModel[Engine]) -> ModelDescription:
    limits, facts = loaded.engine.limits, loaded.engine.description
    if loaded.generation is not None:
        facts = {name: fact for name, fact in facts.items() if name not in (*LENGTHS, IGNORED_FIELDS)}
        facts |= describe(loaded.name, loaded.generation)
    return ModelDescription(
        platform="pytorch_transformers",
        inputs=[TensorSpec(INPUT_IDS, "INT64", [-1]), TensorSpec(OUTPUT_IDS, "INT64", [-1], optional=True)],
        outputs=[
            TensorSpec(OUTPUT_IDS, "INT32", [-1]),
            TensorSpec(LOGPROBS, "FP32", [-1]),
            TensorSpec(TOP_LOGPROB_IDS, "INT32", [-1, -1]),
            TensorSpec(TOP_LOGPROBS, "FP32", [-1, -1]),
            *(_PROMPT_OUTPUTS if limits.scores_prompts else ()),
        ],
        decoupled=True,
        parameters={
            "architecture": loaded.architecture,
            "device": loaded.device,
            "dtype": loaded.dtype,
            "context_length": str(limits.context_length),
            "vocabulary_size": str(limits.vocabulary_size),
            "is_encoder_decoder": str(limits.is_encoder_decoder).lower(),
            **facts,
            **({FINGERPRINT: loaded.fingerprint} if loaded.fingerprint else {}),
        },
    )
