"""The tasks of the normalizer: numbers to words, words to numbers, dates to ISO 8601, as pairs of input and answer.

Numbers go from 0 to 999,999 and are written in American English without "and": 4217 is "four thousand two hundred
seventeen", 42 is "forty-two". The input may also have a comma between thousands, "and" after hundreds, or no hyphens.
Dates go from 1900-01-01 to 2099-12-31; dates in digits alone are read day first, unless they begin with the year.

An example is about a number or about a date, never both. What it is about decides whether it is held out, so a held-out
number is unseen in either direction and a held-out date in every notation. Numbers below 100 are never held out:
they are the parts that all others are made of. Pure: all chance comes from the generator handed in.
"""

import calendar
from dataclasses import dataclass
from datetime import date
from random import Random

UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MONTHS = tuple(calendar.month_name)
WEEKDAYS = tuple(calendar.day_name)

ALWAYS_TRAINED_BELOW = 100
YEARS = (1900, 2099)
NUMBER_TO_WORDS, WORDS_TO_NUMBER, DATE = "number to words", "words to number", "date"
TASKS = (NUMBER_TO_WORDS, WORDS_TO_NUMBER, DATE)
DATE_FORMATS = (
    "{day} {month} {year}",
    "{day} {month}, {year}",
    "{month} {day}, {year}",
    "{month} {day} {year}",
    "{day} {short} {year}",
    "{short} {day}, {year}",
    "{short} {day} {year}",
    "{day}-{short}-{year}",
    "{short}. {day}, {year}",
    "{ordinal} {month} {year}",
    "{month} {ordinal}, {year}",
    "the {ordinal} of {month} {year}",
    "{ordinal} of {month}, {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday}, {month} {day}, {year}",
    "{weekday} {day} {short} {year}",
    "{day:02}/{month_number:02}/{year}",
    "{day}/{month_number}/{year}",
    "{day}.{month_number}.{year}",
    "{day:02}.{month_number:02}.{year}",
    "{day:02}-{month_number:02}-{year}",
    "{year}/{month_number:02}/{day:02}",
    "{year}.{month_number:02}.{day:02}",
    "{year}-{month_number:02}-{day:02}",
    "{year} {month} {day}",
    "{year}-{month_number}-{day}",
)


@dataclass(frozen=True)
class Example:
    """One pair, and the key of the number or the date it is about; no key means it is never held out."""

    task: str
    source: str
    target: str
    key: str | None


def number_words(number: int) -> str:
    """Spell out a number from 0 to 999,999."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return TENS[tens] + (f"-{UNITS[units]}" if units else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    return f"{number_words(count)} {name}" + (f" {number_words(rest)}" if rest else "")


def ordinal(day: int) -> str:
    """Write a day of the month as 1st, 2nd, 3rd, 4th."""
    suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def vary_words(random: Random, words: str) -> str:
    """Write spelled-out words as others might: with "and", without hyphens, with a capital."""
    if random.random() < 0.25:
        words = words.replace("hundred ", "hundred and ")
    if random.random() < 0.25:
        words = words.replace("-", " ")
    return words.capitalize() if random.random() < 0.1 else words


def number_key(number: int) -> str | None:
    """Return what decides whether examples about this number are held out."""
    return None if number < ALWAYS_TRAINED_BELOW else f"number {number}"


def number_to_words(random: Random, number: int) -> Example:
    """Ask for the words of a number."""
    written = f"{number:,}" if random.random() < 0.2 else str(number)
    return Example(NUMBER_TO_WORDS, f"{NUMBER_TO_WORDS}: {written}", number_words(number), number_key(number))


def words_to_number(random: Random, number: int) -> Example:
    """Ask for the digits of spelled-out words."""
    words = vary_words(random, number_words(number))
    return Example(WORDS_TO_NUMBER, f"{WORDS_TO_NUMBER}: {words}", str(number), number_key(number))


def draw_number(random: Random) -> int:
    """Draw a number; short and long ones are as frequent, and some are round."""
    number = random.randrange(10 ** random.randrange(1, 7))
    if random.random() < 0.15:
        number -= number % random.choice((10, 100, 1000, 10_000))
    return number


def draw_date(random: Random) -> date:
    """Draw a date."""
    year, month = random.randint(*YEARS), random.randint(1, 12)
    return date(year, month, random.randint(1, calendar.monthrange(year, month)[1]))


def date_to_iso(random: Random, when: date) -> Example:
    """Ask for the ISO 8601 form of a date in one of many notations."""
    month = MONTHS[when.month]
    written = random.choice(DATE_FORMATS).format(
        day=when.day,
        ordinal=ordinal(when.day),
        month=month,
        short=month[:3],
        month_number=when.month,
        year=when.year,
        weekday=random.choice((WEEKDAYS[when.weekday()], WEEKDAYS[when.weekday()][:3])),
    )
    if random.random() < 0.1:
        written = written.lower()
    return Example(DATE, f"{DATE}: {written}", when.isoformat(), f"date {when.isoformat()}")


def draw_example(random: Random, task: str) -> Example:
    """Draw one example of a task."""
    if task == DATE:
        return date_to_iso(random, draw_date(random))
    number = draw_number(random)
    return number_to_words(random, number) if task == NUMBER_TO_WORDS else words_to_number(random, number)
