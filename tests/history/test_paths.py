"""Paths in a state mean the same everywhere."""

import pytest

import holdfast
from holdfast.errors import InvalidRequest


@pytest.fixture
def session():
    with holdfast.open("memory:") as store:
        yield store.session("s")


def test_a_path_with_dots_that_means_two_places_is_refused(session):
    session.save({"a.b": [1], "a": {"b": [2], "c.d": 3}, "x.y": 4})
    for act in (
        lambda: session.append("a.b", 5),
        lambda: session.patch(set={"a.b": 5}),
        lambda: session.patch(drop=["a.b"]),
        lambda: session.load(path="a.b"),
        lambda: session.part("a.b"),
        lambda: session.items("a.b"),
        lambda: session.blame("a.b"),
    ):
        with pytest.raises(InvalidRequest, match="ambiguous"):
            act()
    assert len(session) == 1
    session.append(("a.b",), 5)
    session.append(("a", "b"), 6)
    session.append("['a.b']", 7)
    assert session.load() == {"a.b": [1, 5, 7], "a": {"b": [2, 6], "c.d": 3}, "x.y": 4}
    assert session.load(path=("a.b",)) == [1, 5, 7]
