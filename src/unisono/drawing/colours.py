"""The colours of chunks: Okabe and Ito's, which colour-blind people tell apart too, each in two shades.

Source: Okabe, Ito, "Color universal design", 2008. A number stands beside every colour, so that beyond
sixteen chunks nothing is lost when they begin again.
"""

from __future__ import annotations

__all__ = ["COLOURS", "rules"]

BASE = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#B5A400", "#8A8A8A")
COLOURS = 2 * len(BASE)

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f3f5f8",
    "ink": "#1b1f24",
    "quiet": "#5b6570",
    "line": "#c4ccd6",
    "rail": "#e3e8ee",
}
DARK = {
    "paper": "#14171c",
    "panel": "#1d2229",
    "ink": "#e8ebef",
    "quiet": "#9aa5b1",
    "line": "#4a5461",
    "rail": "#2c333d",
}


def rules() -> str:
    """CSS variables for light and dark: --paper, --ink ...; of chunk 0 its fill --f0, text on it --t0."""
    light, dark = _block(LIGHT, 0.0), _block(DARK, 1.0)
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _block(theme: dict[str, str], towards: float) -> str:
    shades = [*BASE, *(_mixed(colour, towards) for colour in BASE)]
    chunks = "".join(f"--f{n}:{shade};--t{n}:{_text_on(shade)};" for n, shade in enumerate(shades))
    return "".join(f"--{name}:{colour};" for name, colour in theme.items()) + chunks


def _mixed(colour: str, towards: float, part: float = 0.42) -> str:
    """A second shade: darker for 0, lighter for 1."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel * (1 - part) + 255 * towards * part):02x}" for channel in channels)


def _text_on(colour: str) -> str:
    """Black or white, whichever has more contrast (WCAG's relative luminance)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"
