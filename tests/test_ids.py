"""Ids as text: 24 characters of an alphabet of 32, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ids

ids_as_bytes = st.binary(min_size=ids.BYTES, max_size=ids.BYTES)


@given(ids_as_bytes)
def test_an_id_comes_back_from_its_text(raw):
    text = ids.to_text(raw)
    assert len(text) == ids.CHARS
    assert set(text) <= set(ids.ALPHABET)
    assert ids.from_text(text) == ids.from_text(text.upper()) == raw


@given(ids_as_bytes, ids_as_bytes)
def test_texts_sort_as_the_ids_do(one, other):
    assert (ids.to_text(one) < ids.to_text(other)) == (one < other)


@pytest.mark.parametrize("place", [0, 11, 23])
@pytest.mark.parametrize("wrong", [*"iIlLoOuU_+- ~.\n\0\u00e9\uff10\u0663\u00b2\u017f\u212a\ud800"])
def test_what_is_no_id(wrong, place):
    """Also what Python takes for a digit, a letter, or nothing at all, in a number."""
    text = "0" * ids.CHARS
    assert ids.from_text(text) == bytes(ids.BYTES)
    assert ids.from_text(text[:place] + wrong + text[place + 1 :]) is None


@pytest.mark.parametrize("text", ["", "0" * 23, "0" * 25, "0" * 10_000])
def test_texts_of_another_length_are_none(text):
    assert ids.from_text(text) is None
