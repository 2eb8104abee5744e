"""The contract that every backend must pass, for use with pytest.

    from holdfast.testing import BackendContract, StoreContract

    class TestMyBackend(BackendContract):
        def make_backend(self, folder):
            return MyBackend(folder)

    class TestMyStores(StoreContract):
        def open_store(self, folder):
            return Store(MyBackend(folder))

`make_backend` and `open_store` are called again with the same folder to reopen what is there; a
backend that keeps nothing (`durable = False`) is not asked to. docs/writing_a_backend.md shows a
backend, and explains the other attributes.
"""

from holdfast.testing.backend import BackendContract
from holdfast.testing.store import StoreContract

__all__ = ["BackendContract", "StoreContract"]
