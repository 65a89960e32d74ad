"""The corpus of numbers: grammar, exact answers, disjoint splits, the same everywhere."""

import calendar
import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib import numbers_corpus as corpus

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SIZES = {"train": 3000, "valid": 300, "test": 300}


@pytest.fixture(scope="module")
def splits():
    return {
        split: list(itertools.islice(corpus.phrases(split, seed=1), size)) for split, size in SIZES.items()
    }


# German by hand, from the rules of Duden and the common usage that the module's docstring names.
@pytest.mark.parametrize(
    "kind, value, wording, source, target",
    [
        ("number", (0,), 0, "zero", "null"),
        ("number", (1,), 0, "one", "eins"),
        ("number", (17,), 0, "seventeen", "siebzehn"),
        ("number", (21,), 0, "twenty-one", "einundzwanzig"),
        ("number", (101,), 0, "one hundred and one", "einhunderteins"),
        ("number", (1000,), 0, "one thousand", "eintausend"),
        ("number", (101000,), 0, "one hundred and one thousand", "einhunderteintausend"),
        ("number", (10**6,), 0, "one million", "eine Million"),
        ("number", (10**9,), 0, "one billion", "eine Milliarde"),
        (
            "number",
            (21_076_530,),
            0,
            "twenty-one million seventy-six thousand five hundred and thirty",
            "einundzwanzig Millionen sechsundsiebzigtausendfünfhundertdreißig",
        ),
        (
            "date",
            (1984, 3, 4),
            0,
            "the fourth of March nineteen eighty-four",
            "der vierte März neunzehnhundertvierundachtzig",
        ),
        (
            "date",
            (2005, 7, 31),
            1,
            "on the thirty-first of July two thousand and five",
            "am einunddreißigsten Juli zweitausendfünf",
        ),
        (
            "date",
            (1900, 1, 1),
            0,
            "the first of January nineteen hundred",
            "der erste Januar neunzehnhundert",
        ),
        ("date", (1101, 5, 7), 1, "on the seventh of May eleven oh one", "am siebten Mai elfhunderteins"),
        ("date", (0, 2, 29), 0, "the twenty-ninth of February", "der neunundzwanzigste Februar"),
        ("time", (corpus.CLOCK, 3, 15), corpus.BARE, "quarter past three", "Viertel nach drei"),
        ("time", (corpus.CLOCK, 12, 45), corpus.AT, "at quarter to one", "um Viertel vor eins"),
        ("time", (corpus.CLOCK, 3, 30), corpus.UNTIL, "until half past three", "bis halb vier"),
        ("time", (corpus.CLOCK, 12, 30), corpus.BARE, "half past twelve", "halb eins"),
        ("time", (corpus.CLOCK, 3, 25), corpus.BARE, "twenty-five past three", "fünf vor halb vier"),
        ("time", (corpus.CLOCK, 3, 35), corpus.BARE, "twenty-five to four", "fünf nach halb vier"),
        ("time", (corpus.CLOCK, 3, 59), corpus.BARE, "one minute to four", "eine Minute vor vier"),
        ("time", (corpus.CLOCK, 3, 7), corpus.BARE, "seven minutes past three", "sieben Minuten nach drei"),
        ("time", (corpus.OFFICIAL, 1, 0), corpus.AT, "at one am", "um ein Uhr"),
        ("time", (corpus.OFFICIAL, 21, 1), corpus.BARE, "nine oh one pm", "einundzwanzig Uhr eins"),
        ("time", (corpus.OFFICIAL, 0, 30), corpus.BARE, "twelve thirty am", "null Uhr dreißig"),
        ("time", (corpus.OFFICIAL, 12, 0), corpus.BARE, "twelve pm", "zwölf Uhr"),
        (
            "time",
            (corpus.CLOCK, 9, 40, 5, 10),
            corpus.FROM_TO,
            "from twenty to ten to ten past five",
            "von zwanzig vor zehn bis zehn nach fünf",
        ),
        ("price", (0, 3, 50), 0, "three euros and fifty cents", "drei Euro und fünfzig Cent"),
        ("price", (0, 1, 1), 0, "one euro and one cent", "ein Euro und ein Cent"),
        ("price", (1, 1, 1), 1, "for one dollar and one cent", "für einen Dollar und einen Cent"),
        ("price", (2, 1, 2), 1, "for one pound and two pence", "für ein Pfund und zwei Pence"),
        ("price", (3, 1, 0), 1, "for one mark", "für eine Mark"),
        ("price", (4, 21, 1), 0, "twenty-one crowns and one heller", "einundzwanzig Kronen und ein Heller"),
    ],
)
def test_grammar(kind, value, wording, source, target):
    assert corpus.phrase(kind, value, wording)[3:] == (source, target)


def test_splits_share_no_value_and_no_phrase(splits):
    for what in (lambda p: (p.kind, p.value), lambda p: p.source, lambda p: p.target):
        sets = [{what(each) for each in phrases} for phrases in splits.values()]
        for one, other in itertools.combinations(sets, 2):
            assert not one & other


