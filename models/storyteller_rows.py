"""What the storyteller reads: its tokenizer, its chat template and the rows it is trained on.

A row is either one whole story, `<s> story </s>`, or one whole conversation as `CHAT_TEMPLATE` renders it, where only
the answers count in the loss. A row never holds two unrelated texts: packed windows teach a model this small to mix up
the people of its stories.

Most tokens of a story follow from the sentence they stand in. The few that follow only from an earlier sentence, such
as the animal that is found after it ran away, count `REPEAT_WEIGHT` times as much in the loss: without that, a model
this small takes several times as many steps before it begins to look back for them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast as FastTokenizer

from models.story_grammar import Story, tell
from models.story_requests import Turn, converse
from models.story_words import CARRIED_WORDS
from models.training import is_held_out

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY_SIZE = 1536
TOKENIZER_TEXTS = 12_000
CONTEXT_LENGTH = 1024
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The roles are system, user and assistant, not ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.content is string -%}
{{- message.content | trim -}}
{%- elif message.content -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text | trim -}}{%- endfor -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

HELD_OUT_ONE_IN = 50
CONVERSATION_SHARE = 0.65
BATCH_TOKENS = 2200
POOL_ROWS = 256
REPEAT_WEIGHT = 4.0


@dataclass
class Row:
    """Token ids of one row, and what each weighs in the loss as a prediction; nothing, if it is not to be predicted."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weights: list[float]) -> None:
        """Append ids and their weights."""
        self.ids += ids
        self.weights += weights


def draw_story(random: Random, held_out: bool) -> Story:
    """Draw a story of the training part or of the held-out part."""
    while True:
        story = tell(random)
        if is_held_out(story.text, HELD_OUT_ONE_IN) == held_out:
            return story


def build_tokenizer(random: Random) -> FastTokenizer:
    """Learn a byte-level BPE from training stories and conversations; every byte is in its vocabulary."""

    def texts() -> Iterator[str]:
        for _ in range(TOKENIZER_TEXTS):
            yield draw_story(random, held_out=False).text
            yield from (turn.content for turn in converse(random, lambda: draw_story(random, held_out=False)))

    specials = [PAD, BOS, EOS, *ROLE_TOKENS.values()]
    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return FastTokenizer(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


class RowEncoder:
    """Turns stories and conversations into rows."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._role_ids = {role: self._backend.encode(token).ids[-1] for role, token in ROLE_TOKENS.items()}

    def _add_text(self, row: Row, text: str, said: set[str], predicted: bool) -> None:
        encoding = self._backend.encode(text, add_special_tokens=False)
        weights = [float(predicted)] * len(encoding.ids)
        if predicted:
            repeats = find_repeats(text, said)
            for index, (start, end) in enumerate(encoding.offsets):
                if any(start < stop and begin < end for begin, stop in repeats):
                    weights[index] = REPEAT_WEIGHT
        said.update(re.findall(r"\w+", text))
        row.add(list(encoding.ids), weights)

    def story(self, story: Story) -> Row:
        """Encode a story alone; all of it is predicted."""
        row = Row([BOS_ID], [0.0])
        self._add_text(row, story.text, set(), predicted=True)
        row.add([EOS_ID], [1.0])
        return row

    def conversation(self, turns: list[Turn]) -> Row:
        """Encode a conversation as the chat template renders it; the answers are predicted."""
        row = Row([BOS_ID], [0.0])
        said: set[str] = set()
        for turn in turns:
            if turn.role == "user":
                said = set()
            row.add([self._role_ids[turn.role]], [0.0])
            answer = turn.role == "assistant"
            self._add_text(row, turn.content, said, predicted=answer)
            if answer:
                row.add([EOS_ID], [1.0])
        return row


def find_repeats(text: str, said: set[str]) -> list[tuple[int, int]]:
    """Return where the text says a carried word which it, or what was said before it, has said already."""
    said = set(said)
    repeats = []
    for match in re.finditer(r"\w+", text):
        word = match.group()
        if word in said and word in CARRIED_WORDS:
            repeats.append(match.span())
        said.add(word)
    return repeats


def collate(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, the targets one token on and their weights, padded on the right to the longest row."""
    length = max(len(row.ids) for row in rows) - 1
    inputs = torch.full((len(rows), length), PAD_ID)
    targets = torch.full((len(rows), length), PAD_ID)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        used = len(row.ids) - 1
        ids = torch.tensor(row.ids)
        inputs[index, :used] = ids[:-1]
        targets[index, :used] = ids[1:]
        weights[index, :used] = torch.tensor(row.weights[1:])
    return inputs, targets, weights


def split_by_tokens(rows: list[Row]) -> Iterator[list[Row]]:
    """Cut rows sorted by length into batches of at most BATCH_TOKENS tokens, padding counted."""
    batch: list[Row] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def batches(encoder: RowEncoder, random: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield training batches without end; rows of like length meet in a batch, so that little of it is padding."""
    while True:
        pool = []
        for _ in range(POOL_ROWS):
            if random.random() < CONVERSATION_SHARE:
                pool.append(encoder.conversation(converse(random, lambda: draw_story(random, held_out=False))))
            else:
                pool.append(encoder.story(draw_story(random, held_out=False)))
        groups = list(split_by_tokens(sorted(pool, key=lambda row: len(row.ids))))
        random.shuffle(groups)
        yield from map(collate, groups)
