"""What a generated task is, and the rule that puts it into the training or the test split."""

import dataclasses
import hashlib
import re

TEST_SHARE = 1 / 16


@dataclasses.dataclass(frozen=True)
class Record:
    """One task with its reference solution.

    Attributes:
      family: one of `families.FAMILIES`.
      prompt: the user's message.
      completion: the assistant's message, a deterministic function of the prompt.
      answer: the final number or boxed text; for the code families the reference code.
    """

    family: str
    prompt: str
    completion: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A record and the split it belongs to, which depends on the prompt alone."""

    record: Record
    in_test: bool


def hash_share(key: str) -> float:
    """Maps a string to [0, 1), equal in every process and on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


def numbers_in_test(prompt: str) -> bool:
    """Whether the numbers of a prompt, in their order, belong to the test split.

    The wording is left out on purpose: a test problem is new in its numbers, and never a trained
    problem with another name or phrasing.
    """
    return hash_share(" ".join(re.findall(r"\d+", prompt))) < TEST_SHARE
