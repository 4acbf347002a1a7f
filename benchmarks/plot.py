"""Lines in one SVG file: loss curves beside each other, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 420, 60, 20, 40
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#868e96", "#1864ab", "#f08c00")


def lines(series: Mapping[str, Sequence[float]], *, title: str, x_label: str) -> str:
    """One line a series over its index from 1; a shared y axis from the lowest to the highest value."""
    lowest = min(min(values) for values in series.values())
    highest = max(max(values) for values in series.values())
    longest = max(len(values) for values in series.values())
    plot_width, plot_height = WIDTH - LEFT - 200, HEIGHT - TOP - BOTTOM

    def x_of(index: int) -> float:
        return LEFT + plot_width * index / max(1, longest - 1)

    def y_of(value: float) -> float:
        return TOP + plot_height * (highest - value) / (highest - lowest or 1.0)

    body = [f'<text x="{LEFT}" y="14" font-weight="bold">{escape(title)}</text>']
    for tick in range(5):
        value = lowest + (highest - lowest) * tick / 4
        y = y_of(value)
        body.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + plot_width}" y2="{y:.1f}" stroke="#dee2e6"/>')
        body.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{x_of(i):.1f},{y_of(value):.1f}" for i, value in enumerate(values))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = TOP + 18 * (index + 1)
        body.append(f'<text x="{LEFT + plot_width + 12}" y="{y}" fill="{colour}">{escape(name)}</text>')
    label = f"{escape(x_label)}, 1 to {longest}"
    body.append(f'<text x="{LEFT + plot_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
