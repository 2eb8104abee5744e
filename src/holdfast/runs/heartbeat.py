"""Heartbeats: one thread per store renews the leases of this process."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.history.leases import TTL
from holdfast.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.contract import Backend


INTERVAL = TTL / 3
"""Seconds between renewals: a third of the time after which a lease expires."""


class Heartbeat:
    """Renews leases of one backend. Its thread runs only while there are leases."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all leases; also used in a forked child, where the thread does not exist."""
        self._lock = threading.Lock()
        self._leases: dict[bytes, tuple[Backend, int, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def begin(self, token: bytes, backend: Backend, session: int, lost: Callable[[], None]) -> None:
        """Renew a lease from now on. Call `lost` once if another worker has taken it over."""
        with self._lock:
            self._leases[token] = (backend, session, lost)
            if self._thread is None:
                self._changed.clear()
                self._thread = threading.Thread(
                    target=self._beat, name="holdfast leases", daemon=True
                )
                self._thread.start()

    def end(self, token: bytes) -> None:
        """Stop renewing a lease."""
        with self._lock:
            self._leases.pop(token, None)
            if not self._leases:
                self._changed.set()

    def _beat(self) -> None:
        """Renew all leases every INTERVAL seconds, until none is left. Runs in the thread."""
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
                except InvalidRequest:  # the store is closed
                    self.end(token)
                    continue
                except HoldfastError as e:
                    logger.warning("a lease was not renewed: %s", e.message)
                    continue
                with self._lock:
                    ours = self._leases.pop(token, None)
                if ours is not None:
                    lost()


class _Heartbeats:
    """One Heartbeat per backend, so that a backend which hangs does not delay the others."""

    def __init__(self) -> None:
        self._all: weakref.WeakKeyDictionary[Backend, Heartbeat] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, backend: Backend) -> Heartbeat:
        """Return the Heartbeat of a backend."""
        with self._lock:
            return self._all.setdefault(backend, Heartbeat())

    def reset(self) -> None:
        """Reset all in a forked child, where their threads do not exist."""
        self._lock = threading.Lock()
        for heartbeat in list(self._all.values()):
            heartbeat.reset()


_heartbeats = _Heartbeats()
heartbeat_of = _heartbeats.of

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_heartbeats.reset)
