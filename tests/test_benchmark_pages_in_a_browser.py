"""The pages of runs in a real browser, wide and narrow; skipped where there is no Chromium."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.html_pages import document
from benchmarks.records.runs import Run
from tests.test_benchmark_pages import EXPONENT, block_run, compare_run, model_run, pattern_run

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
WIDTHS = (1400, 400)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--window-size=1500,1000 --dump-dom"
).split()
# What a frame with a page finds out about it: run in the wrapper, with the frame's document.
MEASURE = """
function measure(frame) {
  const page = frame.contentDocument, root = page.scrollingElement, view = frame.contentWindow;
  page.querySelectorAll("details").forEach((part) => { part.open = true; });
  const found = { width: root.scrollWidth, room: root.clientWidth, text: page.body.innerText };
  const inside = (part) => part.closest(".box");
  found.outside = [...page.querySelectorAll("main *")].filter((part) => !inside(part) &&
    part.getBoundingClientRect().right > root.clientWidth + 1).map((part) => part.outerHTML);
  const holder = page.querySelector(".sortable");
  const rows = () => [...holder.querySelectorAll("tbody tr")];
  const names = () => rows().filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  const heads = [...holder.querySelectorAll("thead th")];
  found.heads = heads.map((head) => head.textContent);
  found.before = names();
  const column = 2, button = heads[column].querySelector("button");
  const order = () => rows().map((row) => row.cells[column].textContent);
  button.click();
  found.first = [heads[column].ariaSort, order()];
  button.click();
  found.second = [heads[column].ariaSort, order()];
  const input = holder.querySelector("input");
  if (input) {
    input.value = found.before[0].toLowerCase();
    input.dispatchEvent(new view.Event("input"));
    found.searched = [names(), holder.querySelector("output").value];
    input.value = "";
    input.dispatchEvent(new view.Event("input"));
  }
  const box = holder.querySelector(".box"), first = rows()[0].cells[0];
  box.scrollLeft = 120;
  found.sticky = first.getBoundingClientRect().left - box.getBoundingClientRect().left;
  const mark = page.querySelector("[data-hint]");
  mark?.dispatchEvent(new view.PointerEvent("pointerover", { bubbles: true }));
  found.hint = [mark?.dataset.hint, page.querySelector("#hint:not([hidden])")?.textContent];
  return found;
}
"""


def chromium() -> str:
    """The browser, if it is there and whole: a package may still be being installed."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if path is None:
        pytest.skip("no chromium")
    if shutil.which("dpkg-query") and Path("/var/lib/dpkg/info/chromium.list").exists():
        asked = ["dpkg-query", "-W", "-f=${db:Status-Status}", "chromium"]
        if subprocess.run(asked, capture_output=True, text=True).stdout != "installed":
            pytest.skip("chromium is not installed completely")
    return path


def in_frames(pages: dict[str, str], tmp_path) -> dict[str, list[dict]]:
    """Name of each page -> what was measured, at each of WIDTHS. One start of the browser."""
    frames = "".join(
        f'<iframe data-name="{name}" style="width:{width}px;height:800px" '
        f'srcdoc="{html.escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    collect = (
        "onload = () => { const found = {};"
        'for (const f of document.querySelectorAll("iframe"))'
        "(found[f.dataset.name] ??= []).push(measure(f));"
        'const out = document.createElement("pre"); out.id = "found";'
        "out.textContent = JSON.stringify(found); document.body.replaceChildren(out); };"
    )
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><body><script>{MEASURE}{collect}</script>{frames}',
        encoding="utf-8",
    )
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [chromium(), *FLAGS, profile, wrapper.as_uri()], capture_output=True, timeout=120
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found, done.stderr.decode()[-2000:]
    return json.loads(html.unescape(found[1]))


def test_pages_in_a_browser(tmp_path):
    """One test, which starts the browser once: each process of pytest would start its own."""
    runs = {p.stem: Run.load(p.with_suffix(".json")) for p in sorted(RESULTS.glob("*.html"))}
    runs |= {make.__name__: make() for make in (pattern_run, model_run, block_run, compare_run)}
    measured = in_frames({name: document.page(run) for name, run in runs.items()}, tmp_path)
    assert measured.keys() == runs.keys()
    for check in (fit, plain_numbers, sorting, searching, sticky_and_hints):
        check(measured)


def both(measured):
    """(name, width, what was measured)"""
    for name, pair in measured.items():
        yield from ((name, width, found) for width, found in zip(WIDTHS, pair, strict=True))


def fit(measured):
    """Never sideways as a whole: what is too wide scrolls in its own box."""
    for name, width, found in both(measured):
        assert found["room"] == width or found["room"] == width - 15, (name, found["room"])
        assert found["width"] <= found["room"], (name, width, found["outside"][:3])
        assert not found["outside"], (name, width, found["outside"][:3])


def plain_numbers(measured):
    """None has an exponent."""
    for name, width, found in both(measured):
        assert not EXPONENT.findall(found["text"]), (name, width, EXPONENT.search(found["text"])[0])


def number(text: str) -> float | None:
    found = re.match(r"[\d,.]+(?=[×%]?$)", text)
    return float(found[0].replace(",", "")) if found else None


def sorting(measured):
    """By a click on a header, and the other way round by a second one."""
    for name, width, found in both(measured):
        (first, down), (second, up) = found["first"], found["second"]
        values = [number(text) for text in down if text]
        if None in values:  # a column of words
            assert (first, second) == ("ascending", "descending"), (name, width)
            continue
        assert (first, second) == ("descending", "ascending"), (name, width)
        assert values == sorted(values, reverse=True), (name, width)
        assert [number(text) for text in up if text] == sorted(values), (name, width)
        assert up[len(values) :] == [""] * (len(up) - len(values)), (name, width)  # empty ones last


def searching(measured):
    """Rows with all of the words are left, and their number is said."""
    for name, width, found in both(measured):
        if "searched" not in found:
            assert len(found["before"]) < 6, name
            continue
        wanted, (left, count) = found["before"][0], found["searched"]
        assert wanted in left, (name, width)
        words = wanted.lower().split()
        assert all(all(word in line.lower() for word in words) for line in left), (name, width)
        if len(left) < len(found["before"]):
            assert count == f"{len(left)} of {len(found['before'])} rows", (name, width)
    some = measured["h200"][0]
    assert 1 <= len(some["searched"][0]) < 20


def sticky_and_hints(measured):
    """The first column stays in sight, and a mark shows its hint."""
    for name, width, found in both(measured):
        assert abs(found["sticky"] - 1) < 2, (name, width, found["sticky"])  # the box's border
        asked, shown = found["hint"]
        assert asked and asked == shown, (name, width, found["hint"])
