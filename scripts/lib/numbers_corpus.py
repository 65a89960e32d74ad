"""English and German phrases with numbers in them: a translation task with exact answers.

Every phrase says a *value*: a number, a date, a time or a price. The mapping between a value's English
and its German is one-to-one, so a translation is right or wrong. What must be learned is real, though:
German puts the units before the tens ("einundzwanzig"), writes numbers below a million as one word,
counts half hours towards the next hour ("halb vier") and inflects for case and gender ("für einen Euro").

Where usage is divided the value is left out ("hunderteine Million" or "hundertein Millionen"), or one
form is used throughout (25 past three is always "fünf vor halb vier").
"""

import calendar
import contextlib
import hashlib
import itertools
import os
import random
from functools import cache
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

from num2words import num2words

SPLITS = ("train", "valid", "test")
LANGUAGES = ("en", "de")
LARGEST = 10**9


Value = Tuple[int, ...]


class Phrase(NamedTuple):
    kind: str  # number, date, time or price
    value: Value  # what is meant
    wording: int  # one of the ways of saying it: "the first of May", "on the first of May"
    source: str
    target: str


@cache
def english(n: int) -> str:
    """1204 -> "one thousand two hundred and four"."""
    return num2words(n, lang="en").replace(",", "")


@cache
def german(n: int) -> str:
    """1204 -> "eintausendzweihundertvier"."""
    # num2words keeps the -s of 101 before "tausend", where German drops it.
    return num2words(n, lang="de").replace("einstausend", "eintausend")


@cache
def english_ordinal(n: int) -> str:
    return num2words(n, lang="en", to="ordinal")


@cache
def german_ordinal(n: int) -> str:
    """The weak nominative: 3 -> "dritte"; the dative adds -n."""
    return num2words(n, lang="de", to="ordinal")


def _digits(rng: random.Random, most: int) -> int:
    """A number of 1 to ``most`` digits, each length equally likely."""
    digits = rng.randint(1, most)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


# Numbers --------------------------------------------------------------------------------------------


def draw_number(rng: random.Random) -> Tuple[Value, int]:
    if rng.randrange(500) == 0:
        return (LARGEST,), 0
    n = _digits(rng, 9)
    if rng.random() < 0.25:  # round numbers are commoner in text than chance would have them
        n -= n % 10 ** (max(len(str(n)) - rng.randint(1, 3), 0))
    if n // 10**6 > 1 and n // 10**6 % 100 == 1:  # divided usage, see above
        return draw_number(rng)
    return (n,), 0


def say_number(value: Value, wording: int) -> Tuple[str, str]:
    (n,) = value
    return english(n), german(n)


# Dates ----------------------------------------------------------------------------------------------

MONTHS = (
    ("January", "Januar"),
    ("February", "Februar"),
    ("March", "März"),
    ("April", "April"),
    ("May", "Mai"),
    ("June", "Juni"),
    ("July", "Juli"),
    ("August", "August"),
    ("September", "September"),
    ("October", "Oktober"),
    ("November", "November"),
    ("December", "Dezember"),
)
LEAP_YEAR = 2000


def draw_date(rng: random.Random) -> Tuple[Value, int]:
    """(year, month, day), worded without or with "on"; year 0 is a date without one."""
    year = rng.randint(1800, 2050) if rng.random() < 0.5 else rng.randint(1100, 2099)
    if rng.random() < 0.1:
        year = 0
    month = rng.randint(1, 12)
    day = rng.randint(1, calendar.monthrange(year or LEAP_YEAR, month)[1])
    return (year, month, day), rng.randrange(2)


def say_date(value: Value, with_on: int) -> Tuple[str, str]:
    year, month, day = value
    en_month, de_month = MONTHS[month - 1]
    source = f"the {english_ordinal(day)} of {en_month}"
    target = f"{german_ordinal(day)} {de_month}"
    if with_on:
        source, target = f"on {source}", f"am {german_ordinal(day)}n {de_month}"
    else:
        target = f"der {target}"
    if year:
        source, target = f"{source} {english_year(year)}", f"{target} {german_year(year)}"
    return source, target


