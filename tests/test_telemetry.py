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


def test_spans_and_metrics() -> None:
    spans, numbers = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
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
    assert first["holdfast.session"] == "s"
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
