"""What OpenTelemetry is told."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import holdfast
from holdfast import telemetry


def providers() -> tuple[InMemorySpanExporter, TracerProvider, InMemoryMetricReader]:
    spans, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    return spans, tracers, InMemoryMetricReader()


def test_spans_and_metrics() -> None:
    spans, tracers, numbers = providers()
    with holdfast.open("memory:") as store:
        telemetry.instrument(store, tracers, MeterProvider([numbers]))
        session = store.session("s")
        saved = session.save({"n": 1})
        session.append("log", 1)
        session.patch(set={"n": 2})
        session.fork("f").save({"n": 3})
        assert session.load() == {"n": 2, "log": [1]}
        other = store.session("s")
        other.save({})
        with pytest.raises(holdfast.HeadMoved):
            session.save({"n": 4})
    told = spans.get_finished_spans()
    assert [s.name.removeprefix("holdfast.") for s in told] == [
        "save", "append", "patch", "save", "load", "save", "save",
    ]  # fmt: skip
    first = dict(told[0].attributes or {})
    assert first["holdfast.session"] == first["gen_ai.conversation.id"] == "s"
    assert first["holdfast.backend"] == "memory"
    assert first["holdfast.checkpoint"] == saved.id
    assert not told[-1].status.is_ok
    metrics = _by_name(numbers)
    assert sum(point.count for point in metrics["holdfast.duration"]) == 7
    assert sum(point.value for point in metrics["holdfast.written"]) > 0
    [conflict] = metrics["holdfast.conflicts"]
    assert conflict.value == 1
    assert conflict.attributes["error.type"] == "HeadMoved"


def _by_name(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_a_store_that_is_not_instrumented_has_plain_sessions() -> None:
    with holdfast.open("memory:") as store:
        assert type(store.session("s")) is holdfast.Session


def test_runs_are_told_of() -> None:
    spans, tracers, numbers = providers()
    with holdfast.open("memory:") as store:
        telemetry.instrument(store, tracers, MeterProvider([numbers]))
        session = store.session("s")
        with session.run() as run:
            with pytest.raises(holdfast.SessionBusy), session.run():
                pass
            run.state["n"] = 1
            run.halt("later")
        with pytest.raises(holdfast.Fenced), session.run() as run:
            with session.run(takeover=True):
                pass
            run.step("late", lambda: 1)
    events = {p.attributes["holdfast.event"]: p.value for p in _by_name(numbers)["holdfast.leases"]}
    assert events == {"taken": 1, "busy": 1, "given back": 2, "resumed": 1, "taken over": 1}
    # The state to begin with, and what two runs ended with; one that is fenced saves nothing.
    assert [s.name for s in spans.get_finished_spans()] == ["holdfast.save"] * 3
