"""What runs for minutes by design: `tools/nightly` runs the whole of it, `tools/test` a part."""

import os

NIGHTLY = os.environ.get("DISKREPLAY_NIGHTLY") == "1"


def whole_or_part(whole: int, part: int) -> int:
    """Return how much a test does: `whole` every night, `part` with each change."""
    return whole if NIGHTLY else part
