"""The openings and plots of the story grammar, as sentence templates.

A plot is a function that returns its sentences in order. Their placeholders are the keys of `story_grammar.words_of`.
Pronouns are written in their masculine forms, which tell the three cases apart: `{he}`, `{him}`, `{his}` for the hero,
`{friend_he}`, `{friend_him}`, `{friend_his}` for the friend. `pick` chooses one of its arguments, and a sentence that
comes out empty is left out.

A plot names what it is about in its first sentence, as soon as it can, and its hero again near its end. Relatives are
the same in every story of a plot. Both are for the sake of a small model, which then has to look back for little.
"""

from collections.abc import Callable

from models.story_words import VIRTUES

Pick = Callable[..., str]


def opening(pick: Pick) -> list[str]:
    """Introduce the hero and perhaps the weather."""
    virtue = pick("", *(f"{virtue} " for virtue in VIRTUES))
    first = pick(
        f"Once upon a time, there was a {virtue}{{child}} named {{hero}}.",
        f"Once upon a time, there was a {virtue}{{child}} called {{hero}} who lived near {{place}}.",
        f"Once upon a time, a {virtue}{{child}} named {{hero}} lived in a small house near {{place}}.",
        f"There once was a {virtue}{{child}} called {{hero}}.",
        f"{{hero}} was a {virtue}{{child}} who lived near {{place}}.",
        "{hero} lived in a small house near {place}.",
        "One {weather} day, {hero} went to {place}.",
    )
    if first.startswith("One {weather}"):
        return [first, pick("", "{sky}")]
    return [first, pick("", "{hero} liked to play {where}."), pick("", "It was a {weather} day. {sky}")]


def lost_toy(pick: Pick) -> list[str]:
    """The hero misses a toy, and a relative helps to find it."""
    return [
        "{hero} had {a_toy} that {he} loved very much.",
        pick("It was {color}, and {he} took it everywhere.", "It was {color}, and it was {his} best toy."),
        pick("One morning, {hero} could not find the {toy}.", "But one evening, the {toy} was gone."),
        pick("{He} felt very sad.", "{hero} began to cry.", "{hero} did not know what to do."),
        '{He} asked {his} mother, "Have you seen my {toy}?"',
        f'"No," said {{his}} mother, "but {pick("I will help you look", "let us look for it together")}."',
        f"They looked {pick('in the kitchen', 'under the bed', 'near the door')}, but the {{toy}} was not there.",
        "Then they went to {place} and looked {hiding_place}.",
        "There was the {toy}!",
        pick("{hero} was so happy that {he} hugged {his} mother.", '"Thank you for helping me!" said {hero}.'),
        pick("From that day on, {hero} always put the {toy} in a safe place.", "{hero} never lost the {toy} again."),
    ]


def animal_in_need(pick: Pick) -> list[str]:
    """The hero finds an animal that is hurt, cold or hungry, and helps it."""
    middle = {
        "The {animal} had a thorn in its foot.": [
            '"Do not be afraid," said {hero}.',
            "{He} pulled out the thorn very gently.",
            pick("The {animal} could walk again.", "Soon the foot did not hurt any more."),
        ],
        "The {animal} was lost and cold.": [
            "{hero} put a warm scarf around the {animal}.",
            "Then {he} took the {animal} home to {his} father.",
            "They made a soft bed for it near the fire.",
        ],
        "The {animal} was very hungry.": [
            pick('"You poor thing," said {hero}.', "{hero} wanted to help."),
            "{He} gave the {animal} some {food}.",
            "The {animal} ate and ate until it was not hungry any more.",
        ],
    }
    trouble = pick(*middle)
    return [
        "{hero} saw {a_animal} {hiding_place}.",
        pick("It was {trait} and made a soft sound.", "It was {trait} and did not run away."),
        trouble,
        *middle[trouble],
        f"The {{animal}} looked at {{hero}} and was {pick('happy', 'thankful')}.",
        f"After that day, {{hero}} and the {{animal}} were {pick('best friends', 'good friends', 'always together')}.",
    ]


