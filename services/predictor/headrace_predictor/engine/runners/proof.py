"""Proves at load that a runner gives the model's own logits, with every mechanism of its configuration.

The model itself runs, with its own weights, layers and head sizes. Limits within the context that a short test would
not reach (windows, chunks, lengths beyond which positions are scaled otherwise, numbers of positions that an index
selects) are set to a few positions meanwhile. The test crosses them by the chunks of a prompt beside another sequence,
by that one's decoding, and behind a prefix from the cache.
"""

import logging
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig

from headrace.errors import StartupError
from headrace_predictor.engine.cpu.packed_linear import pack_called, read_linears
from headrace_predictor.engine.gpu import Operations
from headrace_predictor.engine.runners.encoder_decoder import EncoderDecoderRunner
from headrace_predictor.engine.runners.hybrid import HybridRunner
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.own_attention import page_own_attention
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.proof_conditions import WINDOWS, few_layers, near_limits, repeat_reaches, widened
from headrace_predictor.engine.runners.reach import attention_functions, find_reaches
from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.engine.runners.row import CachelessRunner, CausalRunner, EncoderDecoderRowRunner, decoder_start
from headrace_predictor.engine.runners.shortened import shorten
from headrace_predictor.engine.runners.states import key_layers, recurrent_states
from headrace_predictor.engine.runners.unread import as_zeros
from headrace_predictor.engine.state.blocks import RESERVED
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape
from headrace_predictor.engine.state.sequence import Row, detached_sequence

logger = logging.getLogger(__name__)

_PIECES = (5, 9, 20, 39, 40)  # Where the chunks of the prompt end.
_SPECIAL = 4  # Ids below are often those of padding, which some models leave out.
_OUTPUT = 12  # Ids of an encoder-decoder model's answer.
_STEPS = 3  # Ids of `generate`.
_CROWD = (5, 9, 14)  # The prompts of sequences that decode together.
_PROMPT = 7  # The prompt of the sequence beside it, which decodes an id in each further step.
# Differences by rounding only, relative to the largest logit; wrong attention differs by tens of percent.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
_RECURRENCE = 10  # Times as much where a state carries rounding on from id to id, in float32 whatever the weights.

_SCALED = "its positions are scaled by the length of a sequence"

Runner = TypeVar("Runner", bound=ModelRunner)

# What models raise for a cache, or for several ids beside one, that they cannot continue from.
_FAILURES = (AssertionError, AttributeError, IndexError, TypeError, ValueError, RuntimeError)


