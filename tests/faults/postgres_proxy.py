"""A proxy on loopback between a client and PostgreSQL that loses what it should pass on."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

FATES = {
    "lose the question": 4,
    "lose the answer": 8,
    "be late": 4,
    "swallow the answer": 1,
}
"""What may become of a question, and how often compared with the others:

- it is lost: the client is cut off, and the server never gets it;
- its answer is lost: the client is cut off as soon as the server has the question;
- it comes late: the client is cut off, and the server gets it when the client has tried again;
- its answer is swallowed: the server works, and the client hears nothing, not even an end.
"""


CUTS = {fate: often for fate, often in FATES.items() if "swallow" not in fate}
"""Those which the client need not wait for."""


class Proxy:
    """Passes everything on, but for one question in `every`."""

    def __init__(
        self, port: int, *, every: int, seed: int = 0, fates: Mapping[str, int] = FATES
    ) -> None:
        self.fates: Counter[str] = Counter()
        self._among = [fate for fate, often in fates.items() for _ in range(often)]
        self.swallowed = 0  # answers
        self._deck: list[str] = []
        self._port, self._every = port, every
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def _spawn(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            deaf = threading.Event()
            self._spawn(self._questions, client, server, deaf)
            self._spawn(self._answers, client, server, deaf)

    def _questions(
        self, client: socket.socket, server: socket.socket, deaf: threading.Event
    ) -> None:
        asked = 0
        with suppress(OSError):
            while data := client.recv(1 << 16):
                asked += 1
                fate = self._fate() if asked > 3 else ""  # let it say who it is
                self.fates[fate] += 1
                if fate == "lose the question":
                    break
                if fate == "be late":
                    self._cut(client)
                    time.sleep(self._rng.uniform(0.0, 0.1))
                if fate == "swallow the answer":
                    deaf.set()
                server.sendall(data)
                if fate in ("lose the answer", "be late"):
                    self._cut(client)
                    time.sleep(0.3)  # the server may finish what it has
                    break
        if not deaf.is_set():
            self._cut(client)
        self._cut(server)

    def _answers(self, client: socket.socket, server: socket.socket, deaf: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if not deaf.is_set():
                    client.sendall(data)
                else:
                    self.swallowed += 1
        if not deaf.is_set():
            self._cut(client)

    def _fate(self) -> str:
        with self._lock:
            if self._every and not self._rng.randrange(self._every):
                if not self._deck:  # each as often as it should be, sooner or later
                    self._deck = self._rng.sample(self._among, len(self._among))
                return self._deck.pop()
        return ""

    @staticmethod
    def _cut(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
