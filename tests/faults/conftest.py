"""What makes campaigns on plain files cheaper."""

import functools

import pytest

from holdfast.storage.files import item_files, row_json


@pytest.fixture
def parsed_once(monkeypatch):
    """Files are read as often as ever, but what is in them is parsed once.

    Damaged stores have most of their files in common, and parsing those was half of a check.
    """
    for module, name in ((row_json, "hide_checkpoint"), (item_files, "hide")):
        monkeypatch.setattr(module, name, functools.lru_cache(8192)(getattr(module, name)))
