"""One look for all figures: legible in light and dark pages, and for readers who do not see all colours.

matplotlib is optional for the package and imported here only.
"""

from __future__ import annotations

from contextlib import contextmanager

import matplotlib as mpl
from matplotlib import pyplot as plt

# Okabe and Ito's palette for colour-blind readers, darkest first; markers and dashes tell the lines apart in grey
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

STYLE = {
    "figure.facecolor": "white",  # opaque: dark pages then show a light card, never dark text on dark
    "savefig.facecolor": "white",
    "figure.dpi": 110,
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "axes.prop_cycle": mpl.cycler(color=COLORS) + mpl.cycler(marker=MARKERS) + mpl.cycler(linestyle=DASHES),
}


@contextmanager
def figure(rows: int = 1, columns: int = 1, *, width: float = 7.0, height: float = 3.6):
    """Axes in the house style: `with figure() as axes:`; the figure is laid out and shown when the block ends.

    `width` and `height` are inches of the whole figure; several rows or columns give an array of axes.
    """
    with mpl.rc_context(STYLE):
        drawn, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained")
        yield axes
        plt.show()
        plt.close(drawn)


def describe(axes, title: str, x: str, y: str, *, log_x=False, log_y=False, legend=True) -> None:
    """Give axes a title and named axes with their units; logarithmic axes are in base 2 on x and 10 on y."""
    axes.set(title=title, xlabel=x, ylabel=y)
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend()
