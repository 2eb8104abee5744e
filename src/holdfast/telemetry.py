"""OpenTelemetry spans and metrics for saves, loads and leases. Needs the extra `otel`.

Call `instrument(store)` once. A store that is not instrumented has no overhead.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from holdfast.errors import Conflict
from holdfast.storage.repository import Observer
from holdfast.store import repository_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from holdfast.store import Store


def instrument(
    store: Store,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Record spans and metrics of all operations of this store.

    Without providers, the global ones of OpenTelemetry are used.
    """
    from opentelemetry import metrics, trace  # slow to import, so only when needed

    tracer = trace.get_tracer("holdfast", tracer_provider=tracer_provider)
    meter = metrics.get_meter("holdfast", meter_provider=meter_provider)
    repository = repository_of(store)
    observer = Telemetry(tracer, meter, repository.backend.name)
    repository.observers = (*repository.observers, observer)


class Telemetry(Observer):
    """Creates the spans and metrics of one store."""

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
        self._span: ContextVar[Any] = ContextVar("holdfast span", default=None)

    def lease(self, session: str, event: str) -> None:  # noqa: ARG002
        """Count a lease event."""
        self._leases.add(1, self._common | {"holdfast.event": event})

    @contextmanager
    def measure(self, operation: str, session: str) -> Iterator[None]:
        """Make a span for one call, record its duration, and count a conflict."""
        about = self._common | {"holdfast.operation": operation}
        started = time.perf_counter()
        named = about | {"holdfast.session": session, "gen_ai.conversation.id": session}
        with self._tracer.start_as_current_span(f"holdfast.{operation}", attributes=named) as span:
            token = self._span.set(span)
            try:
                yield
            except Conflict as e:
                self._conflicts.add(1, about | {"error.type": type(e).__name__})
                raise
            finally:
                self._span.reset(token)
                self._duration.record(time.perf_counter() - started, about)

    def committed(self, session: str, checkpoint: Any) -> None:  # noqa: ARG002
        """Count the bytes of a checkpoint, and describe it on the current span."""
        self._added.add(checkpoint.added, self._common)
        span = self._span.get()
        if span is not None:
            span.set_attributes(
                {
                    "holdfast.checkpoint": checkpoint.id,
                    "holdfast.step": checkpoint.step,
                    "holdfast.added": checkpoint.added,
                }
            )
