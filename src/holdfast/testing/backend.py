"""The contract of backends: the tables, and the batches that the library makes of them."""

from __future__ import annotations

from holdfast.testing.changes import ChangesContract
from holdfast.testing.tables import TablesContract


class BackendContract(TablesContract, ChangesContract):
    """All that the library relies on. A subclass makes the backend, and pytest runs the tests."""
