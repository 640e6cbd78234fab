from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from surge_beam.records import DeadLetter, dead_letter_table
from surge_beam.transforms import manifest, report_html, stats_files
from surge_beam.transforms.files import Store
from surge_beam.transforms.read import FILE_LETTERS
from surge_beam.transforms.report import REPORT
from surge_beam.transforms.report_html import Figures, collect, draw, steps, write_html
from surge_beam.transforms.write import letters_folder, part_name
from tests.pipelines.harness import make_corpus, run_job

RUN = "00000000000000ff"
BEGAN = 1_700_000_000.0
PICTURES = ("fate", "throughput", "batches", "costs", "padding", "memory", "sizes")
HOSTILE = '<img src="https://evil.example/x.png" onerror=alert(1)>&amp;\u202e\x00\n\'"</td><script>'


def header(i: int, **changes: Any) -> dict[str, Any]:
    return {
        "superbatch": f"{i:032x}",
        "partitions": 3,
        "rows": 100,
        "dead_letters": 0,
        "texts": 100,
        "unique_texts": 90,
        "cached_texts": 10,
        "tokens": 4000,
        "padded_tokens": 4400,
        "seconds": 0.5 + i / 1000,
        "ended": BEGAN + 5 + i,
        "peak_memory": 500 << 20,
        "memory_bound": 900 << 20,
        **changes,
    }


def line(partition: str, rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "partition": partition,
        "fingerprint": "11" * 16,
        "rows": rows,
        "dead_letters": 0,
        "files": [],
        **changes,
    }


def report_of(batches: int, **changes: Any) -> dict[str, Any]:
    return {
        "run": RUN,
        "partitions_encoded": 3 * batches,
        "partitions_skipped": 7,
        "partitions_failed": 1,
        "rows_in": 100 * batches + 52,
        "rows_out": 100 * batches + 50,
        "dead_letters": 2,
        "rows_encoded": 100 * batches,
        "superbatches": batches,
        "tokens": 4000 * batches,
        "seconds": 6.0 + batches,
        "seconds_to_first_output": 5.0,
        "tau_seconds_per_call": 0.02,
        "c_seconds_per_text": 0.006,
        "min_rows": 64,
        **changes,
    }


def store_of(folder: Path, batches: int) -> Store:
    store = Store(str(folder))
    for i in range(batches):
        lines = [line(f"service=s{i}-{j}", 10**j) for j in range(3)]
        manifest.write(store, RUN, f"{i:032x}", header(i), lines)
    return store


def page_of(store: Store, report: dict[str, Any]) -> str:
    return store.get(write_html(store, report)).decode()


class Elements(HTMLParser):
    """Tags and attributes of a page; asserts that every element is closed."""

    EMPTY = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_alone(page: str) -> Elements:
    """Asserts that a page loads nothing and runs nothing."""
    found = Elements(page)
    assert not found.tags.keys() & {"script", "img", "link", "iframe", "object", "image", "base"}
    for tag, name, value in found.attributes:
        assert not name.startswith("on") and name != "src", (tag, name)
        if name.endswith("href"):
            assert (value or "").startswith("#"), value
        for target in re.findall(r"url\(([^)]*)\)", value or ""):
            assert target.startswith("#"), target
    assert "@import" not in page
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    return found


