"""The TensorBoard backend under test, read back with TensorBoard's classical reader."""

from __future__ import annotations

import math
import struct

from gradtrack.backends.tensorboard import TensorBoardBackend
from tests.contracts.harness import Harness

LARGEST = 3.4028234663852886e38


class TensorBoardHarness(Harness):
    """Event files in a directory of their own."""

    def open(self) -> TensorBoardBackend:
        return TensorBoardBackend(log_dir=self.directory / "logs")

    def read(self) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(self.directory / "logs"), size_guidance={"scalars": 0}).Reload()
        names = reader.Tags()["scalars"]
        return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in names}

    def kept(self, name: str, value: float) -> float | None:
        """Return the float next to a value; the double stands beside it where that is another number."""
        if math.isfinite(value):
            value = max(-LARGEST, min(value, LARGEST))
        return float(struct.unpack("f", struct.pack("f", value))[0])
