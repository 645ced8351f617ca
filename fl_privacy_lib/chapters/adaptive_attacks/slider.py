"""Pictures that a reader can step through, without a server (chapter 02)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from fl_privacy_lib.reproduction.figures import png


@dataclass(frozen=True)
class Frame:
    """One position of the slider.

    Attributes
    ----------
    value : what the slider shows there, e.g. 'σ = 0.01'
    figure : the picture
    alt : what a reader who cannot see it is told
    """

    value: str
    figure: Figure
    alt: str


class Slider:
    """Frames behind a slider in HTML: a plain range input, so that keys and screen readers work.

    Parameters
    ----------
    name : what is changed, e.g. 'noise per coordinate'
    frames : in the slider's order
    ident : unique on its page
    """

    def __init__(self, name: str, frames: Sequence[Frame], ident: str) -> None:
        self.name, self.frames, self.ident = name, list(frames), ident

    def _repr_html_(self) -> str:
        pictures = [png(frame.figure) for frame in self.frames]
        data = json.dumps([[f.value, p, f.alt] for f, p in zip(self.frames, pictures, strict=True)])
        data = data.replace("</", "<\\/")  # a text may not end the script
        first, key, last = self.frames[0], escape(self.ident), len(self.frames) - 1
        script = (
            f"(function () {{ const frames = {data};"
            f" const root = document.getElementById('{key}'), input = root.querySelector('input');"
            " const image = root.querySelector('img'), output = root.querySelector('output');"
            " input.addEventListener('input', function () {"
            " const [value, picture, alt] = frames[Number(input.value)];"
            " image.src = picture; image.alt = alt; output.textContent = value;"
            " input.setAttribute('aria-valuetext', value); }); }())"
        )
        return (
            f'<div id="{key}" class="slider-figure"><label>{escape(self.name)} '
            f'<input type="range" min="0" max="{last}" value="0" step="1"'
            f' aria-valuetext="{escape(first.value)}">'
            f'</label> <output aria-live="polite">{escape(first.value)}</output><br>'
            f'<img class="dark-light" src="{pictures[0]}" alt="{escape(first.alt)}"></div>'
            f"<script>{script}</script>"
        )

    def __repr__(self) -> str:
        return f"{self.name}: " + ", ".join(frame.value for frame in self.frames)
