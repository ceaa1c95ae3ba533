"""What is guessed from a text that repeats itself."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.decode.speculation import Guess, PromptLookup


def _guess(ids: list[int], most: int = 5) -> Guess:
    guess = PromptLookup(ids).guess(most)
    assert guess is not None
    return guess


def test_the_place_that_agrees_longest_counts_and_of_equals_the_latest() -> None:
    assert _guess([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], 1).ids == (50,)
    assert _guess([1, 2, 50, 1, 2, 60, 9, 1, 2], 1).ids == (60,)


def test_chances_fall_along_a_guess_and_rise_with_what_agrees() -> None:
    short, long = _guess([1, 2, 3, 4, 5, 9, 1, 2]), _guess([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5])
    assert list(short.chances) == sorted(short.chances, reverse=True)
    assert all(0 < chance < 1 for chance in short.chances)
    assert long.chances[0] > short.chances[0]


def test_what_came_true_is_learned() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 1, 2])
    guess = lookup.guess(3)
    assert guess is not None
    for _ in range(20):
        lookup.learn(guess, 0)
    worse = lookup.guess(3)
    assert worse.chances[0] < 0.1 < guess.chances[0]
    for _ in range(200):
        lookup.learn(guess, 3)
    better = lookup.guess(3)
    assert better.chances[0] > 0.8


@given(ids=st.lists(st.integers(0, 3), max_size=60), most=st.integers(1, 8))
def test_a_guess_is_a_continuation_of_a_place_like_the_end(ids: list[int], most: int) -> None:
    guess = PromptLookup(ids).guess(most)
    pairs = [(ids[at], ids[at + 1]) for at in range(len(ids) - 2)]
    assert (guess is not None) == (len(ids) > 1 and (ids[-2], ids[-1]) in pairs)
    if guess is None:
        return
    assert len(guess.ids) == len(guess.chances) == most
    text = [*ids, *guess.ids]
    places = [at for at in range(2, len(ids)) if ids[at - 2 : at] == ids[-2:]]
    assert any(text[at : at + most] == list(guess.ids) for at in places)