def english_year(year: int) -> str:
    """1905 -> "nineteen oh five", 1984 -> "nineteen eighty-four", 2005 -> "two thousand and five"."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return english(year)
    if rest == 0:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if rest < 10 else ''}{english(rest)}"


def german_year(year: int) -> str:
    """1984 -> "neunzehnhundertvierundachtzig", 2010 -> "zweitausendzehn"."""
    century, rest = divmod(year, 100)
    if century >= 20:
        return german(year)
    return f"{german(century)}hundert{german(rest) if rest else ''}"


# Times ----------------------------------------------------------------------------------------------

CLOCK, OFFICIAL = 0, 1
BARE, AT, UNTIL, FROM_TO = range(4)


def draw_time(rng: random.Random) -> Tuple[Value, int]:
    """(style, hour, minute), for FROM_TO (style, hour, minute, hour, minute)."""
    style, wording = rng.choice((CLOCK, OFFICIAL)), rng.choice((BARE, AT, UNTIL, FROM_TO, FROM_TO))
    times: List[int] = []
    for _ in range(2 if wording == FROM_TO else 1):
        minute = 5 * rng.randrange(12) if rng.random() < 0.6 else rng.randrange(60)
        times += [rng.randint(1, 12) if style == CLOCK else rng.randrange(24), minute]
    # "Three o'clock" and "three am" would both be "drei Uhr": full hours are official time only.
    if style == CLOCK and 0 in times or times[:2] == times[2:]:
        return draw_time(rng)
    return (style, *times), wording


def say_time(value: Value, wording: int) -> Tuple[str, str]:
    style, *times = value
    say = say_clock if style == CLOCK else say_official
    en, de = say(*times[:2])
    if wording == FROM_TO:
        en_end, de_end = say(*times[2:])
        return f"from {en} to {en_end}", f"von {de} bis {de_end}"
    en_before, de_before = {BARE: ("", ""), AT: ("at ", "um "), UNTIL: ("until ", "bis ")}[wording]
    return en_before + en, de_before + de


def say_clock(hour: int, minute: int) -> Tuple[str, str]:
    """Hours 1 to 12, minutes 1 to 59: "quarter past three", "Viertel nach drei"."""
    following = hour % 12 + 1
    en, en_next, de, de_next = english(hour), english(following), german(hour), german(following)
    if minute == 30:
        return f"half past {en}", f"halb {de_next}"
    if minute == 25:
        return f"twenty-five past {en}", f"fünf vor halb {de_next}"
    if minute == 35:
        return f"twenty-five to {en_next}", f"fünf nach halb {de_next}"
    past = minute < 30
    distance = minute if past else 60 - minute
    if distance == 15:
        en_distance, de_distance = "quarter", "Viertel"
    elif distance % 5 == 0:
        en_distance, de_distance = english(distance), german(distance)
    else:
        one = distance == 1
        en_distance = f"{english(distance)} {'minute' if one else 'minutes'}"
        de_distance = "eine Minute" if one else f"{german(distance)} Minuten"
    if past:
        return f"{en_distance} past {en}", f"{de_distance} nach {de}"
    return f"{en_distance} to {en_next}", f"{de_distance} vor {de_next}"


def say_official(hour: int, minute: int) -> Tuple[str, str]:
    """Hours 0 to 23: "three twenty-five pm", "fünfzehn Uhr fünfundzwanzig"."""
    en = english((hour - 1) % 12 + 1)
    de = f"{'ein' if hour == 1 else german(hour)} Uhr"
    if minute:
        en = f"{en} {'oh ' if minute < 10 else ''}{english(minute)}"
        de = f"{de} {german(minute)}"
    return f"{en} {'am' if hour < 12 else 'pm'}", de


# Prices ---------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str  # m, f or n


CENT = Unit("cent", "cents", "Cent", "Cent", "m")
CURRENCIES = (
    (Unit("euro", "euros", "Euro", "Euro", "m"), CENT),
    (Unit("dollar", "dollars", "Dollar", "Dollar", "m"), CENT),
    (Unit("pound", "pounds", "Pfund", "Pfund", "n"), Unit("penny", "pence", "Penny", "Pence", "m")),
    (Unit("mark", "marks", "Mark", "Mark", "f"), Unit("pfennig", "pfennigs", "Pfennig", "Pfennig", "m")),
    (Unit("crown", "crowns", "Krone", "Kronen", "f"), Unit("heller", "hellers", "Heller", "Heller", "m")),
)
NOMINATIVE = {"m": "ein", "f": "eine", "n": "ein"}
ACCUSATIVE = {"m": "einen", "f": "eine", "n": "ein"}


def draw_price(rng: random.Random) -> Tuple[Value, int]:
    """(currency, whole, hundredths), not both 0, worded without or with "for"."""
    whole = _digits(rng, 6)
    hundredths = rng.choice((0, rng.randint(1, 99), 5 * rng.randint(1, 19)))
    if whole > 1 and whole % 100 == 1:  # "hundertein Euro" or "hunderteins Euro": divided usage
        return draw_price(rng)
    if whole == hundredths == 0:
        return draw_price(rng)
    currency = rng.randrange(len(CURRENCIES))
    # A few cents are the same whether euro or dollar: give them to the euro, so that answers are unique.
    if whole == 0 and CURRENCIES[currency][1] is CENT:
        currency = 0
    return (currency, whole, hundredths), rng.randrange(2)


def say_price(value: Value, with_for: int) -> Tuple[str, str]:
    currency, whole, hundredths = value
    article = ACCUSATIVE if with_for else NOMINATIVE
    amounts = [(n, unit) for n, unit in zip((whole, hundredths), CURRENCIES[currency]) if n]
    source = " and ".join(f"{english(n)} {unit.en if n == 1 else unit.en_plural}" for n, unit in amounts)
    target = " und ".join(
        f"{article[unit.gender]} {unit.de}" if n == 1 else f"{german(n)} {unit.de_plural}"
        for n, unit in amounts
    )
    return (f"for {source}", f"für {target}") if with_for else (source, target)


# The corpus -----------------------------------------------------------------------------------------

KINDS: Dict[str, Tuple[Callable, Callable]] = {
    "number": (draw_number, say_number),
    "date": (draw_date, say_date),
    "time": (draw_time, say_time),
    "price": (draw_price, say_price),
}
# Numbers are the hardest and the longest of the four, so they get the largest share.
_SHARES = ("number", "number", "date", "time", "price")


def phrase(kind: str, value: Value, wording: int = 0) -> Phrase:
    return Phrase(kind, value, wording, *KINDS[kind][1](value, wording))


def split_of(kind: str, value: Value, seed: int) -> str:
    """The split that a value belongs to: a tenth of all values each for valid and test.

    A hash decides, so no value can be in two splits whatever the sizes and wordings, and a larger
    training set leaves the other two as they are.
    """
    if kind == "number" and (value[0] < 100 or value[0] == LARGEST):
        return "train"  # so that the words of the held-out numbers can be known
    digest = hashlib.sha256(f"{seed} {kind} {value}".encode()).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest[:8], "big") % 10, "train")


def phrases(split: str, seed: int) -> Iterator[Phrase]:
    """Different phrases of a split without end, the same on every machine."""
    rng = random.Random(f"{seed} {split}")
    seen = set()
    while True:
        kind = rng.choice(_SHARES)
        value, wording = KINDS[kind][0](rng)
        if split_of(kind, value, seed) == split and (kind, value, wording) not in seen:
            seen.add((kind, value, wording))
            yield phrase(kind, value, wording)


def corpus_files(out: Path) -> List[Path]:
    return [out / f"{split}.{language}" for split in SPLITS for language in LANGUAGES]


def write_corpus(out: Path, sizes: Dict[str, int], seed: int, progress: Callable = iter) -> None:
    """Writes SPLIT.en and SPLIT.de, with as many phrases as ``sizes`` says for every split.

    ``progress`` wraps the phrases as tqdm does. Files get their names when all of them are complete,
    so a run that is killed leaves nothing that looks like a corpus.
    """
    out.mkdir(parents=True, exist_ok=True)
    every = itertools.chain.from_iterable(
        ((split, each) for each in itertools.islice(phrases(split, seed), sizes[split])) for split in SPLITS
    )
    with contextlib.ExitStack() as stack:
        files = {
            path.name: stack.enter_context(open(_unfinished(path), "w", encoding="utf-8", newline="\n"))
            for path in corpus_files(out)
        }
        for split, each in progress(every):
            print(each.source, file=files[f"{split}.en"])
            print(each.target, file=files[f"{split}.de"])
    for path in corpus_files(out):
        os.replace(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".part")
