"""Signs of life: a thread for each store, which renews the leases of this process there."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.leases import TTL
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.backends.base import Backend


INTERVAL = TTL / 3


class Heart:
    """Beats while there is something to beat for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[bytes, tuple[Backend, int, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def begin(self, token: bytes, backend: Backend, session: int, lost: Callable[[], None]) -> None:
        """Renew a lease from now on; `lost` is called once it turns out to be another's."""
        with self._lock:
            self._leases[token] = (backend, session, lost)
            if self._thread is None:
                self._changed.clear()
                self._thread = threading.Thread(
                    target=self._beat, name="holdfast leases", daemon=True
                )
                self._thread.start()

    def end(self, token: bytes) -> None:
        with self._lock:
            self._leases.pop(token, None)
            if not self._leases:
                self._changed.set()

    def _beat(self) -> None:
        while True:
            self._changed.wait(INTERVAL)
            with self._lock:
                self._changed.clear()
                if not self._leases:
                    self._thread = None
                    return
                known = list(self._leases.items())
            for token, (backend, session, lost) in known:
                try:
                    if backend.renew(session, token):
                        continue
                except HoldfastError as e:
                    logger.warning("a lease was not renewed: %s", e.message)
                    continue
                with self._lock:
                    ours = self._leases.pop(token, None)
                if ours is not None:
                    lost()


class _Hearts:
    """Each backend has its own: one that does not answer must not keep the others waiting."""

    def __init__(self) -> None:
        self._all: weakref.WeakKeyDictionary[Backend, Heart] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, backend: Backend) -> Heart:
        with self._lock:
            return self._all.setdefault(backend, Heart())

    def reset(self) -> None:
        """In a forked child, where the threads are not."""
        self._lock = threading.Lock()
        for heart in list(self._all.values()):
            heart.reset()


_hearts = _Hearts()
heart_of = _hearts.of

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hearts.reset)
