"""The colours of chunks: Okabe and Ito's, which colour-blind people can distinguish, each in two shades.

Source: Okabe, Ito, "Color universal design", 2008. Every colour comes with a number: beyond
sixteen chunks the colours repeat.
"""

from __future__ import annotations

from string import Template

BASE = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#B5A400", "#8A8A8A")
COLOURS = 2 * len(BASE)

BLACK, WHITE = 0, 255


def _theme(
    paper: str, panel: str, ink: str, quiet: str, line: str, rail: str, towards: int
) -> dict[str, str]:
    """Name -> colour; f0: the fill of chunk 0, t0: text on it. Second shades are mixed with `towards`."""
    theme = {"paper": paper, "panel": panel, "ink": ink, "quiet": quiet, "line": line, "rail": rail}
    for number, shade in enumerate([*BASE, *(_mixed(colour, towards) for colour in BASE)]):
        theme |= {f"f{number}": shade, f"t{number}": _text_on(shade)}
    return theme


def variables() -> str:
    """CSS variables for light and dark, one for each name of the theme: --paper, --ink, --f0 ..."""
    return styled(":root{" + "".join(f"--{name}:${name};" for name in LIGHT) + "}")


def styled(rules: str) -> str:
    """CSS with the values of $paper, $ink, $f0 ..., for light and for dark.

    SVG viewers that are not browsers do not support CSS variables.
    """
    light, dark = (Template(rules).substitute(theme) for theme in (LIGHT, DARK))
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _mixed(colour: str, towards: int, part: float = 0.42) -> str:
    return "#" + "".join(f"{round(c * (1 - part) + towards * part):02x}" for c in _channels(colour))


def _text_on(colour: str) -> str:
    """Black or white, whichever has more contrast (WCAG's relative luminance)."""
    shares = [channel / 255 for channel in _channels(colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


LIGHT = _theme("#ffffff", "#f3f5f8", "#1b1f24", "#5b6570", "#c4ccd6", "#e3e8ee", BLACK)
DARK = _theme("#14171c", "#1d2229", "#e8ebef", "#9aa5b1", "#4a5461", "#2c333d", WHITE)
