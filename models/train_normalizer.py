"""Train the normalizer: a T5 of one and a half million parameters for the tasks of `models.normalizer_tasks`.

`python -m models.train_normalizer` makes the tokenizer, trains, saves the folder in bfloat16, reads it back in float32,
measures exact answers of greedy decoding on examples held out by `is_held_out`, and writes the card with what was
measured. Digits are tokens of their own: a number is then a sequence of the same ten tokens in every context.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers import PreTrainedTokenizerFast as FastTokenizer

from models.cards import NormalizerFigures, normalizer_card
from models.normalizer_tasks import (
    ALWAYS_TRAINED_BELOW,
    TASKS,
    Example,
    draw_example,
    number_to_words,
    words_to_number,
)
from models.training import (
    CpuBudget,
    Optimizer,
    folder_bytes,
    is_held_out,
    keep_freed_memory,
    parameter_count,
    parse_options,
    read_back,
    save_in_bfloat16,
)

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
VOCABULARY_SIZE = 512
MAX_INPUT_TOKENS = 256

HELD_OUT_ONE_IN = 20
BATCH_EXAMPLES = 96
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 200
REPORT_STEPS = 200
IGNORED = -100

EVALUATION_SEED = 1_000_003
EXAMPLES_PER_TASK = 600
MAX_NEW_TOKENS = 64


def draw(random: Random, task: str, held_out: bool) -> Example:
    """Draw an example of the training part or of the held-out part."""
    while True:
        example = draw_example(random, task)
        if (example.key is not None and is_held_out(example.key, HELD_OUT_ONE_IN)) == held_out:
            return example


def build_tokenizer(random: Random) -> FastTokenizer:
    """Learn a byte-level BPE from training examples; every byte is in its vocabulary, a digit joins nothing."""

    def texts() -> Iterator[str]:
        for _ in range(20_000):
            example = draw(random, random.choice(TASKS), held_out=False)
            yield example.source
            yield example.target

    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    backend.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)])
    return FastTokenizer(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=MAX_INPUT_TOKENS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(vocabulary_size: int) -> T5ForConditionalGeneration:
    """Return the untrained model."""
    config = T5Config(
        vocab_size=vocabulary_size,
        d_model=128,
        d_kv=32,
        d_ff=384,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=PAD_ID,  # type: ignore[call-arg]
    )
    model = T5ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        pad_token_id=PAD_ID, eos_token_id=EOS_ID, decoder_start_token_id=PAD_ID
    )
    return model


def pad(rows: list[list[int]], filler: int) -> torch.Tensor:
    """Stack rows of ids, filled on the right to the longest."""
    length = max(map(len, rows))
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


def batches(tokenizer: FastTokenizer, random: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield training batches of inputs and labels without end."""
    backend = tokenizer.backend_tokenizer
    while True:
        examples = [draw(random, random.choice(TASKS), held_out=False) for _ in range(BATCH_EXAMPLES)]
        inputs = [list(backend.encode(example.source).ids) for example in examples]
        labels = [list(backend.encode(example.target).ids) for example in examples]
        yield pad(inputs, PAD_ID), pad(labels, IGNORED)


def train(model: T5ForConditionalGeneration, tokenizer: FastTokenizer, random: Random, minutes: float) -> int:
    """Train for that CPU time and return the steps taken."""
    adam = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    optimizer = Optimizer(model, [adam], WARMUP_STEPS)
    budget = CpuBudget(minutes)
    for inputs, labels in batches(tokenizer, random):
        if budget.fraction >= 1.0:
            break
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, attention_mask=(inputs != PAD_ID).long(), labels=labels).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.step(loss, budget.fraction)
        if optimizer.steps % REPORT_STEPS == 0:
            print(f"step {optimizer.steps}: loss {loss.item():.4f}, {budget.spent_s:.0f} CPU seconds", flush=True)
    return optimizer.steps


@torch.inference_mode()
def answer(model: Any, tokenizer: FastTokenizer, sources: list[str]) -> list[str]:
    """Decode the answer to each input greedily."""
    answers: list[str] = []
    for start in range(0, len(sources), BATCH_EXAMPLES):
        batch = tokenizer(sources[start : start + BATCH_EXAMPLES], padding=True, return_tensors="pt")
        output = model.generate(**batch, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers += tokenizer.batch_decode(output, skip_special_tokens=True)
    return answers


def exact_answers(model: Any, tokenizer: FastTokenizer, examples: list[Example]) -> int:
    """Count the examples answered exactly, and print the others."""
    answers = answer(model, tokenizer, [example.source for example in examples])
    wrong = [(example, given) for example, given in zip(examples, answers, strict=True) if given != example.target]
    for example, given in wrong:
        print(f"wrong: {example.source!r} gave {given!r}, not {example.target!r}", flush=True)
    return len(examples) - len(wrong)


def draw_distinct(random: Random, task: str, count: int) -> list[Example]:
    """Draw that many held-out examples with different inputs."""
    examples: dict[str, Example] = {}
    while len(examples) < count:
        example = draw(random, task, held_out=True)
        examples[example.source] = example
    return list(examples.values())


def evaluate(folder: Path, seed: int, minutes: float, steps: int) -> NormalizerFigures:
    """Measure the saved model on held-out examples, and on all small numbers, which training did see."""
    model, tokenizer = read_back(AutoModelForSeq2SeqLM, folder)
    random = Random(EVALUATION_SEED + seed)
    exact = {task: exact_answers(model, tokenizer, draw_distinct(random, task, EXAMPLES_PER_TASK)) for task in TASKS}
    small = [
        make(random, number) for number in range(ALWAYS_TRAINED_BELOW) for make in (number_to_words, words_to_number)
    ]
    return NormalizerFigures(
        parameters=parameter_count(model),
        weights_bytes=(folder / "model.safetensors").stat().st_size,
        minutes=minutes,
        steps=steps,
        examples_per_task=EXAMPLES_PER_TASK,
        exact=exact,
        small_numbers=len(small),
        small_numbers_exact=exact_answers(model, tokenizer, small),
    )


def main() -> None:
    """Train, save, measure and describe."""
    options = parse_options("Train the normalizer.", minutes=8.0, output=Path(__file__).parent / "normalizer")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    random = Random(options.seed)
    tokenizer = build_tokenizer(random)
    model = build_model(len(tokenizer))
    print(f"{parameter_count(model)} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    steps = train(model, tokenizer, random, options.minutes)
    save_in_bfloat16(model, tokenizer, options.output)
    figures = evaluate(options.output, options.seed, options.minutes, steps)
    (options.output / "README.md").write_text(normalizer_card(figures), encoding="utf-8")
    print(figures, f"{folder_bytes(options.output)} bytes in the folder", flush=True)


if __name__ == "__main__":
    main()
