"""A transaction in etcd's words, and the limits that are checked before it is sent.

Contract: `request_of` returns what etcd's `Txn` call takes, or raises UsageError for anything that
etcd or our own bounds forbid. Compares mean what etcd makes of them: over a range without keys,
create and mod revision are 0, and a compare of a value does not hold.

Consequence: what is refused here was never sent, so a UsageError leaves no doubt. One limit is not
checked here: etcd takes requests of at most 1.5 MiB (--max-request-bytes) and refuses a larger one
unread, which is a UsageError too.
"""

from __future__ import annotations

from typing import Any

from pyetcd.etcdrpc import rpc_pb2 as pb

from p2pckpt.errors import UsageError
from p2pckpt.ports import Compare, Txn
from p2pckpt.wire import MAX_RECORD_BYTES

MAX_TXN_COMPARES = 128
MAX_TXN_OPERATIONS = 128
"""etcd's default --max-txn-ops; it bounds compares and operations alike."""

_OPS = {"=": pb.Compare.EQUAL, "<": pb.Compare.LESS, ">": pb.Compare.GREATER}
_TARGETS: dict[str, tuple[int, str, type]] = {
    "value": (pb.Compare.VALUE, "value", bytes),
    "create": (pb.Compare.CREATE, "create_revision", int),
    "mod": (pb.Compare.MOD, "mod_revision", int),
}


def key_bytes(key: str) -> bytes:
    """A key as etcd takes it. Raises UsageError for an empty one."""
    if not key:
        raise UsageError("ledger key: needs at least one character")
    return key.encode()


def _compare(compare: Compare) -> Any:
    """A compare in etcd's words."""
    if compare.op not in _OPS or compare.target not in _TARGETS:
        raise UsageError(f"compare of {compare.key!r}: unknown {compare.target} {compare.op}")
    target, field, kind = _TARGETS[compare.target]
    if not isinstance(compare.operand, kind):
        raise UsageError(
            f"compare of {compare.key!r}: {compare.target} needs {kind.__name__}, "
            f"has {type(compare.operand).__name__}"
        )
    made = pb.Compare(
        result=_OPS[compare.op],
        target=target,
        key=key_bytes(compare.key),
        range_end=compare.end.encode(),
    )
    setattr(made, field, compare.operand)
    return made


def request_of(txn: Txn) -> Any:
    """A transaction in etcd's words. Raises UsageError for what etcd or the bounds forbid."""
    deletes = dict.fromkeys(txn.deletes)
    operations = len(txn.puts) + len(deletes)
    if len(txn.compares) > MAX_TXN_COMPARES or operations > MAX_TXN_OPERATIONS:
        raise UsageError(
            f"transaction: at most {MAX_TXN_COMPARES} compares and {MAX_TXN_OPERATIONS} "
            f"operations, has {len(txn.compares)} and {operations}"
        )
    written = {put.key for put in txn.puts}
    if len(written) < len(txn.puts) or written & deletes.keys():
        raise UsageError("transaction: writes or deletes a key that it also writes")
    made = pb.TxnRequest(compare=[_compare(compare) for compare in txn.compares])
    for put in txn.puts:
        if len(put.value) > MAX_RECORD_BYTES:
            raise UsageError(
                f"{put.key}: value of {len(put.value)} bytes, at most {MAX_RECORD_BYTES}"
            )
        lease = put.session.lease if put.session else 0
        request = pb.PutRequest(key=key_bytes(put.key), value=put.value, lease=lease)
        made.success.append(pb.RequestOp(request_put=request))
    for key in deletes:
        request = pb.DeleteRangeRequest(key=key_bytes(key))
        made.success.append(pb.RequestOp(request_delete_range=request))
    return made
