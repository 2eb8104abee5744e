"""The chart: disk space and save time by number of messages."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from .growth import Growth

OURS, THEIRS, PLAIN = "#0f766e", "#c2410c", "#94a3b8"


def draw(growth: Growth, path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes in (left, right):
        axes.set_xlabel("messages in the conversation, a checkpoint after each")
        axes.set_yscale("log")
        axes.set_xlim(0, growth.steps * 1.02)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(visible=True, which="major", color="#e2e8f0")
        axes.spines[["top", "right"]].set_visible(False)
    _disk(left, growth)
    _latency(right, growth)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _disk(axes: Axes, growth: Growth) -> None:
    axes.set_title("Disk used (closed store)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MB"))
    for label, color, style, sizes in (
        ("LangGraph SqliteSaver", THEIRS, "-", growth.peer_disk),
        ("the conversation as JSON", PLAIN, "--", growth.json),
        ("holdfast", OURS, "-", growth.disk),
    ):
        steps = sorted(sizes)
        axes.plot(steps, [sizes[n] / 1e6 for n in steps], style, color=color, label=label, lw=2)
    axes.legend(frameon=False, loc="lower right")


def _latency(axes: Axes, growth: Growth) -> None:
    axes.set_title("Time of one durable checkpoint (median)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ms"))
    width = max(1, growth.steps // 40)
    for label, color, style, series in (
        ("LangGraph SqliteSaver, put", THEIRS, "-", growth.put),
        ("holdfast, save of the full state", OURS, "-", growth.save),
        ("holdfast, append", OURS, ":", growth.append),
    ):
        starts = range(0, len(series) - width + 1, width)
        medians = [statistics.median(series[i : i + width]) * 1e3 for i in starts]
        axes.plot([i + width / 2 for i in starts], medians, style, color=color, label=label, lw=2)
    axes.set_ylim(top=axes.get_ylim()[1] * 5)
    axes.legend(frameon=False, loc="upper right")
