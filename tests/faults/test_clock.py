"""Clocks that stand still or go back."""

import pytest

from holdfast import ids

from . import clock

BACK, STILL = "-400d", "2021-02-03 04:05:06"


@pytest.mark.tools("faketime")
@pytest.mark.parametrize("order", [("now", BACK, "now"), ("now", STILL), (STILL, BACK, STILL)])
def test_order_in_processes_whose_clocks_disagree(tmp_path, order):
    url = str(tmp_path / "agent.db")
    ids = []
    for setting in order:
        saved = clock.save_some(url, setting) if setting == "now" else []
        ids += saved or clock.save_under(setting, url, setting)
    assert not clock.findings(url, ids, list(order))


@pytest.mark.parametrize(
    "now",
    [lambda true: true - 400 * 86400, lambda true: 1_700_000_000.0, lambda true: 2e9 - true],
    ids=["set back", "frozen", "running backwards"],
)
def test_order_in_one_process(tmp_path, now):
    url = str(tmp_path / "agent.db")
    ids = clock.save_some(url, "before")
    with clock.wall_clock(now):
        ids += clock.save_some(url, "meanwhile")
    ids += clock.save_some(url, "after")
    assert not clock.findings(url, ids, ["before", "meanwhile", "after"])


def test_mutant_whose_ids_follow_the_clock_alone(tmp_path, monkeypatch):
    new_id = ids.new_id
    monkeypatch.setattr(ids, "new_id", lambda parent=None: new_id())
    url = str(tmp_path / "agent.db")
    saved = clock.save_some(url, "before")
    with clock.wall_clock(lambda true: true - 400 * 86400):
        saved += clock.save_some(url, "meanwhile")
    found = clock.findings(url, saved, ["before", "meanwhile"])
    assert "the ids do not sort in the order of the saves" in found