class Proof:
    """Chooses the runner of a model; `packed` is the maximum of tokens that a step packs."""

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        vocabulary: int,
        context: int,
        packed: int = 0,
        quantise: Callable[[Any, Callable[[], None]], object] | None = None,
    ) -> None:
        """`quantise(model, run)`: quantises the linear layers that `run` calls, of a model whose runner is chosen."""
        self.quantise = quantise
        self.rotary = SequenceRotary.of(model, context)
        self.model = model
        self.shape = shape
        self._context = context
        self._far = max(context, packed)
        length = min(_PIECES[-1], context)
        first = min(_SPECIAL, vocabulary - 1)
        self._ids = [first + (7 * i * i + 3 * i) % (vocabulary - first) for i in range(length)]
        self.tells_positions = False  # Of `PagedRunner`.
        self.read_linears: set[Any] = set()  # Linear layers whose weights other modules may read.
        self._hides_masks = False  # Whether layers compute with their masks elsewhere than in the attention function.

    def check_generate(self, name: str) -> None:
        """Checks that the plain forward pass, which runners compute, is what `generate` computes; raises StartupError.

        In some models `generate` shows the prompt to itself in both directions, or reorders it, or its cache forgets
        other positions than a window does.
        """
        model, ids = self.model, self._ids[: max(1, min(_PROMPT, self._context - _STEPS))]
        own = model.generation_config
        steps: Any = {"max_new_tokens": _STEPS, "return_dict_in_generate": True, "output_logits": True}
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, **steps)  # type: ignore[no-untyped-call]

        def difference() -> float:
            answer = model.generate(self._tensor(ids), attention_mask=torch.ones_like(self._tensor(ids)))
            whole = self._run(answer.sequences[0].tolist())
            return _largest(torch.cat(answer.logits), [*whole[len(ids) - 1 : -1]]) / 3

        try:
            # Where positions are scaled by a length, keys of earlier steps keep their factors in `generate`.
            windows = nullcontext() if self.rotary else near_limits(model, None, self._context, WINDOWS)
            with few_layers(model), windows:
                excess = self._excess(difference)
                self.read_linears = read_linears(model, lambda: self._run(ids))
        finally:
            model.generation_config = own
        if excess:
            raise StartupError(
                f"model {name}: the forward pass of {type(model).__name__} is not what transformers' generate computes"
            )

    def of_paged(self, operations: Operations | None = None) -> str | None:
        """Why `PagedRunner` cannot run the model; None if it can: then the attention modules have their reach.

        `operations`: the GPU's kernels, which are proven with it.
        """
        model = self.model
        self.tells_positions = False
        if recurrent_states(model) is not None:
            return "it has recurrent states"
        has_own = page_own_attention(model, self._context)
        # Some classes that do not say so take one.
        takes = getattr(model, "_supports_attention_backend", False) or model._can_set_attn_implementation()
        if not (has_own or takes):
            return "it does not take an attention function"
        own = attention_functions(model)

        def difference() -> float:
            model.set_attn_implementation(own)
            return self._difference(
                lambda: PagedRunner(
                    model,
                    self.shape,
                    6,
                    rotary=self.rotary,
                    tells_positions=self.tells_positions,
                    operations=operations,
                )
            )

        def excess() -> float:
            found = self._excess(difference)
            if found and not has_own:
                self.tells_positions = True
                found = self._excess(difference)
            return found

        kind = "its attention is of another kind" if operations is None else "Triton does not run, or not for it"
        fault = self._fault(excess, kind, None if has_own else self._find_reaches)
        if fault is not None:
            model.set_attn_implementation(own)
        return fault

    def _fault(self, excess: Callable[[], float], kind: str, find: Callable[[int], None] | None = None) -> str | None:
        """Why a runner cannot run the model: because its logits differ, or because of a kind that it does not know.

        None if it can: then `find` has set what the attention modules reach within the context.
        """
        try:
            with few_layers(self.model), near_limits(self.model, self.rotary, self._far) as changed:
                if find is not None:
                    find(len(self._ids) if changed else self._context)
                found = excess()
            if find is not None:
                with few_layers(self.model):  # Else it would read all weights.
                    find(self._context)
                repeat_reaches(self.model)
        except Exception as error:
            logger.debug("a runner failed in the proof", exc_info=True)
            kind = "its layers compute with their masks" if self._hides_masks else kind
            return f"{kind} ({type(error).__name__}: {error})"
        return f"its logits differ by {found:.2g} of their size" if found else None

    def other_runner(self, blocks: int, reason: str) -> tuple[ModelRunner, str | None]:
        """The runner of a decoder that is not paged, and why it computes one row at a time."""
        if recurrent_states(self.model) is None:
            return self.finished(self._row_runner()), reason
        reason = _SCALED
        if self.rotary is None:
            # Not every model takes several ids, or several rows, beside states.
            for together, whole in ((True, False), (True, True), (False, False), (False, True)):
                found = self._fault_of_hybrid(whole, together)
                if found is None:
                    runner = HybridRunner(self.model, self.shape, blocks, whole, together)
                    return self.finished(runner, pack_called), None if together else reason
                reason = found
        return self.finished(self._row_runner()), reason

    def finished(self, runner: Runner, pack: Callable[[Any, Callable[[], None]], None] | None = None) -> Runner:
        """The runner that was chosen; its model's linear layers are quantised or packed, its norms shortened."""
        if self.quantise is not None:
            self.quantise(self.model, runner.probe)
        elif pack is not None:
            pack(self.model, runner.probe)
        if pack is not None:
            shorten(self.model)
        if runner.repeats and self.model.device.type == "cpu":
            runner.record_passes()
        return runner

    def _fault_of_hybrid(self, whole: bool, together: bool) -> str | None:
        """Why `HybridRunner` cannot run the model so; None if it can: then the attention modules have their reach."""
        own = attention_functions(self.model)

        def excess() -> float:
            return self._excess(lambda: self._hybrid_difference(own, whole, together) / _RECURRENCE) * _RECURRENCE

        fault = self._fault(excess, "its recurrent states are of another kind", self._find_layers_reaches)
        if fault is not None:
            self.model.set_attn_implementation(own)
        return fault

    def _hybrid_difference(self, own: dict[str, str], whole: bool, together: bool) -> float:
        """As `_difference`, and that of sequences of different lengths which decode together."""

        def make() -> HybridRunner:
            return HybridRunner(model, self.shape, 6, whole, together)

        model, ids = self.model, self._ids
        model.set_attn_implementation(own)
        expected = self._run(ids)
        worst = self._difference(make)
        runner = make()
        sequences = [detached_sequence(ids[:length]) for length in _CROWD if length + _STEPS <= len(ids)]
        for number, sequence in enumerate(sequences):
            sequence.blocks = [RESERVED + number]
        for step in range(_STEPS + 1):
            decoding = sequences[1:] if step == _STEPS else sequences
            rows = [Row(one, one.computed, len(one.ids) - one.computed) for one in decoding]
            worst = max(worst, _largest(runner.run(rows), [expected[len(one.ids) - 1] for one in decoding]))
            for one in decoding:
                one.computed = len(one.ids)
                one.ids = ids[: one.computed + 1]
        return worst

    def _row_runner(self) -> ModelRunner:
        """The runner for one row at a time."""
        model = self.model
        for whole in (True,) if self._hides_masks else (False, True):
            # Not every model has a cache that transformers can continue from.
            with suppress(*_FAILURES), near_limits(self.model, self.rotary, self._far):
                if not self._excess(partial(self._difference, partial(CausalRunner, model, self.rotary, whole))):
                    return CausalRunner(model, self.rotary, whole)
        if self.rotary is not None and not self.rotary.scaling.recomputes:
            raise StartupError(f"{_SCALED}, and no runner gives the ids of generate")
        return CachelessRunner(model)

    def encoder_decoder_runner(self, blocks: int) -> tuple[ModelRunner, str | None]:
        """The runner of an encoder-decoder model, and why it computes one row at a time."""
        model = self.model

        def difference() -> float:  # Of the width of the moment.
            return self._difference_of_decoder(lambda: EncoderDecoderRunner(model, self.shape, 6))

        reason = self._fault(partial(self._excess, difference), "its attention is of another kind")
        if reason is None:
            runner = self.finished(EncoderDecoderRunner(model, self.shape, blocks), pack_called)
            runner.drop_biases()
            return runner, None
        # Some decoders cannot continue with several ids; one at a time is what `generate` does.
        stepwise = True
        with suppress(*_FAILURES), near_limits(model, self.rotary, self._far):
            stepwise = bool(self._excess(partial(self._difference_of_decoder, partial(EncoderDecoderRowRunner, model))))
        return self.finished(EncoderDecoderRowRunner(model, stepwise)), reason

    def _difference_of_decoder(self, make: Callable[[], ModelRunner]) -> float:
        """As `_difference`, for two prompts whose answers continue by some ids and then one by one."""
        runner, start = make(), decoder_start(self.model)
        # Of unequal lengths that are encoded together.
        prompts = [self._ids[: max(1, len(self._ids) - fewer)] for fewer in (1, _PROMPT)]
        output = self._ids[:_OUTPUT]
        expected = [
            self.model(
                input_ids=self._tensor(prompt), decoder_input_ids=self._tensor([start, *output]), use_cache=False
            ).logits[0]
            for prompt in prompts
        ]
        sequences = [detached_sequence(prompt, (start,)) for prompt in prompts]
        worst, done = 0.0, None
        for number, sequence in enumerate(sequences):
            sequence.blocks = [RESERVED + 2 * number, RESERVED + 2 * number + 1]
        for end in (0, *range(min(5, len(output)), len(output) + 1)):
            rows = []
            for prompt, sequence in zip(prompts, sequences, strict=True):
                sequence.ids = [*prompt, start, *output[:end]]
                first = 0 if done is None else len(prompt) + 1 + done
                rows.append(Row(sequence, first, len(sequence.ids) - first))
            done = end
            worst = max(worst, _largest(runner.run(rows), [logits[end] for logits in expected]))
        return worst

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES.get(self.shape.dtype, 3e-2)

    def _excess(self, difference: Callable[[], float]) -> float:
        """A difference beyond the tolerance, else 0; where rounding may be the cause, wider numbers decide."""
        tolerance = self._tolerance
        found = difference()
        if found > tolerance and self.shape.dtype is not torch.float64:
            wide = torch.float64 if self.shape.dtype is torch.float32 else torch.float32
            with suppress(*_FAILURES), self._in(wide):
                return found if difference() > tolerance / 10 else 0.0
        return found if found > tolerance else 0.0

    @contextmanager
    def _in(self, dtype: torch.dtype) -> Iterator[None]:
        shape, self.shape = self.shape, replace(self.shape, dtype=dtype)
        try:
            with widened(self.model, shape.dtype, dtype):
                yield
        finally:
            self.shape = shape

    def _find_reaches(self, context: int) -> None:
        self._hides_masks = True
        with as_zeros(self.model):
            find_reaches(self.model, context)
        self._hides_masks = False

    def _find_layers_reaches(self, context: int) -> None:
        """Where recurrent states have no layers with attention beside them, nothing."""
        if key_layers(self.model.config):
            with as_zeros(self.model):
                find_reaches(self.model, context)

    def _expected(self, steps: int) -> tuple[Tensor, list[Tensor]]:
        """The logits of each position of the whole prompt, and of the short one's last position as it grows."""
        whole = self._run(self._ids)
        lengths = range(min(_PROMPT, len(self._ids)), min(_PROMPT + steps, len(self._ids) + 1))
        if self.rotary is None and not self._hides_masks:
            return whole, [whole[length - 1] for length in lengths]
        if self.rotary is not None and self.rotary.scaling.recomputes:
            return whole, [self._run(self._ids[:length])[-1] for length in lengths]
        # As in `generate`: earlier keys keep their factors, and an index selects for one id after the other.
        cache, done, grown = None, 0, []
        for length in lengths:
            output = self.model(
                input_ids=self._tensor(self._ids[done:length]),
                position_ids=self._tensor(list(range(done, length))),
                past_key_values=cache,
                use_cache=True,
            )
            cache, done = output.past_key_values, length
            grown.append(output.logits[0, -1])
        return whole, grown

    def _run(self, ids: list[int]) -> Tensor:
        logits: Tensor = self.model(input_ids=self._tensor(ids), use_cache=False).logits[0]
        return logits

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _difference(self, make: Callable[[], Any]) -> float:
        """The largest difference from the expected logits, relative to the largest of each position."""
        ids = self._ids
        pieces = sorted({min(end, len(ids)) for end in _PIECES})
        whole, grown = self._expected(len(pieces))
        runner = make()
        chunked, decoded = detached_sequence(ids), detached_sequence(ids[:_PROMPT])
        chunked.blocks, decoded.blocks = [RESERVED, RESERVED + 1], [RESERVED + 2, RESERVED + 3]
        worst, start, done, stage = 0.0, 0, 0, 0

        for step, end in enumerate(pieces):
            chunked.ids = ids if runner.reads_whole_prompts else ids[:end]
            row = Row(chunked, start, end - start)
            rows, expected = [row], [whole[end - 1]] if row.samples else []
            if step < len(grown):
                length = _PROMPT + step
                decoded.ids = ids[:length]
                if runner.scaling is not None and runner.scaling.base(_PROMPT, length) != stage:
                    stage, done = runner.scaling.base(_PROMPT, length), 0
                rows.append(Row(decoded, done, length - done))
                expected.append(grown[step])
                done = length
            worst = max(worst, _largest(runner.run(rows), expected))
            start = end
        if runner.reuses_prefixes and len(ids) > BLOCK_TOKENS:
            follower = detached_sequence(ids)
            follower.blocks = [chunked.blocks[0], RESERVED + 4]
            row = Row(follower, BLOCK_TOKENS, len(ids) - BLOCK_TOKENS)
            worst = max(worst, _largest(runner.run([row]), [whole[-1]]))
        return worst


def _largest(logits: Tensor, expected: Rows[Tensor]) -> float:
    """The largest difference of rows of logits, relative to the largest of each; infinite for what is no number."""
    pairs = zip(logits.float(), (wanted.float() for wanted in expected), strict=True)
    differences = [float((got - wanted).abs().max() / wanted.abs().max()) for got, wanted in pairs]
    return max((one if one == one else math.inf for one in differences), default=0.0)
