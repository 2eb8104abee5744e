"""Reading stored rows with their digests checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from holdfast.codec import rows
from holdfast.codec.streams import STREAM_BITS, Source
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from holdfast.backends.base import Backend, Reader


_KEPT = 512
"""Rows that are kept in memory."""


def seal_blob(digest: bytes, flat: bytes) -> bytes:
    return rows.seal(rows.BLOB, rows.blob_address(digest), flat, level=rows.DENSE)


class StoredSource(Source):
    """Items and blobs of a store, in one consistent view that is opened when first needed."""

    __slots__ = ("_backend", "_cache", "_opened", "_reader")

    def __init__(self, backend: Backend, reader: Reader | None = None) -> None:
        self._backend = backend
        self._reader = reader
        self._opened: AbstractContextManager[Reader] | None = None
        self._cache: dict[int, rows.ItemRow] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._opened is not None:
            opened, self._opened, self._reader = self._opened, None, None
            opened.__exit__(*error)  # type: ignore[arg-type] # which may raise the error in our own words

    @property
    def reader(self) -> Reader:
        if self._reader is None:
            self._opened = self._backend.reader()
            self._reader = self._opened.__enter__()
        return self._reader

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, rows.ItemRow]]:
        for first, body in self.reader.items(stream, start, stop):
            address = stream << STREAM_BITS | first
            row = self._cache.get(address)
            if row is None:
                row = rows.unseal_items(address, body, f"item {first} of stream {stream}")
                if len(self._cache) >= _KEPT:
                    self._cache.clear()
                self._cache[address] = row
            yield first, row

    def blob(self, digest: bytes, size: int) -> bytes:
        body = self.reader.blob(digest)
        if body is None:
            raise Corrupt(f"blob {digest.hex()[:12]} is missing")
        _, flat = rows.unseal(
            rows.BLOB, rows.blob_address(digest), body, f"blob {digest.hex()[:12]}"
        )
        if len(flat) != size:
            raise Corrupt(f"blob {digest.hex()[:12]} has not the size it should have")
        return flat

    def blob_state(self, digest: bytes, size: int) -> str:
        """Whether a blob can be shared: "absent", "sound" or "damaged"."""
        if self.reader.blob(digest) is None:
            return "absent"
        try:
            self.blob(digest, size)
        except Corrupt:
            return "damaged"
        return "sound"
