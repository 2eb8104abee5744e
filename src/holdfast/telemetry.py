"""OpenTelemetry: spans and metrics for what sessions do. Needs the extra `otel`.

`instrument(store)` makes the handles that the store gives out from then on tell what they do. A
store that is not instrumented pays nothing.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.errors import Conflict
from holdfast.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from holdfast.checkpoint import Checkpoint
    from holdfast.store import Store


def instrument(
    store: Store,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Tell OpenTelemetry what handles of this store do; without providers, the global ones."""
    from opentelemetry import metrics, trace  # heavy, and only here

    tracer = trace.get_tracer("holdfast", tracer_provider=tracer_provider)
    meter = metrics.get_meter("holdfast", meter_provider=meter_provider)
    observer = Observer(tracer, meter, store.backend.name)

    class Observed(_Observed):
        _observer = observer

    store.session_type = Observed


class Observer:
    """The instruments, made once for each store."""

    def __init__(self, tracer: Any, meter: Any, backend: str) -> None:
        self._tracer = tracer
        self._common = {"holdfast.backend": backend}
        self._duration = meter.create_histogram(
            "holdfast.duration", unit="s", description="How long saves and loads take."
        )
        self._added = meter.create_counter(
            "holdfast.written", unit="By", description="Bytes of state that checkpoints wrote."
        )
        self._conflicts = meter.create_counter(
            "holdfast.conflicts", description="Saves that met another head, name or key."
        )

        self._leases = meter.create_counter(
            "holdfast.leases", description="Sessions taken, resumed, lost or given back by runs."
        )

    def lease(self, event: str) -> None:
        self._leases.add(1, self._common | {"holdfast.event": event})

    @contextmanager
    def watch(self, what: str, session: Session) -> Iterator[dict[str, Any]]:
        """One call: a span, its duration, and whether it met a conflict."""
        about = self._common | {"holdfast.operation": what}
        noted: dict[str, Any] = {}
        started = time.perf_counter()
        with self._tracer.start_as_current_span(
            f"holdfast.{what}", attributes=about | {"holdfast.session": session.name}
        ) as span:
            try:
                yield noted
            except Conflict as e:
                self._conflicts.add(1, about | {"error.type": type(e).__name__})
                raise
            finally:
                span.set_attributes(noted)
                self._duration.record(time.perf_counter() - started, about)

    def saved(self, checkpoint: Checkpoint, noted: dict[str, Any]) -> Checkpoint:
        self._added.add(checkpoint.added, self._common)
        noted["holdfast.checkpoint"] = checkpoint.id
        noted["holdfast.step"] = checkpoint.step
        noted["holdfast.added"] = checkpoint.added
        return checkpoint


class _Observed(Session):
    """A session whose saves and loads are told of."""

    _observer: Observer

    def save(self, state: Any, **options: Any) -> Checkpoint:
        with self._observer.watch("save", self) as noted:
            return self._observer.saved(super().save(state, **options), noted)

    def save_of_run(self, *args: Any) -> Checkpoint:
        with self._observer.watch("save", self) as noted:
            return self._observer.saved(super().save_of_run(*args), noted)

    def lease_event(self, event: str) -> None:
        super().lease_event(event)
        self._observer.lease(event)

    def append(self, path: Any, *items: Any, **options: Any) -> Checkpoint:
        with self._observer.watch("append", self) as noted:
            return self._observer.saved(super().append(path, *items, **options), noted)

    def patch(self, **options: Any) -> Checkpoint:
        with self._observer.watch("patch", self) as noted:
            return self._observer.saved(super().patch(**options), noted)

    def load(self, revision: Any = None, **options: Any) -> Any:
        with self._observer.watch("load", self):
            return super().load(revision, **options)
