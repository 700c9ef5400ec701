"""A grammar of small stories: a seeded generator in, one coherent story out.

A story is a few sentences of plain English about one child, the hero, and at most one other named child, the friend.
Causes come before effects, and every person, animal and thing keeps its name, kind and colour to the end.
`tell(random)` draws a scene, one opening and one plot, and fills the scene's words into their templates. It is pure:
the same state of the generator gives the same story on every machine, and nothing else is read.
"""

import re
from dataclasses import dataclass
from random import Random

from models.story_plots import PLOTS, opening
from models.story_words import (
    ANIMALS,
    COLORS,
    COMMON_PEOPLE,
    FEARS,
    FOODS,
    HIDING_PLACES,
    NAMES,
    PLACES,
    RARE_PEOPLE,
    TOYS,
    TRAITS,
    WEATHERS,
    Person,
    Place,
    Weather,
    with_article,
)

RARE_NAME_SHARE = 0.2
SUBJECTS = {
    "lost_toy": ("toy",),
    "animal_in_need": ("animal",),
    "sharing": ("food", "friend"),
    "broken_toy": ("toy", "friend"),
    "bravery": ("animal",),
    "patience": (),
    "race": ("animal", "friend"),
    "new_friend": ("friend",),
    "lost_way": ("animal",),
    "surprise": ("friend",),
}


@dataclass(frozen=True)
class Scene:
    """All that a plot may mention."""

    hero: Person
    friend: Person
    place: Place
    weather: Weather
    animal: str
    rival: str
    trait: str
    toy: str
    color: str
    food: str
    hiding_place: str
    fear: str


@dataclass(frozen=True)
class Story:
    """A told story, the plot it follows, its hero, and what else its text is about."""

    text: str
    plot: str
    hero: Person
    place: Place | None
    subjects: tuple[str, ...]


def draw_person(random: Random, other_than: Person | None = None) -> Person:
    """Draw a child, seldom one with a rare name."""
    people = RARE_PEOPLE if random.random() < RARE_NAME_SHARE else COMMON_PEOPLE
    person = random.choice(people)
    return draw_person(random, other_than) if person == other_than else person


def draw_scene(random: Random) -> Scene:
    """Draw everything a story needs; the friend and the rival differ from the hero and the animal."""
    hero = draw_person(random)
    animal = random.choice(ANIMALS)
    return Scene(
        hero=hero,
        friend=draw_person(random, other_than=hero),
        place=random.choice(PLACES),
        weather=random.choice(WEATHERS),
        animal=animal,
        rival=random.choice([other for other in ANIMALS if other != animal]),
        trait=random.choice(TRAITS),
        toy=random.choice(TOYS),
        color=random.choice(COLORS),
        food=random.choice(FOODS),
        hiding_place=random.choice(HIDING_PLACES),
        fear=random.choice(FEARS),
    )


def words_of(scene: Scene) -> dict[str, str]:
    """Return what each placeholder of a template stands for."""
    hero, friend = scene.hero, scene.friend
    return {
        "hero": hero.name,
        "child": hero.noun,
        "he": hero.subject,
        "him": hero.object,
        "his": hero.possessive,
        "He": hero.subject.capitalize(),
        "His": hero.possessive.capitalize(),
        "friend": friend.name,
        "friend_child": friend.noun,
        "friend_he": friend.subject,
        "friend_him": friend.object,
        "friend_his": friend.possessive,
        "friend_He": friend.subject.capitalize(),
        "place": scene.place.name,
        "where": scene.place.where,
        "weather": scene.weather.word,
        "sky": scene.weather.sentence,
        "animal": scene.animal,
        "a_animal": with_article(scene.animal),
        "rival": scene.rival,
        "a_rival": with_article(scene.rival),
        "trait": scene.trait,
        "a_trait": with_article(scene.trait),
        "toy": scene.toy,
        "a_toy": with_article(scene.toy),
        "color": scene.color,
        "a_color": with_article(scene.color),
        "food": scene.food,
        "hiding_place": scene.hiding_place,
        "fear": scene.fear,
    }


def mentions(text: str, word: str) -> bool:
    """Say whether the text has the word or phrase, whole."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


def subjects_of(scene: Scene, plot: str) -> tuple[str, ...]:
    """Return what one would say a story of that plot is about, besides its hero."""
    phrases = {
        "friend": scene.friend.name,
        "animal": with_article(scene.animal),
        "food": scene.food,
        "toy": with_article(scene.toy),
    }
    return tuple(phrases[kind] for kind in SUBJECTS[plot])


def tell(random: Random) -> Story:
    """Draw a scene and tell one story of it."""
    scene = draw_scene(random)

    def pick(*alternatives: str) -> str:
        return random.choice(alternatives)

    plot = random.choice(PLOTS)
    templates = [*opening(pick), *plot(pick)]
    words = words_of(scene)
    text = " ".join(template.format_map(words) for template in templates if template)
    place = scene.place if mentions(text, scene.place.name) else None
    return Story(text, plot.__name__, scene.hero, place, subjects_of(scene, plot.__name__))


def keeps_hero(text: str) -> bool:
    """Say whether the first person named stays the hero: named again in the second half, with at most one other."""
    named = re.findall(r"\b[A-Z][a-z]+\b", text)
    people = [word for word in named if word in NAMES]
    if not people or len(set(people)) > 2:
        return False
    return people[0] in text[len(text) // 2 :]
