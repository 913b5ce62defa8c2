"""Draws: the numbers are stated by their algorithms, and depend on keys and counters alone."""

import numpy as np

from pipeline.data.rng import choose, generator, permutation, stream_key, uniforms


def keys(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_the_key_of_a_stream_never_changes():
    assert stream_key(1, "airline", 7) == 8750891731047941167
    assert stream_key() == 0xB4B2797457A0A6E4


def test_parts_of_a_key_differ_by_place_and_type():
    parts = [(1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("12",), (1, 2, ""), ()]
    assert len({stream_key(*part) for part in parts}) == len(parts)


def test_numbers_are_the_published_ones_of_splitmix64():
    """The first outputs for the seeds 0 and 1234567 of the reference implementation."""
    assert uniforms(keys(0), np.array([0])) == (0xE220A8397B1DCDAF >> 11) / 2**53
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    drawn = uniforms(keys(1234567), np.arange(5))
    assert drawn.tolist() == [number // 2**11 / 2**53 for number in published]


def test_a_permutation_is_known_and_holds_every_index_once():
    assert permutation(8, 1, "train", "pass", 0) == [6, 5, 2, 7, 4, 3, 0, 1]
    assert permutation(8, 1, "train", "pass", 1) != permutation(8, 1, "train", "pass", 0)
    assert sorted(permutation(1000, "x")) == list(range(1000))
    assert permutation(0, "x") == []


def test_a_generator_is_the_same_for_the_same_parts():
    assert generator(1, "tasks").random() == 0.8483393259274958
    assert generator(1, "tasks").random() != generator(2, "tasks").random()


def test_choose_takes_the_item_in_whose_share_the_number_falls():
    numbers = [0.0, 0.24, 0.25, 0.74, 0.75, 0.999999]
    drawn = [choose(["a", "b", "c"], [1, 2, 1], number) for number in numbers]
    assert drawn == ["a", "a", "b", "b", "c", "c"]
    assert choose(["a", "b"], [0, 3], 0.0) == "b"
    assert choose(["a", "b"], [0.1, 0.2], 1 - 2**-53) == "b"
