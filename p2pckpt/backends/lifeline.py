"""A child process that dies with its parent, also when the parent is killed.

Linux sends a signal of choice to a process when the thread that started it ends
(PR_SET_PDEATHSIG), but only the process itself can ask for that. So a child is first a bare Python
that asks, and then becomes the program. A `preexec_fn` would run between fork and exec instead, in
a copy of a process in which gRPC's threads run, and may hang there.

Contract: `tied(command)` is a command to start with `subprocess.Popen` from this process; the
process id stays the same when the program takes over. If the parent dies before the child asked,
the child ends without starting the program.

Consequence: the signal comes at the end of the starting *thread*. Start children from a thread that
lives as long as they shall. The setting does not pass on to children's children.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_ASK_AND_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def tied(command: Sequence[str], by: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that runs `command`, of which signal `by` makes an end when we are gone.

    ``command[0]`` is a path: PATH is not searched.
    """
    ask = [sys.executable, "-I", "-S", "-c", _ASK_AND_BECOME, str(os.getpid()), str(int(by))]
    return [*ask, *command]