def sharing(pick: Pick) -> list[str]:
    """The hero shares food with a friend, who returns the kindness."""
    feeling = pick("sad", "hungry")
    return [
        "{hero} had some {food} that {his} grandmother had given {him}.",
        pick("{hero} wanted to eat all the {food} alone.", "{hero} sat down {where} to eat the {food}."),
        f"Then {{he}} saw {{friend}}, who had {pick('no food', 'nothing to eat')}.",
        f"{{friend}} looked {feeling}.",
        '{hero} thought about it and said, "Would you like some of my {food}?"',
        '"Yes, please!" said {friend}.',
        "They sat together {where} and ate the {food}.",
        pick("The {food} tasted even better with a friend.", f"{{friend}} was not {feeling} any more."),
        "The next day, {friend} let {hero} play with {friend_his} {color} {toy}.",
        pick("They learned that sharing makes everyone happy.", "{hero} was glad that {he} had shared."),
    ]


def broken_toy(pick: Pick) -> list[str]:
    """The friend breaks a toy, is forgiven, and they mend it."""
    return [
        "{hero} and {friend} were playing with {a_toy} {where}.",
        f"{{friend}} {pick('dropped', 'fell on', 'stepped on')} the {{toy}} and it broke.",
        pick('"I am sorry," said {friend}.', '"Oh no! I am so sorry," said {friend}.'),
        f"{{hero}} was {pick('angry', 'upset')} at first, but {{he}} saw that {{friend}} was sad too.",
        '"It is all right," said {hero}. "We can fix it."',
        f"They went to {{his}} uncle, who had {pick('glue', 'tools', 'string')}.",
        f"They worked together {pick('all afternoon', 'for an hour', 'until dinner')}.",
        f"At last, the {{toy}} was {pick('as good as new', 'ready to play with again')}.",
        f"{{hero}} and {{friend}} {pick('cheered', 'laughed')} and played until the sun went down.",
    ]


def bravery(pick: Pick) -> list[str]:
    """The hero overcomes a fear to find a lost animal."""
    tool = pick("lantern", "whistle", "bell")
    return [
        "{hero} had {a_animal} that was very {trait}.",
        "{hero} was afraid of {fear}.",
        f"One {pick('night', 'evening')}, the {{animal}} ran away to {{place}}.",
        "To find the {animal}, {hero} had to be brave.",
        f"{{His}} grandfather gave {{him}} {{a_color}} {tool}.",
        f"{{hero}} took a deep breath and held the {tool} tight.",
        "Step by step, {he} walked to {place}.",
        pick('"Where are you?" {he} called.', '"Come back, little friend!" {he} called.'),
        "The {animal} was hiding {hiding_place}.",
        pick("{hero} hugged the {animal} and they went home.", "{hero} was very glad, and they walked home together."),
        pick('"You were very brave," said {his} grandfather.', "{His} grandfather was proud of {him}."),
        "After that, {hero} was not afraid of {fear} any more.",
    ]


def patience(pick: Pick) -> list[str]:
    """The hero plants a seed and learns to wait."""
    return [
        f"{{hero}} found a {pick('tiny', 'strange', 'round')} seed {{where}}.",
        pick('"What will it be?" {he} asked {his} grandmother.', "{He} showed the seed to {his} grandmother."),
        '"Plant it and see," said {his} grandmother.',
        "{hero} put the seed in the ground and gave it water every day.",
        pick("For many days, nothing happened.", "At first, there was only dirt."),
        f'{{hero}} wanted to give up, but {{his}} grandmother said, "{pick("Be patient", "Wait a little longer")}."',
        "Then one morning, a small green leaf came out of the ground.",
        pick("The plant grew and grew until it had {color} flowers.", "Soon it was a tall plant with {color} flowers."),
        "{hero} gave the first flower to {his} grandmother.",
        pick("{hero} had learned that good things take time.", "{hero} learned that it is good to be patient."),
    ]


