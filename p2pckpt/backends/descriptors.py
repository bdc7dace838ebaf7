"""How many files an agent may have open at once, and what is said when there are no more.

Intuition: each trainer, peer, RAM file in transfer and etcd member costs a descriptor. The limit
that a shell gives is often 1024, and a process may raise it by itself up to the hard one. Some
libraries end the process when they get none (gRPC, at its start), so too few are an error at start.

Contract: `raise_limit` changes this process and what it starts afterwards, nothing else.
"""

from __future__ import annotations

import errno
import resource

from p2pckpt.errors import NoRoom

NEEDED = 256
"""An idle agent has some 30 open; a trainer, a peer or a file in transfer takes one to three."""
WANTED = 16384
"""Beyond what the bounds of all connections let an agent open."""
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> int:
    """Raise the limit to `WANTED` or as far as the hard one allows; what it is then.

    Raises NoRoom if that is below `NEEDED`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        raise NoRoom(
            f"open files: an agent needs {NEEDED}, the limit is {soft}; raise it "
            "(ulimit -n, LimitNOFILE= in the unit, docker run --ulimit nofile=)"
        )
    return soft


def lacking(error: OSError) -> str:
    """What an error says if it is about descriptors, with the limit; "" if it is not."""
    if error.errno not in _NONE_LEFT:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"needs one more open file, the limit is {limit} (ulimit -n)"
