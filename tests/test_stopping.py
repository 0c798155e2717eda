"""Where generations end: inside accepted runs, across tokens, in the middle of characters."""

import pathlib
import random

import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.text.stopping import StopRules, TextStream
from acceptmoe_jax.text.tokenizer import Tokenizer
from tests.chat_cases import write_standin

STOP = 99


def decode_bytes(ids) -> str:
    """A decoder whose tokens are bytes; those from 256 on are special and show nothing."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def rules(stop_ids=(), stop_strings=(), max_new_tokens=10**6) -> StopRules:
    return StopRules(frozenset(stop_ids), tuple(stop_strings), max_new_tokens)


def no_text(ids) -> str:
    raise AssertionError("nothing needs decoding without stop strings")


def generate(stop: StopRules, runs, decode=decode_bytes) -> tuple[list[int], str | None]:
    """Feeds runs to `cut` as a generation does."""
    emitted = []
    for run in runs:
        kept, reason = stop.cut(emitted, run, decode)
        emitted += kept
        if reason is not None:
            return emitted, reason
    return emitted, None


def split(tokens: list[int], rng: random.Random) -> list[list[int]]:
    """Random runs of 1 to 6 tokens."""
    runs = []
    while tokens:
        size = rng.randint(1, 6)
        runs.append(tokens[:size])
        tokens = tokens[size:]
    return runs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory: pathlib.Path = tmp_path_factory.mktemp("standin")
    write_standin(directory)
    return Tokenizer.from_directory(directory)


def test_a_run_that_ends_nothing_is_kept_whole():
    assert rules([STOP]).cut([1, 2], [10, 11], no_text) == ((10, 11), None)


def test_a_stop_token_inside_a_run_cuts_what_follows_and_is_emitted():
    run = [10, 11, STOP, 20, 21, 22]
    assert rules([STOP], max_new_tokens=5).cut([], run, no_text) == ((10, 11, STOP), "stop_token")
    assert len(rules([STOP]).cut([], [1, 2, STOP, 3, 4], no_text).kept) == 3


def test_the_limit_cuts_inside_a_run_before_the_stop_token():
    run = [10, 11, STOP, 20, 21, 22]
    assert rules([STOP], max_new_tokens=2).cut([], run, no_text) == ((10, 11), "length")


def test_the_limit_counts_all_runs():
    runs = [[1, 2], [3, 4], [5, 6]]
    assert generate(rules(max_new_tokens=5), runs) == ([1, 2, 3, 4, 5], "length")
    assert generate(rules(max_new_tokens=4), runs) == ([1, 2, 3, 4], "length")


def test_a_stop_token_at_the_limit_counts_as_a_stop_token():
    assert rules([STOP], max_new_tokens=3).cut([1], [2, STOP, 3], no_text).reason == "stop_token"


def test_the_first_of_several_stop_tokens_counts():
    assert rules([98, STOP]).cut([], [1, 98, STOP], no_text).kept == (1, 98)


def test_nothing_more_is_emitted_at_a_limit_already_reached():
    assert rules(max_new_tokens=2).cut([1, 2], [3], no_text) == ((), "length")


def test_a_stop_string_inside_a_run_keeps_the_token_that_completes_it():
    run = list(b"answer\n\nQuestion")
    kept, reason = rules(stop_strings=["\n\n"]).cut([], run, decode_bytes)
    assert (bytes(kept), reason) == (b"answer\n\n", "stop_string")


def test_a_stop_string_may_span_many_runs():
    runs = [[byte] for byte in b"ab\nEND of it"]
    emitted, reason = generate(rules(stop_strings=["zzz", "\nEND"]), runs)
    assert (bytes(emitted), reason) == (b"ab\nEND", "stop_string")


def test_a_stop_string_of_cut_characters_is_found():
    text = "grüße 😀🦜 da"
    for runs in ([[byte] for byte in text.encode()], [list(text.encode())]):
        emitted, reason = generate(rules(stop_strings=["😀🦜"]), runs)
        assert (bytes(emitted).decode(), reason) == ("grüße 😀🦜", "stop_string")


def test_special_tokens_inside_a_stop_string_do_not_hide_it():
    runs = [[ord("S")], *[[300]] * 40, [ord("T")], [ord("x")]]
    assert generate(rules(stop_strings=["ST"]), runs)[1] == "stop_string"


def test_the_earlier_of_stop_token_and_stop_string_counts():
    both = rules([STOP + 200], ["END"])
    assert both.cut([], [*b"END", STOP + 200], decode_bytes) == (tuple(b"END"), "stop_string")
    assert both.cut([], [STOP + 200, *b"END"], decode_bytes) == ((STOP + 200,), "stop_token")


def test_a_stop_string_completed_by_the_last_allowed_token_counts():
    stop = rules(stop_strings=["END"], max_new_tokens=3)
    assert stop.cut([], list(b"ENDx"), decode_bytes) == (tuple(b"END"), "stop_string")
    stop = rules(stop_strings=["END"], max_new_tokens=2)
    assert stop.cut([], list(b"ENDx"), decode_bytes) == (tuple(b"EN"), "length")


def test_only_a_tail_is_decoded_however_long_the_generation():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return decode_bytes(ids)

    rules(stop_strings=["END"]).cut([65] * 10_000, [66, 67], decode)
    assert max(sizes) < 20


def test_splitting_into_runs_changes_nothing(tokenizer):
    text = "stop here, a smäll one 😀 for small <|open|>tests 🦜\n\nstop here END, more\n\n"
    tokens = tokenizer.encode(text)
    rng = random.Random(0)
    for stop_strings in (["\n\n"], ["🦜"], ["here END"], ["never"], ["for small tests", "END"]):
        stop = rules(stop_strings=stop_strings)
        expected = generate(stop, [[token] for token in tokens], tokenizer.decode)
        for _ in range(20):
            assert generate(stop, split(tokens, rng), tokenizer.decode) == expected
        assert (expected[1] is None) == (stop_strings == ["never"])


def test_text_is_cut_before_the_first_stop_string():
    stop = rules(stop_strings=["\n\n", "END"])
    assert stop.trim("a END b\n\n") == "a "
    assert stop.trim("a\n\n END") == "a"
    assert stop.trim("a EN") == "a EN"
    assert rules().trim("END") == "END"


def test_a_stream_adds_up_to_the_text_and_never_shows_half_a_character(tokenizer):
    text = "grüße 😀🦜 <|open|>da \ufffd END of it"
    tokens = tokenizer.encode(text)
    rng = random.Random(1)
    for stop_strings in ([], ["END"], ["😀🦜"], ["EN", "never"], ["\ufffd"]):
        stop = rules(stop_strings=stop_strings)
        whole = stop.trim(tokenizer.decode(tokens))
        for _ in range(20):
            stream = TextStream(tokenizer.decode, stop)
            shown = ""
            for run in split(tokens, rng):
                shown += stream.push(run)
                assert whole.startswith(shown)
            assert shown + stream.finish() == whole


def test_a_stream_shows_bytes_that_never_become_a_character():
    stream = TextStream(decode_bytes, rules())
    assert stream.push([0x41, 0xF0, 0x9F]) == "A"
    assert stream.push([0x42]) == "\ufffdB"
    assert stream.push([0xF0]) == ""
    assert stream.finish() == "\ufffd"


def test_a_stream_holds_back_only_what_may_begin_a_stop_string():
    stream = TextStream(decode_bytes, rules(stop_strings=["END"]))
    assert stream.push(b"a E") == "a "
    assert stream.push(b"N") == ""
    assert stream.push(b"O EN") == "ENO "
    assert stream.push(b"D hidden") == ""
    assert stream.push(b" too") == ""
    assert stream.finish() == ""


def test_a_beginning_of_a_stop_string_is_shown_at_the_end():
    stream = TextStream(decode_bytes, rules(stop_strings=["END"]))
    assert stream.push(b"a EN") + stream.finish() == "a EN"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_user_error(limit):
    with pytest.raises(UserError, match="max_new_tokens should be at least 1"):
        rules(max_new_tokens=limit)


def test_an_empty_stop_string_is_a_user_error():
    with pytest.raises(UserError, match="a stop string cannot be empty"):
        rules(stop_strings=["END", ""])