@pytest.fixture
def has_matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("has_matplotlib")
def test_the_page_of_a_generation(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    decoded = {"decoded": True, "rows": 60, "tokens": 900, "seconds": 2.0, "ended": BEGAN + 4}
    stats_files.put(store, RUN, decoded)
    block = {"superbatch": "a", "partitions": 1, "rows_out": 60, "ended": BEGAN + 5}
    manifest.write(store, RUN, "a", block, [line("k=1", 60)])
    report = {
        "run": RUN, "rows_in": 61, "rows_out": 60, "dead_letters": 0, "superbatches": 1,
        "partitions_generated": 1, "rows_decoded": 60, "rows_reused": 1, "tokens_decoded": 900,
        "prompt_tokens": 7000, "prefix_tokens_saved": 6300, "finish_reasons": {"stop": 60},
        "tokens_per_second": 450.0, "seconds": 5.0, "seconds_to_first_output": 5.0,
    }  # fmt: skip
    page = page_of(store, report)
    found = assert_alone(page)
    shown = [n for n in report_html._TITLES if f">{report_html._TITLES[n]}<" in page]
    assert sorted(shown) == ["fate", "prefixes", "sizes", "throughput"]
    assert found.tags["svg"] == len(shown)
    for text in (
        "Generation report",
        "decoded by this run: 60",
        "6,300 (90.0%)",
        "ended with stop",
    ):
        assert text in page
    assert "ncoded" not in found.text


@pytest.mark.usefixtures("has_matplotlib")
def test_the_page_has_every_picture_and_loads_nothing(tmp_path: Path) -> None:
    page = page_of(store_of(tmp_path, 12), report_of(12))
    found = assert_alone(page)
    assert found.tags["svg"] == len(PICTURES)
    assert "http:" not in page and "https:" not in page
    for name in PICTURES:
        assert report_html._TITLES[name] in page
    # every colour is one of the page's, so that it follows light and dark
    assert "#0102" not in page
    for words in ("rows/s", "time since the start (s)", "memory of a process (MiB)", "1,200"):
        assert words in page


@pytest.mark.usefixtures("has_matplotlib")
def test_references_within_a_picture_lead_somewhere(tmp_path: Path) -> None:
    page = page_of(store_of(tmp_path, 12), report_of(12))
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)} <= ids


@pytest.mark.usefixtures("has_matplotlib")
def test_equal_runs_give_equal_pages(tmp_path: Path) -> None:
    store = store_of(tmp_path, 3)
    assert page_of(store, report_of(3)) == page_of(store, report_of(3))


def test_names_and_messages_are_escaped(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = f"service={HOSTILE}"
    lines = [line(folder, 10**6, dead_letters=1)]
    manifest.write(store, RUN, "a", header(0, dead_letters=1), lines)
    letters = [DeadLetter(stage="read", error=HOSTILE, message=HOSTILE * 50, file=HOSTILE, row=3)]
    for name in (f"{FILE_LETTERS}/x.parquet", f"{letters_folder(folder)}/{part_name(0)}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(dead_letter_table(letters), tmp_path / name)
    settings = {"prompt": HOSTILE, "model": {"name": HOSTILE, "identity": "0123456789"}}
    store.put("_surge/config.json", json.dumps({"settings": settings}).encode())
    page = page_of(store, report_of(1, device=HOSTILE, dtype=HOSTILE))
    found = assert_alone(page)
    assert "<img" not in page and "\x00" not in page and "\u202e" not in page
    assert found.text.count('<img src="https://evil.example/x.png"') >= 9
    assert len(page) < 300_000


def test_without_matplotlib_the_page_has_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(store_of(tmp_path, 3), report_of(3))
    found = assert_alone(page)
    assert not found.tags["svg"] and found.tags["table"] >= 5
    assert "surge_beam[plots]" in found.text


def test_a_run_with_nothing_to_do(tmp_path: Path) -> None:
    report = report_of(0, rows_encoded=0, rows_in=50, rows_out=50, dead_letters=0)
    report.update(seconds_to_first_output=None, tau_seconds_per_call=None)
    page = page_of(Store(str(tmp_path)), report)
    assert "nothing to do" in assert_alone(page).text


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": 0, "unique_texts": 0, "cached_texts": 0, "tokens": 0, "padded_tokens": 0},
        {"seconds": 0.0, "rows": 0, "peak_memory": 0, "memory_bound": 0},
    ],
)
def test_a_single_superbatch_of_no_work(tmp_path: Path, changes: dict[str, int]) -> None:
    store = Store(str(tmp_path))
    manifest.write(store, RUN, "a", header(0, **changes), [line("a", 0)])
    report = report_of(1, seconds_to_first_output=0.0, rows_encoded=0)
    assert_alone(page_of(store, report))


