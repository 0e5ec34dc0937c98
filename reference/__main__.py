"""Write the pages in docs/reference: `python -m reference`."""

from __future__ import annotations

import sys

from reference.pages import write

if __name__ == "__main__":
    for path in write():
        sys.stdout.write(f"wrote {path.name}\n")
