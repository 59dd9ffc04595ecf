from hypothesis import given
from hypothesis import strategies as st

from engine_svc.frontend.text.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What goes out for each piece, and the stop that matched."""
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        match = matcher.feed(piece)
        out.append(match.text)
        if match.stop is not None:
            return out, match.stop
    return [*out, matcher.flush()], None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the match that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text("ab", min_size=1, max_size=4)


@given(stops=st.lists(letters, max_size=4), pieces=st.lists(st.text("ab", max_size=5), max_size=8))
def test_any_cut_of_the_text_gives_the_same_answer(stops: list[str], pieces: list[str]) -> None:
    out, stop = run(stops, pieces)
    assert ("".join(out), stop) == reference(stops, "".join(pieces))


def test_a_stop_matches_across_tokens_and_is_not_part_of_the_text() -> None:
    assert run(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], "END")


def test_only_what_can_become_a_match_is_held_back() -> None:
    assert run(["abc"], ["xab", "d", "a"]) == (["x", "abd", "", "a"], None)


def test_the_match_that_ends_first_wins() -> None:
    assert run(["long one", "lo"], ["a lo", "ng one"]) == (["a "], "lo")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert run(["b", "ab"], ["xab"]) == (["x"], "ab")


def test_without_stops_everything_goes_out_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_a_match_that_ends_before_it_counts_goes_out() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xab", armed=False).text == "xab"
    match = matcher.feed("yab")
    assert (match.text, match.stop) == ("y", "ab")


def test_a_match_may_begin_before_it_counts() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xa", armed=False).text == "x"
    assert matcher.feed("b").stop == "ab"
