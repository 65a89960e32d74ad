"""Strings of bits with as many odd as even ones, each a function of its place alone.

Everything comes from hashes of ``(seed, split, epoch, index)``: no files, no state, and the same strings
on every machine, worker and version of anything.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

SPLITS = ("train", "valid", "test")
#: Strings of up to this many bits are too few to be divided; longer ones belong to one split each.
SHARED_LENGTH = 6


def parity(bits: str) -> int:
    """0 for an even number of ones, 1 for an odd one."""
    return bits.count("1") % 2


def split_of(bits: str) -> str:
    """The split that a string of more than ``SHARED_LENGTH`` bits belongs to: of ten, one to validation
    and one to testing."""
    tenth = _hashed(f"split {bits}", 8) % 10
    return {0: "valid", 1: "test"}.get(tenth, "train")


@dataclass(frozen=True)
class ParityStrings:
    """A sequence of ``size`` strings such as ``"0110"``; those at odd indices are odd.

    Attributes:
        split: one of ``SPLITS``.
        min_length, max_length: bits; a length is drawn uniformly from them, both included.
        size: number of strings.
        seed: of the draws. Which split a string belongs to does not depend on it.
        epoch: ``train`` has new strings in each.
    """

    split: str
    min_length: int
    max_length: int
    size: int
    seed: int = 1
    epoch: int = 1

    def __len__(self) -> int:
        return self.size

    def length(self, index: int) -> int:
        """Bits of string ``index``, without drawing them."""
        choices = self.max_length - self.min_length + 1
        return self.min_length + self._draw(index, "length", 8) % choices

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self.size:
            raise IndexError(index)
        length = self.length(index)
        for attempt in itertools.count():
            drawn = self._draw(index, attempt, length // 8 + 1)
            bits = format(drawn, "b").zfill(length)[-length:]
            # The last bit makes it odd or even: uniform over the strings of that class.
            bits = bits[:-1] + str(parity(bits[:-1]) ^ index % 2)
            if length <= SHARED_LENGTH or split_of(bits) == self.split:
                return bits
        raise AssertionError("unreachable")

    def _draw(self, index: int, what, size: int) -> int:
        return _hashed(f"{self.seed} {self.split} {self.epoch} {index} {what}", size)


@dataclass(frozen=True)
class AllStrings:
    """Every string of ``max_length`` bits, once."""

    max_length: int

    def __len__(self) -> int:
        return 2**self.max_length

    def length(self, index: int) -> int:
        return self.max_length

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return format(index, "b").zfill(self.max_length)


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(hashlib.shake_128(text.encode()).digest(size), "big")
