"""A comparison of systems as one HTML page that needs nothing beside it: tables, and charts of them as SVG.

All that configurations and messages say is escaped, and the page forbids a browser to run or to fetch
anything.
"""

from collections.abc import Iterator, Sequence
from html import escape

from dataloader.visible import visible
from omni.planning.memory_advice import GIB
from omni.rehearsal.compare import Cell, Figures, quickest

COLOURS = {
    "even": "#4c9f70", "work": "#d1495b", "bubble": "#e9c46a", "exchange": "#8d6cab", "messages": "#5b8fd6",
    "queue": "#9aa0a6", "reducing": "#3d5a80",
}  # fmt: skip
_NAMES = {
    "even": "even work", "work": "uneven work", "bubble": "bubble",
    "exchange": "exchange of shared sequences", "messages": "messages", "queue": "queue",
    "reducing": "reducing gradients",
}  # fmt: skip
_WIDTH, _LEFT, _ROW = 900, 170, 26  # pixels
_HEAD = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Systems side by side</title>
<style>
body { font-family: sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; font-size: 0.85em; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.6em; text-align: right; }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left; }
.unfit { color: #b00020; }
code { overflow-wrap: anywhere; }
</style></head><body>
"""
_FOOT = "</body></html>\n"


def page(cells: Sequence[Cell], overrides: str) -> str:
    """The page of a comparison of runs with these overrides."""
    return _HEAD + "".join(_body(cells, overrides)) + _FOOT


def _body(cells: Sequence[Cell], overrides: str) -> Iterator[str]:
    yield "<h1>Systems side by side (simulated)</h1>\n"
    yield f"<p>The same samples on the same ranks under each system: <code>{_text(overrides)}</code></p>\n"
    yield f"<p>{_legend()}</p>\n"
    for mixture in dict.fromkeys(cell.mixture for cell in cells):
        own = quickest([cell for cell in cells if cell.mixture == mixture])
        done = [(cell.system, cell.figures) for cell in own if cell.figures is not None]
        yield f"<h2>{_text(mixture)}</h2><p>{_text(own[0].samples)}</p>\n"
        yield chart(done)
        yield from _table(done)
        for cell in own:
            if cell.refused:
                yield f"<p><b>{_text(cell.system)}</b> is refused: {_text(cell.refused)}</p>\n"


def chart(rows: Sequence[tuple[str, Figures]]) -> str:
    """A bar for each system as long as its step, divided by what takes it."""
    most = max((figures.step_s for _, figures in rows), default=1.0)
    height = _ROW * len(rows) + 4
    body = []
    for number, (system, figures) in enumerate(rows):
        top, x = number * _ROW + 4, float(_LEFT)
        body.append(f'<text x="0" y="{top + 14}">{_text(system)}</text>')
        scale = (_WIDTH - _LEFT - 90) * figures.step_s / most
        for name, share in figures.causes.items():
            width = max(0.0, share) * scale
            title = f"{_NAMES[name]}: {share * figures.step_s * 1e3:,.1f} ms, {share:.1%}"
            where = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 8}"'
            body.append(f'<rect {where} fill="{COLOURS[name]}"><title>{title}</title></rect>')
            x += width
        body.append(f'<text x="{x + 6:.1f}" y="{top + 14}">{figures.step_s * 1e3:,.0f} ms</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _table(rows: Sequence[tuple[str, Figures]]) -> Iterator[str]:
    if not rows:
        return
    first = rows[0][1].step_s
    titles = (
        "system", "step ms", "x first", "tokens/s", "MFU", "of text alone",
        *(f"{name} max/mean" for name in rows[0][1].imbalance), "idle",
        "communication", "GiB", "GiB sent in node", "GiB sent across", "planning s",
        "layout, schedule, keys",
    )  # fmt: skip
    yield "<table><tr>" + "".join(f"<th>{_text(title)}</th>" for title in titles) + "</tr>\n"
    for system, found in rows:
        held, inside, across = (
            f"{size / GIB:.1f}"
            for size in (found.held_bytes, found.sent_inside_bytes, found.sent_across_bytes)
        )
        values = (
            f"{found.step_s * 1e3:,.1f}", f"{found.step_s / first:.2f}", f"{found.tokens_per_s:,.0f}",
            f"{found.mfu:.1%}", f"{found.of_text:.1%}",
            *(f"{ratio:.2f}" for ratio in found.imbalance.values()), f"{found.idle:.1%}",
            f"{found.exposed:.1%}", held, inside, across, f"{found.planning_s:.2f}",
        )  # fmt: skip
        said = f"{found.layout}; {found.schedule} {found.sets}"
        fits = "" if found.fits else '<b class="unfit">does not fit a device.</b> '
        cells = "".join(f"<td>{value}</td>" for value in values)
        yield f"<tr><td>{_text(system)}</td>{cells}<td>{fits}{_text(said)}</td></tr>\n"
    yield "</table>\n"


def _legend() -> str:
    boxes = (
        f'<span style="color:{colour}">&#9632;</span> {_NAMES[name]}' for name, colour in COLOURS.items()
    )
    return "A bar is a step of the slowest domain, and what takes it: " + ", ".join(boxes)


def _text(text: str) -> str:
    return escape(visible(text))
