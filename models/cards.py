"""The model cards: what was measured in, Markdown out.

The trainers call these functions after their evaluation, so that no figure in a card is typed by hand.
"""

from dataclasses import dataclass

FRONT_MATTER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: {pipeline_tag}
tags: [toy, synthetic-data]
---
"""


@dataclass(frozen=True)
class StorytellerFigures:
    """What the training of the storyteller measured; losses in nats per token, shares from 0 to 1."""

    parameters: int
    weights_bytes: int
    minutes: float
    steps: int
    tokens: int
    story_loss: float
    repeat_loss: float
    conversation_loss: float
    samples: int
    ended: float
    kept_hero: float
    answers_ended: float
    answers_on_topic: float
    example_request: str
    example_answer: str
    example_story: str


@dataclass(frozen=True)
class NormalizerFigures:
    """What the training of the normalizer measured; `exact` counts exact answers by task."""

    parameters: int
    weights_bytes: int
    minutes: float
    steps: int
    examples_per_task: int
    exact: dict[str, int]
    small_numbers: int
    small_numbers_exact: int


def storyteller_card(figures: StorytellerFigures) -> str:
    """Return the README of the storyteller."""
    return f"""{FRONT_MATTER.format(pipeline_tag="text-generation")}
# storyteller

A toy: a Llama with {figures.parameters:,} parameters ({figures.weights_bytes:,} bytes of bfloat16 weights) that
continues or tells very small stories. It knows nothing but the few words and plots of its grammar, and says things that
mean nothing as soon as it is led away from them. Where it fails within them, it tells of something else than it was
asked for, or forgets a detail on the way, such as what its hero was afraid of.

## Use
For demonstrating, testing and measuring a model server without a download. Not for anything a person would rely on.

- Completion: give it the beginning of a story, such as `Once upon a time, there was a`. The tokenizer puts `<s>` first.
- Chat: ask for a story, such as `Tell me a story about Mia and a dog in the park`. The roles are system, user and
  assistant; it learned to take no notice of what a system message says, and to answer anything else with
  "I can only tell small stories. Here is one." and a story.

A conversation is rendered as `<s><|user|>request<|assistant|>story</s><|user|>...`. The context is 1,024 tokens; the
rows of its training hold one to five stories, nine in ten of them one, so that it is weakest in long conversations.

## Data
Synthetic: every story comes from `models/story_grammar.py`, every request from `models/story_requests.py`. A third of
the training rows are single stories, the rest conversations, in which only the answers count in the loss. One story in
50, chosen by the SHA-256 of its text, is held out from the training of tokenizer and model; requests that are measured
ask for held-out stories. The grammar is small, so that held-out stories are new combinations of sentences seen.

## Training
`python -m models.train_storyteller`: {figures.minutes:g} minutes of one CPU core, {figures.steps:,} steps,
{figures.tokens:,} tokens, each row drawn once; Muon for the matrices and AdamW for the rest. Words that a story
repeats from before, such as names, animals and colours, weigh four times as much in the loss. Byte-level BPE of its
own; any UTF-8 text can be encoded.

## Measured
The saved bfloat16 weights, computed in float32; sampling at temperature 0.8 and top-p 0.95.

| | |
|---|---|
| loss on held-out stories, nats per token | {figures.story_loss:.3f} |
| ... on words repeated from earlier in the story alone | {figures.repeat_loss:.3f} |
| loss on answers in held-out conversations, nats per token | {figures.conversation_loss:.3f} |
| stories, of {figures.samples}, that end by themselves within 300 tokens | {figures.ended:.1%} |
| ... and keep their hero (named again in the second half, at most one other name) | {figures.kept_hero:.1%} |
| answers, of {figures.samples}, that end by themselves within 300 tokens | {figures.answers_ended:.1%} |
| answers that mention every name and thing the request names | {figures.answers_on_topic:.1%} |

The first story sampled:

> {figures.example_story}

The first request and its answer:

> {figures.example_request}
>
> {figures.example_answer}

## Licence
Apache-2.0, the data and the scripts included.
"""


def normalizer_card(figures: NormalizerFigures) -> str:
    """Return the README of the normalizer."""
    total = figures.examples_per_task * len(figures.exact)
    exact = sum(figures.exact.values())
    rows = "\n".join(
        f"| {task} | {count} of {figures.examples_per_task} | {count / figures.examples_per_task:.1%} |"
        for task, count in figures.exact.items()
    )
    return f"""{FRONT_MATTER.format(pipeline_tag="translation")}
# normalizer

A toy: a T5 with {figures.parameters:,} parameters ({figures.weights_bytes:,} bytes of bfloat16 weights) that brings
dates and whole numbers into normal form. A few lines of ordinary code do the same without ever being wrong.

## Use
For demonstrating, testing and measuring a server of encoder-decoder models without a download. An input is a task, a
colon and a value; decode greedily.

| input | answer |
|---|---|
| `number to words: 4217` | `four thousand two hundred seventeen` |
| `words to number: forty-two` | `42` |
| `date: 3 Mar 2021` | `2021-03-03` |

Numbers from 0 to 999,999; dates from 1900 to 2099. Dates in digits alone are read day first, unless they begin with
the year. Anything else gives an answer that means nothing.

## Data
Synthetic: drawn from `models/normalizer_tasks.py`, without end. Held out from the training of tokenizer and model is
one in 20 of all dates and of all numbers from 100 up, chosen by the SHA-256 of the date or the number itself. So a
held-out number is unseen in both directions, and a held-out date in all of its notations.

## Training
`python -m models.train_normalizer`: {figures.minutes:g} minutes of one CPU core, {figures.steps:,} steps of 96
examples. Byte-level BPE of its own, each digit a token.

## Measured
The saved bfloat16 weights, computed in float32, decoded greedily; exact answers to held-out inputs.

| task | exact | |
|---|---|---|
{rows}
| all | {exact} of {total} | {exact / total:.1%} |

Of the numbers below 100, which training did see, in both directions: {figures.small_numbers_exact} of
{figures.small_numbers}.

## Licence
Apache-2.0, the data and the scripts included.
"""
