"""The report of a run as one page: ``_surge/report.html``, with pictures where matplotlib is there.

    python -m surge_beam.transforms.report_html OUTPUT_DIR

writes the page of the last run that ended again. The page loads nothing: pictures are inline SVG.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import html
import io
import itertools
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from surge_beam.transforms import manifest, stats_files
from surge_beam.transforms.files import Store
from surge_beam.transforms.job import CONFIG
from surge_beam.transforms.read import FILE_LETTERS
from surge_beam.transforms.report import REPORT
from surge_beam.transforms.write import letters_folder, part_name, read_json

PAGE = "_surge/report.html"
LARGEST = 10
LETTERS = 20
LETTER_FILES = 10
MAX_TEXT = 300
# what a picture shows at most, so that its size does not grow with the run
MAX_STEPS = 60
MAX_BARS = 80
MAX_POINTS = 800

_BATCH = np.dtype(
    [
        ("ended", "f8"),
        ("seconds", "f8"),
        ("rows", "i8"),
        ("texts", "i8"),
        ("unique", "i8"),
        ("cached", "i8"),
        ("tokens", "i8"),
        ("padded", "i8"),
        ("peak", "i8"),
        ("bound", "i8"),
    ]
)
_KEYS = (
    *("ended", "seconds", "rows", "texts", "unique_texts", "cached_texts"),
    *("tokens", "padded_tokens", "peak_memory", "memory_bound"),
)


@dataclasses.dataclass
class Figures:
    """What the manifest entries of one run say, in numbers.

    Attributes:
      batches: one row a SuperBatch, or a stretch of decoding, by the time it ended.
      sizes: how many partitions had 0 rows, 1, 2 to 3, 4 to 7, ... by the bits of the row count.
      largest: ``(rows, folder)`` of the largest partitions, largest first.
      letters: ``(folder, part)`` of a few partitions with dead letters.
    """

    batches: np.ndarray
    sizes: dict[int, int]
    largest: list[tuple[int, str]]
    letters: list[tuple[str, int]]

    @property
    def encoded(self) -> np.ndarray:
        """Texts of each SuperBatch that went through the model."""
        return self.batches["unique"] - self.batches["cached"]


def collect(store: Store, run: str) -> Figures:
    """Reads the entries of a run one by one; keeps numbers, and no names but a few."""
    batches, sizes = [], Counter[int]()
    largest: list[tuple[int, str]] = []
    letters: list[tuple[str, int]] = []
    stats = ((header, list[dict[str, Any]]()) for header in stats_files.read(store, run))
    for header, lines in itertools.chain(stats, manifest.entries(store, run=run)):
        if "texts" in header or "decoded" in header:
            batches.append(tuple(header.get(key) or 0 for key in _KEYS))
        if "superbatch" not in header and not header.get("published"):
            continue
        for line in lines:
            if "superbatch" in header and line["dead_letters"] and len(letters) < LETTER_FILES:
                letters.append((line["partition"], line.get("part", 0)))
            if "part_key" in line:
                # counted whole when it is published
                continue
            rows = line["rows"] + line["dead_letters"] + line.get("unreadable", 0)
            sizes[rows.bit_length()] += 1
            keep = heapq.heappush if len(largest) < LARGEST else heapq.heappushpop
            keep(largest, (rows, line["partition"]))
    table = np.array(batches, _BATCH)
    return Figures(
        table[np.argsort(table["ended"], kind="stable")],
        dict(sorted(sizes.items())),
        sorted(largest, reverse=True),
        letters,
    )


def write_html(store: Store, report: dict[str, Any]) -> str:
    """Writes the page of a report and returns its name below the output.

    Args:
      report: as ``build_report`` makes it; what it lacks is left out.
    """
    figures = collect(store, report["run"])
    settings = (read_json(store, CONFIG) or {}).get("settings", {})
    try:
        pictures: dict[str, str] | None = draw(report, figures)
    except ImportError:
        pictures = None
    page = render(report, settings, figures, pictures, _dead_letters(store, report, figures))
    store.put(PAGE, page.encode("utf-8", "replace"))
    return PAGE


def try_write_html(store: Store, report: dict[str, Any]) -> None:
    """Writes the page; a page that cannot be made is a warning, since the job itself ended well."""
    try:
        write_html(store, report)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logging.getLogger(__name__).warning("no report.html: %s", reason)
        with contextlib.suppress(Exception):
            # an earlier run's page would be taken for this one's
            store.remove(PAGE)


def _dead_letters(store: Store, report: dict[str, Any], figures: Figures) -> list[dict[str, Any]]:
    """A few dead letters: of files, and of rows that this run met."""
    if not report.get("dead_letters"):
        return []
    names = [f"{FILE_LETTERS}/{name}" for name in store.names(FILE_LETTERS)[:LETTER_FILES]]
    names += [f"{letters_folder(folder)}/{part_name(part)}" for folder, part in figures.letters]
    found: list[dict[str, Any]] = []
    for name in names:
        if len(found) >= LETTERS:
            break
        with contextlib.suppress(FileNotFoundError), store.fs.open(store.path(name), "rb") as file:
            columns = ["stage", "error", "message", "file", "row", "partition"]
            for batch in pq.ParquetFile(file).iter_batches(LETTERS, columns=columns):
                found += batch.to_pylist()[: LETTERS - len(found)]
                break
    return found


# The pictures. Colours stand for variables of the page, which has them for light and dark.

_INK, _FAINT = "#010200", "#010201"
_BLUE, _ORANGE, _GREEN, _RED = "#010202", "#010203", "#010204", "#010205"
_VARIABLES = {
    _INK: "--ink",
    _FAINT: "--faint",
    _BLUE: "--blue",
    _ORANGE: "--orange",
    _GREEN: "--green",
    _RED: "--red",
}
_USUAL = (0.135, 0.165, 0.84, 0.73)
_WIDE = frozenset({"fate", "prefixes"})
_AXES = {
    **dict.fromkeys(_WIDE, (0.02, 0.42, 0.96, 0.3)),
    "batches": (0.135, 0.165, 0.84, 0.66),
    "sizes": (0.135, 0.165, 0.84, 0.81),
}
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.alpha": 0.5,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw(report: dict[str, Any], figures: Figures) -> dict[str, str]:
    """The pictures that there is something to show on, as SVG elements by name.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    wanted: dict[str, Callable[[Any, dict[str, Any], Figures], None]] = {}
    if report.get("rows_in"):
        wanted["fate"] = _draw_fate
    if len(figures.batches):
        wanted["throughput"] = _draw_throughput
        if figures.batches["texts"].any():
            wanted["batches"] = _draw_batches
        if figures.encoded.any():
            wanted["costs"] = _draw_costs
        if figures.batches["padded"].any():
            wanted["padding"] = _draw_padding
        if figures.batches["peak"].any():
            wanted["memory"] = _draw_memory
    if report.get("prompt_tokens"):
        wanted["prefixes"] = _draw_prefixes
    if figures.sizes:
        wanted["sizes"] = _draw_sizes
    pictures = {}
    for name, plot in wanted.items():
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
            wide = name in _WIDE
            figure = Figure(figsize=(10.6, 1.25) if wide else (5.2, 3.1))
            # margins that are measured would take a second pass over every text
            plot(figure.add_axes(_AXES.get(name, _USUAL)), report, figures)
            pictures[name] = _svg(figure, name)
    return pictures


