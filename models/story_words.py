"""The vocabulary of the story grammar: who, where, with what.

Everything here is data, and every list is ordered, so that a seeded generator draws the same words everywhere.
The common names fill most stories. The rarer names appear seldom, so that a model has to learn to carry a name on
from the text before it and does not merely memorise a few.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    """A child of a story with the pronouns in their three cases."""

    name: str
    noun: str
    subject: str
    object: str
    possessive: str


@dataclass(frozen=True)
class Place:
    """A place as an object ("the park") and as an answer to where ("in the park")."""

    name: str
    where: str


@dataclass(frozen=True)
class Weather:
    """A word for the day and a sentence about the sky."""

    word: str
    sentence: str


def words(line: str) -> tuple[str, ...]:
    """Split a line into its words."""
    return tuple(line.split())


def girl(name: str) -> Person:
    """Return a girl of that name."""
    return Person(name, "girl", "she", "her", "her")


def boy(name: str) -> Person:
    """Return a boy of that name."""
    return Person(name, "boy", "he", "him", "his")


def with_article(phrase: str) -> str:
    """Put the indefinite article before a phrase of this vocabulary."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


COMMON_GIRLS = "Mia Lily Anna Zoe Ella Nora Ruby Ivy Emma Sara Lucy Alice"
COMMON_BOYS = "Tom Ben Sam Max Leo Jack Finn Oscar Noah Paul Tim Peter"
RARE_GIRLS = (
    "Amara Aisha Beatrice Bella Carmen Chloe Clara Daisy Diana Elena Eva Fatima Fiona Freya Gloria Grace Hana Hannah "
    "Hazel Helen Ines Iris Jade Jane Julia Kate Keiko Kira Laura Leila Linda Luna Maria Maya Mei Molly Nadia Olga "
    "Olivia Paula Penny Priya Rosa Rose Sofia Sophie Stella Susan Tara Tessa Uma Vera Wendy Yara Yuki Zara"
)
RARE_BOYS = (
    "Adam Ahmed Alan Alex Anton Arthur Boris Bruno Carlos Carl Daniel David Diego Edgar Emil Eric Felix Frank George "
    "Hans Harry Henry Hugo Ivan Jacob James Jamal Jonas Juan Karim Kenji Kevin Lars Liam Louis Lucas Marco Mark Martin "
    "Mateo Milo Nico Omar Otto Pablo Pedro Ravi Robin Samir Simon Theo Thomas Victor Walter Yusuf Zack"
)
COMMON_PEOPLE = tuple(map(girl, words(COMMON_GIRLS))) + tuple(map(boy, words(COMMON_BOYS)))
RARE_PEOPLE = tuple(map(girl, words(RARE_GIRLS))) + tuple(map(boy, words(RARE_BOYS)))
NAMES = frozenset(person.name for person in COMMON_PEOPLE + RARE_PEOPLE)

VIRTUES = words("kind curious cheerful clever friendly quiet little young happy")
ANIMALS = words(
    "dog cat rabbit bird fox bear duck mouse turtle owl squirrel frog pony hedgehog puppy kitten horse goat "
    "pig sheep lamb monkey penguin deer goose dragon lion elephant"
)
TRAITS = words("little small brown white funny gentle quiet brave sleepy old kind shy")
PLACES = (
    Place("the park", "in the park"),
    Place("the garden", "in the garden"),
    Place("the forest", "in the forest"),
    Place("the beach", "at the beach"),
    Place("the farm", "on the farm"),
    Place("the river", "by the river"),
    Place("the hill", "on the hill"),
    Place("the lake", "by the lake"),
    Place("the meadow", "in the meadow"),
    Place("the village", "in the village"),
    Place("the castle", "at the castle"),
    Place("the mill", "by the mill"),
    Place("the school", "at the school"),
    Place("the market", "at the market"),
    Place("the sea", "by the sea"),
)
TOYS = words(
    "ball kite boat doll drum hat book scarf bell lantern wagon basket key map whistle robot car train flute balloon"
)
COLORS = words("red blue green yellow orange purple golden silver pink white black")
FOODS = words("bread soup apples berries cookies honey cake pears cheese pancakes cherries nuts carrots rice")
HIDING_PLACES = (
    "under a bush",
    "behind a tree",
    "under a bench",
    "inside a hollow log",
    "behind a big rock",
    "in the tall grass",
    "behind an old wall",
    "under a pile of leaves",
)
WEATHERS = (
    Weather("sunny", "The sun was warm and the sky was blue."),
    Weather("windy", "The wind was strong and the leaves were dancing."),
    Weather("rainy", "Rain was falling and the ground was wet."),
    Weather("snowy", "Snow covered the ground and everything was white."),
    Weather("cloudy", "Grey clouds moved slowly over the sky."),
    Weather("warm", "The air was full of bees and butterflies."),
)
FEARS = ("the dark", "loud noises", "deep water", "big shadows", "thunder", "strangers")

# The words that a story has to carry on unchanged once they were said.
CARRIED_WORDS = NAMES.union(
    ANIMALS,
    TOYS,
    COLORS,
    FOODS,
    (place.name.removeprefix("the ") for place in PLACES),
    (fear.split()[-1] for fear in FEARS),
)
