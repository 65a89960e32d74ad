"""Cleaning of a parallel corpus, pair by pair: what is dropped is counted."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Iterator, Set, Tuple

Pair = Tuple[str, str]

_NO_LETTERS = re.compile(r"[\W_]+")
#: Why a pair is dropped, in the order in which it is looked at.
REASONS = ("empty", "too long", "ratio", "in a test set", "duplicate")


class CorpusError(ValueError):
    """A corpus that cannot be used, and what to do."""


@dataclass(frozen=True)
class Rules:
    """What is kept.

    Attributes:
        max_words: words (between spaces) in either sentence, at most.
        max_ratio: words of the longer sentence over those of the shorter, at most.
    """

    max_words: int = 250
    max_ratio: float = 2.0


def find(prefix: Path, language: str) -> Path:
    """PREFIX.LANGUAGE, or the same with .gz.

    Raises:
        CorpusError: neither is there.
    """
    for ending in ("", ".gz"):
        path = Path(f"{prefix}.{language}{ending}")
        if path.exists():
            return path
    raise CorpusError(f"there is no {prefix}.{language} and no {prefix}.{language}.gz")


def read_lines(path: Path) -> Iterator[str]:
    """Lines end at a newline only: corpora from the web have other separators within sentences.

    Raises:
        CorpusError: it is compressed and not whole.
    """
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")
    with opened as file:
        try:
            for line in file:
                yield line.decode("utf-8", errors="replace").rstrip("\r\n")
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            if path.suffix != ".gz":
                raise
            raise CorpusError(f"{path} is broken or not complete ({error}); get it again") from None


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """Pairs of lines.

    Raises:
        CorpusError: one file has more lines than the other.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(contextlib.closing(read_lines(path))) for path in (source, target)]
        for number, pair in enumerate(itertools.zip_longest(*files), start=1):
            if None in pair:
                shorter = source if pair[0] is None else target
                raise CorpusError(
                    f"{shorter} ends after {number - 1:,} lines, {source} and {target} are no pair"
                )
            yield pair


def normal(line: str) -> str:
    """Single spaces, none at the ends."""
    return " ".join(line.split())


def _digest(text: str) -> int:
    # 8 bytes instead of the text: 40 million pairs fit into memory, and collide with a probability of 1e-4.
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def letters(line: str) -> str:
    """What is compared with test sets: letters and digits, without case."""
    return _NO_LETTERS.sub("", line.casefold())


@dataclass
class HeldOut:
    """The sentences of validation and test sets; training on either side of one of them is cheating."""

    sources: Set[int] = field(default_factory=set)
    targets: Set[int] = field(default_factory=set)

    def add(self, pairs: Iterable[Pair]) -> None:
        for source, target in pairs:
            self.sources.add(_digest(letters(source)))
            self.targets.add(_digest(letters(target)))

    def has(self, source: str, target: str) -> bool:
        return _digest(letters(source)) in self.sources or _digest(letters(target)) in self.targets


@dataclass
class Cleaner:
    """Keeps what it has seen, so that a pair is kept once in all of the corpora that it is given.

    Attributes:
        counts: how many pairs were read, kept, and dropped for which reason.
    """

    rules: Rules
    held_out: HeldOut
    counts: Counter = field(default_factory=Counter)
    seen: Set[int] = field(default_factory=set)

    def clean(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for source, target in pairs:
            source, target = normal(source), normal(target)
            self.counts["read"] += 1
            reason = self._reason(source, target)
            if reason is None:
                self.counts["kept"] += 1
                yield source, target
            else:
                self.counts[reason] += 1

    def _reason(self, source: str, target: str):
        if not source or not target:
            return "empty"
        # Normal lines have one space between words.
        shorter, longer = sorted((source.count(" ") + 1, target.count(" ") + 1))
        if longer > self.rules.max_words:
            return "too long"
        if longer > self.rules.max_ratio * shorter:
            return "ratio"
        if self.held_out.has(source, target):
            return "in a test set"
        key = _digest(f"{source}\t{target}")
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        return None