def _svg(figure: Any, name: str) -> str:
    """A figure as an SVG element whose ids are its own and whose colours are the page's."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    sink = io.StringIO()
    # the canvas itself, since savefig draws everything twice
    FigureCanvasSVG(figure).print_svg(sink, metadata={"Date": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for before in ('id="', 'href="#', "url(#"):
        text = text.replace(before, f"{before}{name}-")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    label = html.escape(_TITLES[name], quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _draw_fate(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    left, total = 0, report["rows_in"]
    for label, rows, colour in _fate(report):
        axes.barh(0, rows, 0.5, left=left, color=colour, label=f"{label}: {rows:,}")
        left += rows
    axes.set(xlim=(0, max(left, total)), ylim=(-0.3, 0.3), yticks=[], xlabel="rows of the input")
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    _ticks(axes.xaxis, _short)
    _legend(axes)


def _fate(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    done = report.get(f"rows_{_done(report)}", 0)
    return [
        (f"{_done(report)} by this run", done, _BLUE),
        ("kept from earlier runs", max(report.get("rows_out", 0) - done, 0), _GREEN),
        ("dead letters", report.get("dead_letters", 0), _RED),
    ]


def _done(report: dict[str, Any]) -> str:
    """What the job did to its rows."""
    return "decoded" if "rows_decoded" in report else "encoded"


def _draw_prefixes(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    total, saved = report["prompt_tokens"], report["prefix_tokens_saved"]
    for label, tokens, left, colour in (
        ("shared, not computed again", saved, 0, _GREEN),
        ("computed", max(total - saved, 0), saved, _BLUE),
    ):
        axes.barh(0, tokens, 0.5, left=left, color=colour, label=f"{label}: {tokens:,}")
    axes.set(xlim=(0, max(total, saved)), ylim=(-0.3, 0.3), yticks=[], xlabel="prompt tokens")
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    _ticks(axes.xaxis, _short)
    _legend(axes)


def _began(report: dict[str, Any], figures: Figures) -> float:
    """When the run began, in the clock of the entries."""
    first = float(figures.batches["ended"][0])
    if _done(report) == "decoded":
        return first - float(figures.batches["seconds"][0])
    return first - (report.get("seconds_to_first_output") or 0.0)


def _draw_throughput(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    began = _began(report, figures)
    ended = figures.batches["ended"] - began
    edges, rates = steps(ended, figures.batches["rows"])
    scale, unit = _clock_unit(float(edges[-1]))
    axes.stairs(rates, edges / scale, fill=True, color=_BLUE, alpha=0.3)
    axes.stairs(rates, edges / scale, color=_BLUE, linewidth=1.5, baseline=None)
    mean = float(figures.batches["rows"].sum()) / float(edges[-1])
    axes.axhline(mean, color=_ORANGE, linestyle="--", label=f"mean {_short(mean)} rows/s")
    axes.set(xlim=(0, edges[-1] / scale), xlabel=f"time since the start ({unit})", ylabel="rows/s")
    axes.set_ylim(bottom=0)
    _ticks(axes.yaxis, _short)
    _legend(axes)


def steps(ended: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows a second between the ends of SuperBatches, neighbours joined to ``MAX_STEPS`` steps.

    The area below the steps is the number of rows.

    Args:
      ended: float64 [n], ascending seconds since the start, n at least 1.
      rows: int64 [n].

    Returns:
      Edges [k + 1] and rates [k].
    """
    total = max(float(ended[-1]), 1e-9)
    shortest = total / MAX_STEPS
    edges, rates, waiting = [0.0], [], 0
    for end, count in zip(ended.tolist(), rows.tolist(), strict=True):
        waiting += count
        if end - edges[-1] >= shortest:
            rates.append(waiting / (end - edges[-1]))
            edges.append(end)
            waiting = 0
    if waiting and rates:
        # what is left ends too soon after the last edge for a step of its own
        width = edges[-1] - edges[-2]
        rates[-1] = (rates[-1] * width + waiting) / (total - edges[-2])
        edges[-1] = total
    elif waiting or not rates:
        rates.append(waiting / total)
        edges.append(total)
    return np.array(edges), np.array(rates)


