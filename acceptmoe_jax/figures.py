"""What every figure here shares: it becomes the bytes of a PNG file."""

import io

from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
