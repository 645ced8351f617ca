"""What a page that a reader can change needs: pictures inside the page, without any other host."""

import base64
import io

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def png(figure: Figure) -> str:
    """Return a figure as a data address and close it."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
        plt.close(figure)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
