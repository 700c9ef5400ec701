"""Conversations that ask for a story, each answered by a story which has in it what was asked for.

`converse(random, next_story)` returns the turns of one conversation: sometimes a system message, then one to five
requests with their answers. A request names some of what the story is about, or the theme of its plot, or
nothing. A message that asks for something else is answered by saying that only stories can be told, and by one.
Pure like the grammar: all chance comes from the generator handed in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.story_grammar import Story

ASKS = (
    "Tell me a story {about}.",
    "Tell me a story {about}",
    "tell me a story {about}",
    "Tell me a short story {about}.",
    "Please tell me a story {about}.",
    "Tell me a little story {about}, please.",
    "Can you tell me a story {about}?",
    "Could you tell me a story {about}?",
    "Write a story {about}.",
    "Write a short story {about}.",
    "A story {about}",
    "write a story {about}",
    "Please write a short story {about}.",
    "I want to hear a story {about}.",
    "Story {about}",
    "Tell me a bedtime story {about}.",
    "Make up a story {about}.",
    "I would like a story {about}, please.",
    "Write me a small story {about}!",
    "Do you know a story {about}?",
    "Once more, a story {about}, please!",
    "Now one {about}.",
    "And one {about}",
    "Another one {about}, please.",
    "Another story {about}",
    "One more {about}",
    "Thank you! Now a story {about}.",
)
THEMES = {
    "lost_toy": ("a lost toy", "losing something", "finding a lost {thing}"),
    "animal_in_need": ("helping an animal", "being kind to animals", "kindness"),
    "sharing": ("sharing", "sharing food with a friend", "a friend who is hungry"),
    "broken_toy": ("saying sorry", "a broken toy", "forgiving a friend"),
    "bravery": ("being brave", "courage", "a brave {child}", "fear"),
    "patience": ("patience", "a seed", "a garden plant", "growing a flower"),
    "race": ("a race", "two animals", "a contest", "two animals and a race"),
    "new_friend": ("a new friend", "making friends", "friendship", "a shy {child}"),
    "lost_way": ("getting lost", "finding the way home", "a {child} who is lost"),
    "surprise": ("a birthday", "a surprise", "a birthday present"),
}
SYSTEM_MESSAGES = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell stories to children.",
    "Be brief.",
    "You are a friendly assistant. Answer in simple English.",
    "You write short stories.",
    "Be kind and polite.",
    "You are a careful and honest assistant.",
    "Answer the user.",
    "Use simple words.",
    "Always be helpful.",
)
OTHER_MESSAGES = (
    "Hello!",
    "Hi",
    "Hello, who are you?",
    "How are you?",
    "What can you do?",
    "Thank you!",
    "Good morning.",
    "Why?",
    "What is the capital of {thing}?",
    "What is {number} + {number}?",
    "How much is {number} times {number}?",
    "Write a poem about {thing}.",
    "Explain {thing}.",
    "What is {thing}?",
    "How does {thing} work?",
    "Who was {thing}?",
    "Translate {thing} into French.",
    "Write a function that sorts {thing}.",
    "Tell me a joke.",
    "Sing a song.",
    "Give me a list of {number} things about {thing}.",
    "What time is it?",
    "Say this is a test",
    "Say hello.",
    "Test",
)
OTHER_THINGS = (
    "France",
    "Germany",
    "a computer",
    "the moon",
    "gravity",
    "the internet",
    "history",
    "a neural network",
    "Paris",
    "Einstein",
    "music",
    "a volcano",
    "the weather in London",
    "quantum physics",
    "numbers",
    "a list",
    "football",
    "machine learning",
    "love",
    "the economy",
    "water",
    "a car engine",
    "Rome",
    "Japan",
    "the president",
)
ONLY_STORIES = "I can only tell small stories. Here is one."

SYSTEM_SHARE = 0.15
OTHER_SHARE = 0.1
NO_SUBJECT_SHARE = 0.08
THEME_SHARE = 0.15
LOWER_CASE_SHARE = 0.05
TURN_COUNTS = (1,) * 88 + (2,) * 7 + (3,) * 3 + (5,) * 2


@dataclass(frozen=True)
class Turn:
    """One message; `story` is the one an assistant's message tells, `asked` the words a user's message names."""

    role: str
    content: str
    story: Story | None = None
    asked: tuple[str, ...] = ()


def describe(random: Random, story: Story) -> tuple[str, tuple[str, ...]]:
    """Return a phrase that names a part of the story's content, and the words that the story must have for it."""
    subject_count = min(random.choice((0, 1, 1, 1, 1)), len(story.subjects))
    subjects = random.sample(story.subjects, subject_count)
    asked = [subject.removeprefix("a ").removeprefix("an ") for subject in subjects]
    if random.random() < 0.75 or not subjects:
        hero = random.choice(
            (story.hero.name,) * 4 + (f"a {story.hero.noun}", f"a {story.hero.noun} named {story.hero.name}")
        )
        subjects.insert(0, hero)
        asked += [story.hero.name] if story.hero.name in hero else []
    phrase = " and ".join(subjects)
    if story.place is not None and random.random() < 0.4:
        phrase += f" {story.place.where}"
        asked.append(story.place.name)
    return phrase, tuple(asked)


def theme(random: Random, story: Story) -> str:
    """Return what the story is about, without naming its hero."""
    things = [subject for subject in story.subjects if subject.startswith(("a ", "an "))]
    thing = things[-1].split()[-1] if things else "toy"
    return random.choice(THEMES[story.plot]).format(child=story.hero.noun, thing=thing)


def request(random: Random, story: Story) -> Turn:
    """Return the user's message which that story answers."""
    ask = random.choice(ASKS)
    asked: tuple[str, ...] = ()
    draw = random.random()
    if draw < NO_SUBJECT_SHARE:
        message = ask.replace(" {about}", "")
    elif draw < NO_SUBJECT_SHARE + THEME_SHARE:
        message = ask.format(about=f"about {theme(random, story)}")
    else:
        phrase, asked = describe(random, story)
        message = ask.format(about=f"about {phrase}")
    return Turn("user", message.lower() if random.random() < LOWER_CASE_SHARE else message, asked=asked)


def other_message(random: Random) -> Turn:
    """Return a user's message that asks for no story."""
    message = random.choice(OTHER_MESSAGES)
    return Turn("user", message.format(thing=random.choice(OTHER_THINGS), number=random.randrange(100)))


def converse(random: Random, next_story: Callable[[], Story]) -> list[Turn]:
    """Return one conversation, whose last turn is the assistant's."""
    turns = []
    if random.random() < SYSTEM_SHARE:
        turns.append(Turn("system", random.choice(SYSTEM_MESSAGES)))
    for _ in range(random.choice(TURN_COUNTS)):
        story = next_story()
        if random.random() < OTHER_SHARE:
            turns.append(other_message(random))
            turns.append(Turn("assistant", f"{ONLY_STORIES} {story.text}", story))
        else:
            turns.append(request(random, story))
            turns.append(Turn("assistant", story.text, story))
    return turns
