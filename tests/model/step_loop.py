"""The engine's loop around a runner without its threads, and ragged requests for it."""

import random

import torch

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.cache import BLOCK_TOKENS
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from tests.support.requests import submission
from tests.zoo import VOCABULARY

END_ID = 2  # `greedy` generates a fixed length, so never this id.


def make_requests(count, seed):
    """Prompts and output lengths, both ragged."""
    chosen = random.Random(seed)
    lengths = [(chosen.choice([1, 5, 20, 26, 31, 32, 33, 56, 65, 75]), chosen.randint(1, 24)) for _ in range(count)]
    return [([chosen.randrange(3, VOCABULARY) for _ in range(prompt)], output) for prompt, output in lengths]


class Loop:
    """The engine's loop without threads: schedules, runs, takes the likeliest token; replays rows after an error."""

    def __init__(self, model, make, blocks=200, max_running=12, step_tokens=64):
        """`make` a runner from the shape and the number of blocks."""
        with torch.inference_mode():
            self.runner = make(cache_shape(model), blocks)
        manager = BlockManager(blocks, BLOCK_TOKENS)
        reuses, states = self.runner.reuses_prefixes, self.runner.prefix_states
        self.scheduler = Scheduler(manager, max_running, 1000, step_tokens, reuses, states=states)
        self.failed = []

    def add(self, prompt, length, output_ids=()):
        sampling = SamplingParameters(max_tokens=length, min_tokens=length, temperature=0)
        request = submission("x", prompt, sampling, list(output_ids))
        sequence = Sequence(request, MergingSlot(sampling), frozenset(), self.runner.start_ids)
        self.scheduler.add(sequence, 1)
        return sequence

    def run_all(self):
        while self.scheduler.sequences:
            self.step()

    def run_staggered(self, requests):
        """Answers requests that come while earlier ones run."""
        sequences = []
        for i, request in enumerate(requests):
            sequences.append(self.add(*request))
            if i % 3:
                self.step()
        self.run_all()
        return [sequence.output_ids for sequence in sequences]

    @torch.inference_mode()
    def run_shuffled(self, requests, repeated):
        """Answers requests by steps of which a `repeated` share is computed twice, and only some rows count."""
        chosen = random.Random(2)
        sequences = [self.add(*request) for request in requests]
        while self.scheduler.sequences:
            rows = self.scheduler.schedule(64)
            chosen.shuffle(rows)
            if chosen.random() < repeated:
                self.runner.run(rows)
                self.runner.probe()
            self.run(rows[: chosen.randint(1, len(rows))])
        return [sequence.output_ids for sequence in sequences]

    def step(self):
        rows = self.scheduler.schedule(self.scheduler.step_tokens)
        try:
            self.run(rows)
        except (IndexError, RuntimeError):
            for row in rows:
                try:
                    self.run([row])
                except IndexError:
                    self.fail(row.sequence)

    @torch.inference_mode()
    def run(self, rows):
        logits = self.runner.run(rows)
        sampling = [row for row in rows if row.samples]
        assert len(logits) == len(sampling)
        if sampling:
            assert logits.shape[1] == VOCABULARY
            logits[:, END_ID] = -torch.inf
        for row in rows:
            self.scheduler.complete(row)
        for row, scores in zip(sampling, logits, strict=True):
            if scores.isnan().any():
                self.fail(row.sequence)
            elif row.sequence.append(int(scores.argmax())):
                self.scheduler.remove(row.sequence)

    @torch.inference_mode()
    def fail(self, sequence):
        self.failed.append(sequence)
        self.runner.clear(self.scheduler.remove(sequence, forget=True))
