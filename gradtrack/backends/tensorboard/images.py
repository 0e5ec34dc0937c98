"""The pictures that a run leaves, as TensorBoard's images."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradtrack.backends.tensorboard.events import Events, description_of


def image_tag(path: Path) -> str:
    """Return the tag of a picture."""
    return f"gradtrack/{path.stem}"


def image_event(events: Events, pictures: Iterable[Path], *, run_id: str, step: int, now: float) -> Any:
    """Return one event that holds PNG files; what is none is left out."""
    values = []
    for path in pictures:
        content = path.read_bytes()
        if content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 24:
            width, height = struct.unpack(">II", content[16:24])
            image = events.summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
            values.append(events.value(tag=image_tag(path), image=image))
            values[-1].metadata.summary_description = description_of(run_id)
    return events.event(step=step, wall_time=now, summary=events.summary(value=values))