def test_a_split_partition_counts_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for part in range(2):
        of_part = line("big", 50, part_key=f"{part:032x}", part=part, parts=2)
        manifest.write(store, RUN, f"b{part}", header(part), [of_part])
    manifest.write(store, RUN, "published-x", {"published": True}, [line("big", 100)])
    manifest.write(store, RUN, "-b0", {"void": True}, [line("small", 0)])
    manifest.write(store, RUN, "pruned", {"pruned": True}, [line("gone", 0)])
    manifest.write(store, RUN, "c", header(2), [line("lost", 0, dead_letters=3, unreadable=4)])
    figures = collect(store, RUN)
    assert figures.sizes == {(7).bit_length(): 1, (100).bit_length(): 1}
    assert figures.largest == [(100, "big"), (7, "lost")]
    assert figures.letters == [("lost", 0)]
    assert len(figures.batches) == 3


def test_the_figures_are_of_one_run(tmp_path: Path) -> None:
    store = store_of(tmp_path, 2)
    manifest.write(store, "0000000000000100", "a", header(9), [line("later", 5)])
    assert len(collect(store, RUN).batches) == 2


@pytest.mark.parametrize("count", [1, 2, 59, 1000])
@pytest.mark.parametrize("gap", [0.0, 0.001, 1.0])
def test_the_area_below_the_steps_is_the_rows(count: int, gap: float) -> None:
    rng = np.random.default_rng(count)
    ended = 3.0 + np.cumsum(rng.uniform(0, 2, count) * gap)
    rows = rng.integers(0, 5000, count)
    edges, rates = steps(ended, rows)
    assert len(edges) == len(rates) + 1 <= report_html.MAX_STEPS + 1
    assert (np.diff(edges) > 0).all() and edges[0] == 0
    assert edges[-1] == pytest.approx(ended[-1])
    assert np.diff(edges) @ rates == pytest.approx(rows.sum())


@pytest.mark.usefixtures("has_matplotlib")
def test_pictures_do_not_grow_with_the_run() -> None:
    def drawn(batches: int) -> int:
        table = np.ones(batches, report_html._BATCH)
        table["ended"] = BEGAN + 5 + np.arange(batches)
        for name in ("texts", "unique", "rows"):
            table[name] = 1000 + np.arange(batches) % 100
        pictures = draw(report_of(batches), Figures(table, {1: 5, 20: 7}, [], []))
        assert set(pictures) == set(PICTURES)
        return sum(map(len, pictures.values()))

    assert drawn(20_000) < 1.5 * drawn(800) < 600_000


@pytest.mark.usefixtures("has_matplotlib")
def test_five_hundred_superbatches_take_seconds(tmp_path: Path) -> None:
    store = store_of(tmp_path, 500)
    # processor time, since a busy machine says nothing of this code
    began = time.process_time()
    write_html(store, report_of(500))
    assert time.process_time() - began < 3


def test_a_page_that_cannot_be_made_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path, 1)
    store.put(report_html.PAGE, b"an earlier run's")

    def fail(*_: object) -> None:
        raise ValueError("no\nink")

    monkeypatch.setattr(report_html, "draw", fail)
    report_html.try_write_html(store, report_of(1))
    assert [r.getMessage() for r in caplog.records] == ["no report.html: ValueError: no ink"]
    assert not store.exists(report_html.PAGE)


def test_the_page_can_be_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_html.main([str(tmp_path)]) == 1
    assert report_html.main([]) == 2
    store = store_of(tmp_path, 1)
    store.put(REPORT, json.dumps(report_of(1)).encode())
    assert report_html.main([str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == tmp_path / report_html.PAGE and page.stat().st_size > 1000


@pytest.mark.usefixtures("has_matplotlib")
def test_matplotlib_loads_only_for_pictures(tmp_path: Path) -> None:
    store_of(tmp_path, 1).put(REPORT, json.dumps(report_of(1)).encode())
    code = (
        "import sys, surge_beam.transforms, surge_beam.transforms.report_html as r;"
        "assert 'matplotlib' not in sys.modules;"
        "r.main(sys.argv[1:]);"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.usefixtures("has_matplotlib")
def test_a_job_leaves_its_page(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", [30, 3, 0, 1, 60])
    run_job(input=corpus, output=tmp_path / "out", min_rows=20)
    found = assert_alone((tmp_path / "out" / report_html.PAGE).read_text())
    assert found.tags["svg"] == len(PICTURES)
    assert "service=s004" in found.text and "dummy:16" in found.text