def _draw_batches(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    table, n = figures.batches, len(figures.batches)
    edges = _groups(n)
    mean = lambda values: np.add.reduceat(values, edges[:-1]) / np.diff(edges)  # noqa: E731
    duplicates = table["texts"] - table["unique"]
    base = np.zeros(len(edges) - 1)
    total = int(table["texts"].sum())
    for label, values, colour in (
        ("encoded", figures.encoded, _BLUE),
        ("known from the cache", table["cached"], _GREEN),
        ("duplicates", duplicates, _ORANGE),
    ):
        height = mean(values)
        share = f"{label} {_percent(int(values.sum()), total)}"
        axes.stairs(base + height, edges, baseline=base, fill=True, color=colour, label=share)
        base = base + height
    least, top = report.get("min_rows"), float(base.max())
    if least and least < 2 * top:
        axes.axhline(least, color=_INK, linestyle=":", linewidth=1.2, label="min_rows")
    axes.set(xlim=(0, n), xlabel=f"SuperBatches by their end{_grouped(edges)}", ylabel="rows")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _ticks(axes.yaxis, _short)
    _ticks(axes.xaxis, _short)
    _legend(axes, columns=2)


def _draw_padding(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    table, n = figures.batches, len(figures.batches)
    edges = _groups(n)
    tokens = np.add.reduceat(table["tokens"], edges[:-1])
    padded = np.add.reduceat(table["padded"], edges[:-1])
    shares = 100 * (1 - tokens / np.maximum(padded, 1)) * (padded > 0)
    axes.stairs(shares, edges, fill=True, color=_BLUE, alpha=0.3)
    axes.stairs(shares, edges, color=_BLUE, linewidth=1.5, baseline=None)
    mean = 100 * (1 - tokens.sum() / padded.sum())
    axes.axhline(mean, color=_ORANGE, linestyle="--", label=f"all together {mean:.1f}%")
    axes.set(
        xlim=(0, n),
        ylim=(0, max(1.0, 1.15 * float(max(shares.max(), mean)))),
        xlabel=f"SuperBatches by their end{_grouped(edges)}",
        ylabel="padding (% of tokens)",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _ticks(axes.xaxis, _short)
    _legend(axes)


def _draw_costs(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    every = -(-len(figures.batches) // MAX_POINTS)
    texts, seconds = figures.encoded[::every], figures.batches["seconds"][::every]
    scale, unit = (1.0, "s") if seconds.max() >= 1 else (1e-3, "ms")
    axes.scatter(
        texts, seconds / scale, 16, color=_BLUE, alpha=0.6, linewidths=0, label="a SuperBatch"
    )
    tau, c = report.get("tau_seconds_per_call"), report.get("c_seconds_per_text")
    if tau is not None and c is not None:
        ends = np.array([0, texts.max()])
        label = f"T = {_seconds(tau)} + n × {_seconds(c)}"
        axes.plot(ends, (tau + c * ends) / scale, color=_ORANGE, label=label)
    axes.set(xlabel="texts through the model (n)", ylabel=f"encode time T ({unit})")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _ticks(axes.xaxis, _short)
    _ticks(axes.yaxis, _short)
    _legend(axes)


def _draw_memory(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    ended = figures.batches["ended"] - _began(report, figures)
    peak = np.maximum.accumulate(figures.batches["peak"])
    bound = int(figures.batches["bound"].max())
    keep = np.unique(np.linspace(0, len(ended) - 1, min(len(ended), MAX_POINTS)).astype(np.int64))
    scale, unit = _clock_unit(float(ended[-1]))
    divisor, name = (1 << 30, "GiB") if max(int(peak[-1]), bound) >= 1 << 30 else (1 << 20, "MiB")
    axes.plot(
        *(ended[keep] / scale, peak[keep] / divisor),
        drawstyle="steps-post",
        color=_BLUE,
        linewidth=1.8,
        marker="o" if len(keep) < 20 else None,
        markersize=4,
        label=f"peak so far, at the end {_bytes(int(peak[-1]))}",
    )
    if bound:
        label = f"bound {_bytes(bound)}"
        axes.axhline(bound / divisor, color=_RED, linestyle="--", label=label)
    axes.set(
        xlim=(0, max(float(ended[-1]), 1e-9) / scale),
        xlabel=f"time since the start ({unit})",
        ylabel=f"memory of a process ({name})",
    )
    axes.set_ylim(0, 1.12 * max(int(peak[-1]), bound) / divisor)
    _legend(axes)


def _draw_sizes(axes: Any, report: dict[str, Any], figures: Figures) -> None:
    bits = np.arange(min(figures.sizes), max(figures.sizes) + 1)
    counts = np.array([figures.sizes.get(b, 0) for b in bits.tolist()])
    axes.bar(bits, counts, 0.86, color=_BLUE)
    axes.set_yscale("log")
    axes.set_ylim(0.6, 2.5 * counts.max())
    axes.set(xlabel="rows of a partition (each bar: from its number up)", ylabel="partitions")
    every = -(-len(bits) // 10)
    axes.set_xticks(bits[::every], [_tick(_least(b)) for b in bits[::every].tolist()])
    if len(bits) <= 14:
        for bit, count in zip(bits.tolist(), counts.tolist(), strict=True):
            if count:
                axes.text(bit, count * 1.1, _short(count), ha="center", va="bottom", fontsize=8)
    axes.minorticks_off()
    _ticks(axes.yaxis, _short)


def _legend(axes: Any, columns: int = 3) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _ticks(axis: Any, text: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _groups(count: int) -> np.ndarray:
    """Edges of at most ``MAX_BARS`` groups of neighbouring SuperBatches."""
    return np.linspace(0, count, min(count, MAX_BARS) + 1).astype(np.int64)


def _grouped(edges: np.ndarray) -> str:
    most = int(np.diff(edges).max())
    return "" if most == 1 else f" (means of about {most})"


def _least(bits: int) -> int:
    """The smallest row count of that many bits."""
    return 1 << (bits - 1) if bits else 0


def _tick(rows: int) -> str:
    return str(rows) if rows < 10_000 else _short(round(rows, -3))


def _clock_unit(seconds: float) -> tuple[float, str]:
    if seconds >= 7200:
        return 3600.0, "h"
    return (60.0, "min") if seconds >= 600 else (1.0, "s")


# Numbers as text


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _seconds(value: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _bytes(value: float) -> str:
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f} B"


def _percent(part: float, whole: float) -> str:
    if not part or not whole:
        return "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.1 else f"{share:.1f}%"


# The page

_TITLES = {
    "fate": "What happened to the rows",
    "throughput": "Throughput",
    "batches": "Rows of a SuperBatch, and what was saved",
    "sizes": "Partition sizes",
    "costs": "Encode time against texts",
    "padding": "Padding",
    "memory": "Memory",
    "prefixes": "Prompt tokens",
}
_CAPTIONS = {
    "fate": "The whole input as the output now holds it.",
    "throughput": "Rows per second, as they were committed or decoded. The first step of an"
    " embedding holds the start: listing, planning and loading the model.",
    "batches": "Identical texts of a SuperBatch are encoded once, and texts of earlier SuperBatches"
    " are taken from a cache.",
    "prefixes": "A prefix that rows share is computed once while they are decoded together.",
    "sizes": "Partitions of this run, by rows; both axes are logarithmic.",
    "costs": "The cost model T = tau + c n: seconds a call, and seconds a text.",
    "padding": "What rows of unequal length waste in a padded micro-batch. Models that are encoded"
    " packed compute none of it.",
    "memory": "Peak resident memory of the worker process that committed, against what planning"
    " allows.",
}
_CSS = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f7f8; --line: #d9dde1;
  --ink: #1d2329; --faint: #a4abb3; --soft: #57606a;
  --blue: #0072b2; --orange: #b86e00; --green: #009e73; --red: #c8401f; }
@media screen and (prefers-color-scheme: dark) { :root { --page: #14181c; --card: #1d2227;
  --line: #363d45; --ink: #e4e8ec; --faint: #6d7680; --soft: #a5aeb8;
  --blue: #56b4e9; --orange: #f0ae3c; --green: #2fc59a; --red: #f07f5a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; } p { margin: .3rem 0; }
.soft, figcaption { color: var(--soft); font-size: .87rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem;
  margin-top: 1rem; }
.tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.tile { padding: .6rem .8rem; } .tile b { display: block; font-size: 1.35rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: .9rem; }
figure { margin: 0; padding: .8rem; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; overflow-x: auto; } figure.wide svg { min-width: 36rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; } th { font-weight: 600; }
tr { break-inside: avoid; } td.short, th.short { white-space: nowrap; }
td.number, th.number { text-align: right;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; white-space: nowrap; }
.columns { columns: 24rem; column-gap: 2.5rem; }
.columns table { break-inside: avoid; margin-bottom: 1rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
  gap: 0 2.5rem; align-items: start; }
@media print { body { padding: 0; font-size: 11px; } .tile, figure { background: none; }
  .pictures { grid-template-columns: 1fr 1fr; } .tile b { font-size: 1.1rem; } }
"""


def render(
    report: dict[str, Any],
    settings: dict[str, Any],
    figures: Figures,
    pictures: dict[str, str] | None,
    letters: list[dict[str, Any]],
) -> str:
    """The page.

    Args:
      settings: the output's settings, as ``_surge/config.json`` has them.
      pictures: SVG elements by name; None where matplotlib is not installed.
      letters: a few dead letters.
    """
    body = [
        f"<h1>{_heading(report)}</h1>",
        f'<p class="soft">Run {_text(report["run"])}</p>',
        *_tiles(report),
    ]
    if not report.get("superbatches") and not _partitions(report):
        body.append("<p>This run had nothing to do: what can be read is up to date.</p>")
    if pictures is None:
        body.append(
            "<p>There are no pictures, since matplotlib is not installed:"
            " <code>pip install 'surge_beam[plots]'</code> brings it, and"
            " <code>python -m surge_beam.transforms.report_html</code> with the output folder"
            " writes this page again.</p>"
        )
    elif pictures:
        body += ["<h2>Pictures</h2>", '<div class="pictures">']
        for name, svg in pictures.items():
            wide = ' class="wide"' if name in _WIDE else ""
            body.append(
                f"<figure{wide}><h3>{_TITLES[name]}</h3>{svg}"
                f"<figcaption>{_CAPTIONS[name]}</figcaption></figure>"
            )
        body.append("</div>")
    body += ["<h2>Figures</h2>", '<div class="columns">']
    for title, rows in _tables(report, settings):
        shown = [(label, value) for label, value in rows if value is not None]
        if shown:
            body += [_table((title, ""), shown, numbers=(1,))]
    body.append("</div>")
    if figures.sizes:
        body += ["<h2>Partitions of this run</h2>", '<div class="pair">']
        body.append(_table(("rows", "partitions"), _size_rows(figures), numbers=(1,)))
        largest = [(folder, f"{rows:,}") for rows, folder in figures.largest]
        body.append(_table(("largest partitions", "rows"), largest, numbers=(1,)))
        body.append("</div>")
    if letters:
        body += [
            "<h2>Dead letters</h2>",
            f"<p>{len(letters)} of {report['dead_letters']:,}; all of them are Parquet files below"
            " <code>_surge/dead_letters/</code>.</p>",
            _table(
                ("stage", "error", "message", "file", "row", "partition"),
                [
                    (x["stage"], x["error"], x["message"], x["file"], x["row"], x["partition"])
                    for x in letters
                ],
                numbers=(4,),
                short=(0,),
            ),
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_heading(report)}</title>\n<style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _heading(report: dict[str, Any]) -> str:
    return "Generation report" if _done(report) == "decoded" else "Embedding report"


def _partitions(report: dict[str, Any]) -> int | None:
    return report.get("partitions_generated", report.get("partitions_encoded"))


def _tiles(report: dict[str, Any]) -> Iterator[str]:
    tiles = [
        (f"rows {_done(report)}", _count(report, f"rows_{_done(report)}")),
        ("partitions", _if(_partitions(report), lambda n: f"{n:,}")),
        ("dead letters", _count(report, "dead_letters")),
        ("time", _if(report.get("seconds"), _duration)),
    ]
    if _done(report) == "decoded":
        tiles.append(("tokens per second", _if(report.get("tokens_per_second"), _short)))
    else:
        tiles.append(("rows per second", _if(report.get("texts_per_second"), _short)))
    tiles += [
        ("peak memory", _if(report.get("peak_memory"), _bytes)),
    ]
    yield '<div class="tiles">'
    for label, value in tiles:
        yield f'<div class="tile"><b>{_text(value)}</b>{label}</div>'
    yield "</div>"


def _tables(
    report: dict[str, Any], settings: dict[str, Any]
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    get = report.get
    texts = get("rows_encoded") or 0
    yield (
        "Rows and partitions",
        [
            ("rows in", _count(report, "rows_in")),
            ("rows out", _count(report, "rows_out")),
            ("dead letters", _count(report, "dead_letters")),
            ("partitions of this run", _if(_partitions(report), lambda n: f"{n:,}")),
            ("partitions skipped, up to date", _count(report, "partitions_skipped")),
            ("partitions of which nothing could be used", _count(report, "partitions_failed")),
            ("stale partitions, input gone", _count(report, "partitions_stale", zero=False)),
            ("stale partitions removed", _count(report, "partitions_pruned", zero=False)),
            ("largest partition, rows", _count(report, "largest_partition")),
            ("files", _count(report, "files")),
            ("files that could not be read", _count(report, "files_failed")),
            ("files passed over", _count(report, "files_passed_over", zero=False)),
        ],
    )
    yield (
        "Time",
        [
            ("whole run", _if(get("seconds"), _duration)),
            ("to the first output", _if(get("seconds_to_first_output"), _duration)),
            ("encoding", _if(get("encode_seconds"), _duration)),
            ("decoding, all workers", _if(get("decode_seconds"), _duration)),
            ("encoding, as the cost model predicts", _if(get("predicted_seconds"), _duration)),
            ("tau, a call", _if(get("tau_seconds_per_call"), _seconds)),
            ("c, a text", _if(get("c_seconds_per_text"), _seconds)),
            ("rows a second of the whole run", _if(get("texts_per_second"), _short)),
        ],
    )
    yield (
        "Work",
        [
            ("SuperBatches", _count(report, "superbatches")),
            ("rows encoded", _count(report, "rows_encoded")),
            ("rows decoded", _count(report, "rows_decoded")),
            ("rows decoded by earlier runs", _count(report, "rows_reused")),
            ("tokens", _count(report, "tokens")),
            ("tokens decoded", _count(report, "tokens_decoded")),
            ("prompt tokens", _count(report, "prompt_tokens")),
            (
                "prompt tokens that shared a prefix",
                _with_share(get("prefix_tokens_saved"), get("prompt_tokens") or 0),
            ),
            *_reasons(report),
            ("padding, share of padded tokens", _if(get("padding_share"), _share)),
            ("duplicates saved", _with_share(get("duplicates_saved"), texts)),
            ("texts known from the cache", _with_share(get("cached_texts"), texts)),
        ],
    )
    yield (
        "Machine and settings",
        [
            ("peak memory of a worker process", _if(get("peak_memory"), _bytes)),
            ("memory bound", _if(get("memory_bound"), _bytes)),
            ("device", get("device")),
            ("dtype", get("dtype")),
            ("dimensions", _count(report, "dimension")),
            ("model", _if(settings.get("model"), _model)),
            ("prompt", _if(settings.get("prompt"), str)),
            ("rows a SuperBatch reaches (min_rows)", _count(report, "min_rows")),
            ("rows it never passes (max_rows)", _count(report, "max_rows")),
            ("input bytes it never passes (max_bytes)", _if(get("max_bytes"), _bytes)),
        ],
    )


def _reasons(report: dict[str, Any]) -> list[tuple[str, str | None]]:
    counts = report.get("finish_reasons") or {}
    return [(f"ended with {reason}", f"{count:,}") for reason, count in counts.items()]


def _size_rows(figures: Figures) -> Iterator[tuple[str, str]]:
    for bits, count in figures.sizes.items():
        least, most = _least(bits), (1 << bits) - 1
        yield f"{least:,}" if least == most or not bits else f"{least:,} to {most:,}", f"{count:,}"


def _model(setting: Any) -> str:
    if isinstance(setting, dict):
        return f"{setting.get('name')} ({str(setting.get('identity'))[:8]})"
    return str(setting)


def _count(report: dict[str, Any], key: str, *, zero: bool = True) -> str | None:
    value = report.get(key)
    return None if value is None or (not zero and not value) else f"{value:,}"


def _if(value: Any, text: Callable[[Any], str]) -> str | None:
    return None if value is None else text(value)


def _share(value: float) -> str:
    return _percent(value, 1)


def _with_share(value: int | None, whole: int) -> str | None:
    return None if value is None else f"{value:,} ({_percent(value, whole)})"


def _text(value: Any) -> str:
    """A value that may come from anyone's file, as harmless HTML of bounded length."""
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    text = str(value)
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "…"
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    # isolated, so that a right-to-left name does not turn its neighbours around
    return f"<bdi>{html.escape(text, quote=True)}</bdi>"


def _table(
    head: tuple[str, ...],
    rows: Iterable[tuple[Any, ...]],
    *,
    numbers: tuple[int, ...] = (),
    short: tuple[int, ...] = (),
) -> str:
    """A table; columns in ``numbers`` stand to the right, those in ``short`` do not wrap."""
    kinds = {**dict.fromkeys(short, ' class="short"'), **dict.fromkeys(numbers, ' class="number"')}

    def cells(tag: str, values: tuple[Any, ...]) -> str:
        return "".join(
            f"<{tag}{kinds.get(i, '')}>{value}</{tag}>" for i, value in enumerate(values)
        )

    lines = [f"<tr>{cells('td', tuple(map(_text, row)))}</tr>" for row in rows]
    return f"<table><tr>{cells('th', head)}</tr>\n" + "\n".join(lines) + "</table>"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        print("usage: python -m surge_beam.transforms.report_html OUTPUT_DIR", file=sys.stderr)
        return 2
    store = Store(argv[0])
    report = read_json(store, REPORT)
    if report is None:
        print(f"no run has ended at {store.url}: there is no {REPORT}", file=sys.stderr)
        return 1
    print(f"{store.url.rstrip('/')}/{write_html(store, report)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
