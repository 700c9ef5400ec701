"""Train the storyteller: a Llama of two million parameters that tells the stories of `models.story_grammar`.

`python -m models.train_storyteller` makes the tokenizer, trains on the rows of `models.storyteller_rows`, saves the
folder in bfloat16, reads it back in float32, measures it on stories it never saw, and writes the card with what was
measured.
"""

from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from models.cards import StorytellerFigures, storyteller_card
from models.story_grammar import Story, keeps_hero, mentions
from models.story_requests import converse
from models.storyteller_rows import (
    BOS,
    BOS_ID,
    CONTEXT_LENGTH,
    EOS_ID,
    PAD_ID,
    REPEAT_WEIGHT,
    Row,
    RowEncoder,
    batches,
    build_tokenizer,
    collate,
    draw_story,
)
from models.training import (
    CpuBudget,
    Optimizer,
    folder_bytes,
    keep_freed_memory,
    parameter_count,
    parse_options,
    read_back,
    save_in_bfloat16,
)

MATRIX_LEARNING_RATE = 2e-2
EMBEDDING_LEARNING_RATE = 4e-3
WARMUP_STEPS = 100
REPORT_STEPS = 100

EVALUATION_SEED = 1_000_003
LOSS_ROWS = 400
SAMPLES = 128
MAX_NEW_TOKENS = 300


def build_model(vocabulary_size: int) -> LlamaForCausalLM:
    """Return the untrained model."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    return model


def split_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings and norms.

    In one trial, 600 steps of these with `REPEAT_WEIGHT` reached the loss of 3,000 steps of AdamW on equal weights.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.02),
        torch.optim.AdamW(others, lr=EMBEDDING_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(model: LlamaForCausalLM, encoder: RowEncoder, random: Random, minutes: float) -> tuple[int, int]:
    """Train for that CPU time and return the steps taken and the tokens read."""
    model.set_attn_implementation("eager")  # under autocast, and at this size, faster than the fused kernel on a CPU
    optimizer = Optimizer(model, split_optimizers(model), WARMUP_STEPS)
    budget = CpuBudget(minutes)
    tokens = 0
    for inputs, targets, weights in batches(encoder, random):
        if budget.fraction >= 1.0:
            break
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        optimizer.step(loss, budget.fraction)
        tokens += int((inputs != PAD_ID).sum())
        if optimizer.steps % REPORT_STEPS == 0:
            speed = tokens / budget.spent_s
            print(f"step {optimizer.steps}: loss {loss.item():.3f}, {speed:.0f} tokens/s", flush=True)
    return optimizer.steps, tokens


@torch.inference_mode()
def held_out_losses(model: Any, rows: list[Row]) -> tuple[float, float]:
    """Return the loss in nats per predicted token, all alike, and per token of the repeated words alone."""
    losses, weights = [], []
    for row in rows:
        inputs, targets, row_weights = collate([row])
        logits = model(input_ids=inputs, use_cache=False).logits
        losses.append(cross_entropy(logits[0], targets[0], reduction="none"))
        weights.append(row_weights[0])
    loss, weight = torch.cat(losses), torch.cat(weights)
    return loss[weight > 0].mean().item(), loss[weight == REPEAT_WEIGHT].mean().item()


@torch.inference_mode()
def sample(model: Any, tokenizer: FastTokenizer, prompts: list[str]) -> list[tuple[str, bool]]:
    """Sample a continuation of each rendered prompt; return its text and whether it ended by itself."""
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        **batch, do_sample=True, temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=MAX_NEW_TOKENS
    )
    continuations = output[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(continuations, skip_special_tokens=True)
    return [(text, EOS_ID in ids) for text, ids in zip(texts, continuations.tolist(), strict=True)]


def evaluate(folder: Path, seed: int, minutes: float, steps: int, tokens: int) -> StorytellerFigures:
    """Measure the saved model on stories and requests that training left out."""
    model, tokenizer = read_back(AutoModelForCausalLM, folder)
    encoder = RowEncoder(tokenizer)
    random = Random(EVALUATION_SEED + seed)
    torch.manual_seed(EVALUATION_SEED + seed)

    def next_story() -> Story:
        return draw_story(random, held_out=True)

    conversations = [converse(random, next_story) for _ in range(LOSS_ROWS)]
    story_loss, repeat_loss = held_out_losses(model, [encoder.story(next_story()) for _ in range(LOSS_ROWS)])
    conversation_loss, _ = held_out_losses(model, [encoder.conversation(turns) for turns in conversations])

    told = sample(model, tokenizer, [BOS] * SAMPLES)
    requests = [turns[0] for turns in (converse(random, next_story) for _ in range(20 * SAMPLES)) if turns[0].asked]
    requests = requests[:SAMPLES]
    messages = [[{"role": turn.role, "content": turn.content}] for turn in requests]
    prompts = [
        str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        for conversation in messages
    ]
    answers = sample(model, tokenizer, prompts)
    return StorytellerFigures(
        parameters=parameter_count(model),
        weights_bytes=(folder / "model.safetensors").stat().st_size,
        minutes=minutes,
        steps=steps,
        tokens=tokens,
        story_loss=story_loss,
        repeat_loss=repeat_loss,
        conversation_loss=conversation_loss,
        samples=SAMPLES,
        ended=mean([ended for _, ended in told]),
        kept_hero=mean([ended and keeps_hero(text) for text, ended in told]),
        answers_ended=mean([ended for _, ended in answers]),
        answers_on_topic=mean(
            [
                all(mentions(text, word) for word in turn.asked)
                for turn, (text, _) in zip(requests, answers, strict=True)
            ]
        ),
        example_request=requests[0].content,
        example_answer=answers[0][0],
        example_story=told[0][0],
    )


def main() -> None:
    """Train, save, measure and describe."""
    options = parse_options("Train the storyteller.", minutes=14.0, output=Path(__file__).parent / "storyteller")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    random = Random(options.seed)
    tokenizer = build_tokenizer(random)
    model = build_model(len(tokenizer))
    print(f"{parameter_count(model)} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    steps, tokens = train(model, RowEncoder(tokenizer), random, options.minutes)
    save_in_bfloat16(model, tokenizer, options.output)
    figures = evaluate(options.output, options.seed, options.minutes, steps, tokens)
    (options.output / "README.md").write_text(storyteller_card(figures), encoding="utf-8")
    print(figures, f"{folder_bytes(options.output)} bytes in the folder", flush=True)


if __name__ == "__main__":
    main()
