"""Histograms as SVG: how lengths and costs are spread, in buckets that double."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _BAR, _LEFT, _LINE = 640, 120, 28, 10, 16  # pixels
_COUNT, _SUM = "#6aa5e8", "#f2b134"


def buckets(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return for each bucket up to the largest value the first that belongs to it, how many values do, and
    their sum. The buckets are 0, 1, 2 to 3, 4 to 7, and so on; those below the smallest value are left out.
    """
    if not values:
        return []
    sizes = range(min(values).bit_length(), max(values).bit_length() + 1)
    found = dict.fromkeys(sizes, (0, 0))
    for value in values:
        count, total = found[value.bit_length()]
        found[value.bit_length()] = count + 1, total + value
    return [(1 << size >> 1, *found[size]) for size in sizes]


def svg(histograms: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Draw titled histograms one above the other: for each bucket its share of the values, and beside it its
    share of their sum.
    """
    body: list[str] = []
    top = _LINE
    for title, values in histograms:
        body += _histogram(title, buckets(values), top)
        top += _HEIGHT + 4 * _LINE
    body += [_rect(_LEFT, top - 10, 10, 10, _COUNT, ""), _text(_LEFT + 14, top, "share of the number")]
    body += [_rect(_LEFT + 160, top - 10, 10, 10, _SUM, ""), _text(_LEFT + 174, top, "share of the sum")]
    most = max((len(buckets(values)) for _, values in histograms), default=0)
    width, height = max(_WIDTH, 2 * _LEFT + most * 2 * _BAR), top + _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _histogram(title: str, bars: Sequence[tuple[int, int, int]], top: int) -> Iterator[str]:
    yield _text(_LEFT, top, title, "bold")
    count, total = sum(of for _, of, _ in bars) or 1, sum(of for *_, of in bars) or 1
    bottom = top + _LINE // 2 + _HEIGHT
    for number, (first, own, own_sum) in enumerate(bars):
        x = _LEFT + number * 2 * _BAR
        for at, share, colour in ((0, own / count, _COUNT), (1, own_sum / total, _SUM)):
            tall = share * _HEIGHT
            title = f"from {first:,}: {own:,} values, {share:.1%}"
            yield _rect(x + at * (_BAR - 8), bottom - tall, _BAR - 10, tall, colour, title)
        yield _text(x, bottom + _LINE - 3, _short(first))


def _short(value: int) -> str:
    """A bucket's first value in few characters: 512, 4K, 2M, 1G; powers of 1,024."""
    for unit in ("", "K", "M", "G", "T"):
        if value < 1024 or unit == "T":
            return f"{value}{unit}"
        value //= 1024
    raise AssertionError


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {where} fill="{colour}"><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
