"""Keep other processes out of a measurement: a session of its own, first in the queue for the processor.

With autogroup scheduling `nice` only orders the processes of one session; the session itself has a niceness too, in
/proc/self/autogroup. Both need privileges; without them the measurement goes on and says so.

    python -m benchmarks.quiet COMMAND [ARGUMENTS ...]
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
FIRST = -20


def protect() -> bool:
    """Put this process and its children first; whether that was allowed."""
    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    try:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
        if AUTOGROUP.exists():
            AUTOGROUP.write_text(str(FIRST))
    except OSError:
        return False
    return True


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    if not protect():
        print("quiet: no permission for niceness -20; other processes will disturb", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
