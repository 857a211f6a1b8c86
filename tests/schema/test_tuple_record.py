"""A record of a tuple is a tuple that also answers to the keys of a dict."""

import copy
import pickle

import pytest

from diskreplay.schema.spaces import TupleRecord

PAIR = TupleRecord(["x", 5])


def test_it_unpacks_and_answers_to_places_and_keys():
    first, second = PAIR
    assert (first, second) == PAIR == ("x", 5)
    assert [PAIR[0], PAIR["0"], PAIR[-1], PAIR["1"]] == ["x", "x", 5, 5]
    assert PAIR[1:] == (5,)
    assert len(PAIR) == 2


def test_it_has_the_keys_of_a_dict():
    assert dict(PAIR) == {"0": "x", "1": 5}
    assert (PAIR.keys(), PAIR.values(), PAIR.items()) == (("0", "1"), ("x", 5), (("0", "x"), ("1", 5)))
    assert "1" in PAIR
    assert "x" not in PAIR  # a str is a key
    assert 5 in PAIR


@pytest.mark.parametrize("key", ["2", "-1", "01", "x", "", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_key_that_it_has_not_is_a_key_error(key):
    with pytest.raises(KeyError):
        PAIR[key]


def test_a_place_that_it_has_not_is_an_index_error():
    with pytest.raises(IndexError):
        PAIR[2]


def test_copies_are_records_too():
    for other in (copy.copy(PAIR), copy.deepcopy(PAIR), pickle.loads(pickle.dumps(PAIR))):
        assert type(other) is TupleRecord
        assert other == PAIR