def test_answers_are_exact(splits):
    every = [each for phrases in splits.values() for each in phrases]
    assert len({each.source for each in every}) == len({each.target for each in every}) == len(every)


def test_every_word_of_the_held_out_numbers_is_in_the_training_set(splits):
    known = {word for each in splits["train"] for word in each.source.replace("-", " ").split()}
    for split in ("valid", "test"):
        words = {word for each in splits[split] for word in each.source.replace("-", " ").split()}
        assert words <= known


def test_every_kind_and_magnitude_occurs(splits):
    kinds = [each.kind for each in splits["train"]]
    assert all(kinds.count(kind) > 0.15 * len(kinds) for kind in corpus.KINDS)
    numbers = [each.value[0] for each in splits["train"] if each.kind == "number"]
    assert {len(str(n)) for n in numbers} == set(range(1, 11))
    assert max(numbers) == corpus.LARGEST


def test_a_larger_training_set_extends_the_smaller(splits):
    fewer = list(itertools.islice(corpus.phrases("train", seed=1), 50))
    assert splits["train"][:50] == fewer


def test_another_seed_is_another_corpus(splits):
    assert splits["test"][:50] != list(itertools.islice(corpus.phrases("test", seed=2), 50))


def test_the_corpus_is_the_same_on_every_machine(splits):
    text = "".join(f"{each.source}\t{each.target}\n" for each in splits["train"] + splits["test"])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "78d655f5b6cc"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(corpus.KINDS)), st.randoms(use_true_random=False))
def test_what_is_drawn_can_be_said(kind, rng):
    value, wording = corpus.KINDS[kind][0](rng)
    phrase = corpus.phrase(kind, value, wording)
    for text in (phrase.source, phrase.target):
        assert text == " ".join(text.split()) and not any(c.isdigit() or c in ",;." for c in text)
    if kind == "number":
        assert 0 <= value[0] <= corpus.LARGEST
    elif kind == "date":
        year, month, day = value
        assert year == 0 or 1100 <= year <= 2099
        assert 1 <= day <= calendar.monthrange(year or corpus.LEAP_YEAR, month)[1]
    elif kind == "price":
        assert value[1:] != (0, 0) and value[2] < 100


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_german_puts_units_before_tens(n):
    """Reads the German back, with a reader that knows nothing of num2words."""
    assert _read_german(corpus.german(n)) == n


UNITS = "null ein zwei drei vier fünf sechs sieben acht neun".split()
TEENS = "zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn".split()
TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def _read_german(text):
    if text in ("null", "eine Milliarde"):
        return {"null": 0, "eine Milliarde": 10**9}[text]
    total = 0
    words = text.split()
    if len(words) > 1:
        assert words[1] == ("Million" if words[0] == "eine" else "Millionen")
        total = 10**6 * (1 if words[0] == "eine" else _read_below_million(words[0]))
        words = words[2:]
    return total + (_read_below_million(words[0]) if words else 0)


def _read_below_million(word):
    thousands, separator, rest = word.rpartition("tausend")
    return 1000 * _read_below_thousand(thousands) * bool(separator) + _read_below_thousand(rest)


def _read_below_thousand(word):
    hundreds, separator, rest = word.rpartition("hundert")
    total = 100 * UNITS.index(hundreds) if separator else 0
    if not rest:
        return total
    if rest in TEENS:
        return total + 10 + TEENS.index(rest)
    unit, und, ten = rest.rpartition("und")
    if ten in TENS:
        return total + 20 + 10 * TENS.index(ten) + (UNITS.index(unit) if und else 0)
    return total + UNITS.index("ein" if rest == "eins" else rest)


def command(*options):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "make_numbers_corpus.py"), *map(str, options)],
        capture_output=True,
        text=True,
    )


def test_command_writes_the_corpus_and_overwrites_nothing(tmp_path, splits):
    sizes = ("--train", 20, "--valid", 5, "--test", 5)
    assert command("--out", tmp_path / "a", *sizes).returncode == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        f"{split}.{language}" for split in SIZES for language in ("en", "de")
    )
    english = (tmp_path / "a" / "test.en").read_text(encoding="utf-8").splitlines()
    assert english == [each.source for each in splits["test"][:5]]

    again = command("--out", tmp_path / "a", *sizes)
    assert again.returncode != 0
    assert "--overwrite" in again.stderr.splitlines()[-1]
    assert command("--out", tmp_path / "a", *sizes, "--seed", 2, "--overwrite").returncode == 0
    assert english != (tmp_path / "a" / "test.en").read_text(encoding="utf-8").splitlines()


def test_command_refuses_an_empty_split(tmp_path):
    refused = command("--out", tmp_path / "a", "--train", 0)
    assert refused.returncode != 0
    assert "--train 0" in refused.stderr and not (tmp_path / "a").exists()