def race(pick: Pick) -> list[str]:
    """Two animals race, and nobody is sad at the end."""
    hero_wins = [
        "The {rival} stopped to eat some {food} on the way.",
        "So the {animal} came first and won the race.",
        "{hero} was proud, but {he} gave the prize to both of them.",
    ]
    friend_wins = [
        "The {animal} stopped to take a nap {hiding_place}.",
        "So the {rival} came first and won the race.",
        '{hero} was surprised, but {he} said, "Well done!" to {friend}.',
    ]
    return [
        "{hero} had {a_animal} and {friend} had {a_rival}.",
        '"My {animal} is faster than your {rival}," said {hero}.',
        '"Let us have a race to {place}," said {friend}.',
        "The {animal} and the {rival} ran as fast as they could.",
        *(hero_wins if pick("hero", "friend") == "hero" else friend_wins),
        pick("Then they all went home as friends.", "Then {hero} and {friend} shared some {food} and laughed."),
    ]


def new_friend(pick: Pick) -> list[str]:
    """The hero makes friends with a shy newcomer."""
    return [
        "A new {friend_child} named {friend} had come to live near {place}.",
        f"{{friend}} was {pick('shy', 'lonely')} and stood alone {{hiding_place}}.",
        f"{{hero}} {pick('walked over', 'came closer')} and {pick('waved', 'smiled')}.",
        '"Hello, I am {hero}. Do you want to play with my {toy}?" {he} asked.',
        f"{{friend}} looked at the {{toy}} and {pick('smiled', 'nodded')}.",
        f"They played with the {{toy}} {{where}} {pick('all day', 'until dinner', 'for hours')}.",
        pick("{friend} was not alone any more.", "{friend} showed {hero} a new game, and they laughed a lot."),
        pick(
            "When it was time to go home, {hero} and {friend} were best friends.",
            "{hero} and {friend} met again every day.",
        ),
    ]


def lost_way(pick: Pick) -> list[str]:
    """The hero follows an animal too far and is led home."""
    return [
        "{hero} saw {a_animal} {where}.",
        pick("{He} followed the {animal} for a long time.", "The {animal} ran away, and {hero} ran after it."),
        "Soon {hero} did not know the way home.",
        pick("{He} sat down and was very worried.", "It was getting dark, and {he} was worried."),
        'The {animal} came close, as if it wanted to say, "Follow me."',
        f"It led {{hero}} past {pick('a tall tree', 'a stone bridge', 'an old well')} and back to {{place}}.",
        "There {his} sister was waiting with {a_color} lantern.",
        pick('"I am so glad you are safe," said {his} sister.', "{His} sister gave {him} a big hug."),
        "{hero} gave the {animal} some {food} to thank it.",
        pick("{He} never went so far alone again.", "{hero} promised to be more careful."),
    ]


def surprise(pick: Pick) -> list[str]:
    """Two children prepare a surprise, something goes wrong, and it ends well."""
    return [
        "{hero} and {friend} wanted to make a birthday surprise for {his} aunt.",
        pick("They hid some {food} {hiding_place}.", "They put some {food} in a box and hid the box {where}."),
        pick("But in the night, {a_trait} {animal} came", "But when nobody was looking, {a_trait} {animal} came")
        + " and ate all the {food}.",
        f'"{pick("What shall we do now?", "Oh no, our surprise is gone!")}" said {{friend}}.',
        '{hero} had an idea. "Let us give a present," {he} said.',
        f"They made {{a_color}} {{toy}} {pick('out of paper', 'out of wood', 'from old things')}.",
        "The next day, {his} aunt saw the {toy} and laughed with joy.",
        pick("It was the best birthday of all.", "{hero} and {friend} were very proud."),
    ]


PLOTS = (lost_toy, animal_in_need, sharing, broken_toy, bravery, patience, race, new_friend, lost_way, surprise)
