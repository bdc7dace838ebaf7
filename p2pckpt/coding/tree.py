"""The typed tree: every value of a state that is no tensor, as bytes, without pickle.

What changes from step to step and is no tensor (counters, learning rates, RNG states, the nesting
itself) becomes one tree of the closed set of node types below. The tree's bytes are magic,
version, length and MessagePack; they lie in the snapshot as its last U8 tensor. Floats keep every
bit, ints have any size, and runs of ints are packed. Tensors are leaves that hold an index into
the snapshot's table.

No node names a class or code, so decoding can build nothing but data. Decoding treats its input as
hostile: whatever the bytes are, the answer is a tree of known node types and bounded depth, or
:class:`FormatError`. What a node's strings and indices mean is for the reader to check.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from ..errors import FormatError

VERSION = 1
_SHOWN = 20
MAX_DEPTH = 200  # levels of nesting; deeper ones would meet Python's own recursion limit

_MAGIC = b"P2PT"
_PREFIX = struct.Struct("<4sHHQ")  # magic, version, zero, body length


class _Node(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tagged node; written as the array [tag, field, ...]."""


class Dict(_Node, tag=1):
    """A mapping in its order; ``attribute`` is the ``_metadata`` of an nn.Module's state dict."""

    kind: Literal["dict", "OrderedDict", "Counter"]
    keys: list[Node]
    values: list[Node]
    attribute: Node = None


class Seq(_Node, tag=2):
    """A sequence or set."""

    kind: Literal["list", "tuple", "set", "frozenset", "Size"]
    items: list[Node]


class Ints(_Node, tag=3):
    """A list or tuple of many ints, packed (Python's RNG state has 625)."""

    kind: Literal["list", "tuple"]
    code: Literal["<u1", "<u2", "<u4", "<u8", "<i8"]
    data: bytes


class BigInt(_Node, tag=4):
    """An int beyond 64 bits: two's complement, little endian."""

    data: bytes


class Complex(_Node, tag=5):
    """A Python complex."""

    real: float
    imag: float


class Text(_Node, tag=6):
    """A str that is not valid Unicode (lone surrogates), as UTF-8 with surrogatepass."""

    data: bytes


class Raw(_Node, tag=16):
    """A bytes value."""

    data: bytes


class Dtype(_Node, tag=7):
    """A torch.dtype by name, without ``torch.``."""

    name: str


class Device(_Node, tag=8):
    """A torch.device as text."""

    name: str


class Part(_Node, tag=10):
    """Which part of a global tensor a DTensor's local tensor is; all lengths in elements."""

    shape: list[int]
    offset: list[int]
    lengths: list[int]
    placements: list[str]
    mesh: list[int]
    coordinate: list[int]


class Tensor(_Node, tag=11):
    """A torch tensor: the table's ``entry``-th tensor. Two nodes of one entry are tied."""

    entry: int
    parameter: bool
    requires_grad: bool
    part: Part | None = None


class Array(_Node, tag=12):
    """A numpy array, or a numpy scalar."""

    entry: int
    scalar: bool


class Blob(_Node, tag=13):
    """A large bytes or str, stored as a U8 tensor."""

    entry: int
    text: bool


class Generator(_Node, tag=14):
    """A torch.Generator's state."""

    device: str
    state: bytes


class Object(_Node, tag=15):
    """What ``state_dict()`` of an object gave."""

    state: Node


Node: TypeAlias = (
    bool | int | float | str
    | Dict | Seq | Ints | BigInt | Complex | Text | Raw | Dtype | Device
    | Tensor | Array | Blob | Generator | Object | None
)  # fmt: skip

_TUPLES: dict[str, Any] = {
    "builtins.tuple": "tuple", "builtins.frozenset": "frozenset", "torch.Size": "Size",
}  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Node)


def encode(root: Node) -> bytes:
    """Return the tree's bytes: 16 bytes of prefix, then MessagePack. Floats keep every bit."""
    body = _encoder.encode(root)
    return _PREFIX.pack(_MAGIC, VERSION, 0, len(body)) + body


def decode(data: bytes | bytearray | memoryview) -> Node:
    """Return the tree that ``data`` holds exactly; anything else raises FormatError."""
    if len(data) < _PREFIX.size:
        raise FormatError(f"tree of {len(data)} bytes is shorter than its prefix")
    magic, version, zero, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC or zero:
        raise FormatError(f"tree starts with {magic!r}, needed {_MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"tree has version {version}, this release reads {VERSION}")
    if length != len(data) - _PREFIX.size:
        raise FormatError(f"tree states {length} bytes, found {len(data) - _PREFIX.size}")
    try:
        root: Node = _decoder.decode(memoryview(data)[_PREFIX.size :])
    except (msgspec.MsgspecError, RecursionError, MemoryError, ValueError) as error:
        raise FormatError(f"tree is malformed: {error}") from error
    level: list[Node] = [root]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return root
        level = [child for node in level for child in children(node)]
    raise FormatError(f"tree is nested deeper than {MAX_DEPTH}")


def children(node: Node) -> Iterable[Node]:
    """Return the nodes directly inside ``node``; checks a Dict's lengths (FormatError)."""
    if isinstance(node, Dict):
        if len(node.keys) != len(node.values):
            raise FormatError(f"mapping of {len(node.keys)} keys has {len(node.values)} values")
        return [*node.keys, *node.values, node.attribute]
    if isinstance(node, Seq):
        return node.items
    return (node.state,) if isinstance(node, Object) else ()


def plain(x: Any) -> Node:
    """Return the node of an immutable value; TypeError naming the class of what is none."""
    kind = type(x)
    if kind in (float, bool, type(None)):
        return x  # type: ignore[no-any-return]
    if kind is int:
        small = -(2**63) <= x < 2**64
        return x if small else BigInt(x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True))
    if kind is str:
        data = x.encode("utf-8", "surrogatepass")
        return x if x.isascii() or _is_utf8(data) else Text(data)
    if kind is bytes:
        return Raw(x)
    if kind is complex:
        return Complex(x.real, x.imag)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _TUPLES:
        return Seq(_TUPLES[name], [plain(item) for item in x])
    if name == "torch.dtype":
        return Dtype(str(x).removeprefix("torch."))
    if name == "torch.device":
        return Device(str(x))
    raise TypeError(name)


def is_plain(x: Any) -> bool:
    """Say whether ``x`` is a single immutable value (no container), numpy scalars included."""
    kind = type(x)
    if kind in (float, bool, int, str, bytes, complex) or isinstance(x, np.generic):
        return True
    return kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")


def value(node: Node) -> Any:
    """Return the value of a node that :func:`plain` could have made; FormatError otherwise."""
    if node is None or isinstance(node, bool | int | float | str):
        return node
    torch: Any = sys.modules.get("torch")
    try:
        match node:
            case BigInt():
                return int.from_bytes(node.data, "little", signed=True)
            case Complex():
                return complex(node.real, node.imag)
            case Text():
                return text_or_bytes(node.data, True)
            case Raw():
                return node.data
            case Dtype() if isinstance(getattr(torch, node.name, None), torch.dtype):
                return getattr(torch, node.name)
            case Device():
                return torch.device(node.name)
            case Seq("tuple" | "frozenset" | "Size"):
                kinds = {"tuple": tuple, "frozenset": frozenset}
                return kinds.get(node.kind, torch.Size)([value(item) for item in node.items])
            case Ints("tuple"):
                return tuple(unpack(node).items)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"value in the tree: {error}") from error
    raise FormatError(f"{type(node).__name__} is no plain value")


def distinct(nodes: list[Node], where: str) -> list[Any]:
    """Return the values of keys or members; FormatError if two are equal or one has no hash."""
    values = [value(node) for node in nodes]
    try:
        if len(set(values)) == len(values):
            return values
    except TypeError as error:
        raise FormatError(f"a key or member at {where}: {error}") from error
    raise FormatError(f"a key or member occurs twice at {where}")


def text_or_bytes(data: bytes | memoryview, text: bool) -> str | bytes:
    """Return the str or bytes that ``data`` stands for."""
    try:
        return str(data, "utf-8", "surrogatepass") if text else bytes(data)
    except UnicodeDecodeError as error:
        raise FormatError(f"text in the snapshot: {error}") from error


def _is_utf8(data: bytes) -> bool:
    try:
        return bool(data.decode()) or not data
    except UnicodeDecodeError:
        return False


def pack(kind: Literal["list", "tuple"], values: Sequence[int]) -> Ints | Seq:
    """Return the node of a list or tuple of ints, packed if they fit 64 bits."""
    low, high = min(values), max(values)
    if low >= 0 and high < 2**64:
        code: Any = next(c for c in ("<u1", "<u2", "<u4", "<u8") if high < 256 ** int(c[2]))
    elif low >= -(2**63) and high < 2**63:
        code = "<i8"
    else:
        return Seq(kind, [plain(item) for item in values])
    return Ints(kind, code, np.array(values, code).tobytes())


def unpack(node: Ints) -> Seq:
    """Return the Seq that an Ints stands for."""
    if len(node.data) % int(node.code[2]):
        raise FormatError(f"{len(node.data)} bytes are no whole number of {node.code}")
    return Seq(node.kind, np.frombuffer(node.data, node.code).tolist())


def saves_data(node: Node) -> bool:
    """Say whether a tensor, array, generator or object is in ``node``, at any depth."""
    if isinstance(node, Tensor | Array | Generator | Object):
        return True
    return any(map(saves_data, children(node)))


def items(node: Node) -> dict[Any, Node]:
    """Return a mapping's nodes by those keys that are str or int; empty if it is no mapping."""
    node = node.state if isinstance(node, Object) else node
    pairs = zip(node.keys, node.values, strict=True) if isinstance(node, Dict) else ()
    return {key: value for key, value in pairs if isinstance(key, str | int)}


def members(node: Node) -> list[Node]:
    """Return the nodes of a sequence; empty if it is none."""
    node = unpack(node) if isinstance(node, Ints) else node
    return node.items if isinstance(node, Seq) else []


def show(path: tuple[Any, ...]) -> str:
    """Return a path as it would be written in Python: ``state["opt"][0]``."""
    keys = (key if len(key) < 80 else f"{key[:77]}..." for key in map(repr, path))
    return "state" + "".join(f"[{key}]" for key in keys)


@dataclass(slots=True)
class Misfit:
    """How a saved tree differs from the target of a restore: paths, one line each."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def message(self) -> str:
        """Return the report (each list's first 20 and its length), empty if all fits."""
        lines = []
        for what in ("missing", "unexpected", "differing"):
            if paths := getattr(self, what):
                lines += [f"{len(paths)} {what}:", *("  " + path for path in paths[:_SHOWN])]
                lines += ["  ..."] if len(paths) > _SHOWN else []
        return "\n".join(["the snapshot does not fit the target", *lines]) if lines else ""

    def optimizer(self, node: Node, known: Any, path: tuple[Any, ...]) -> None:
        """Compare with an optimizer's state dict: its groups, and that no state is half there.

        A parameter without any state, on either side, is legal: it had no step yet.
        """
        saved = items(node)
        groups = [items(group) for group in members(saved.get("param_groups"))]
        sizes = [len(members(group.get("params"))) for group in groups]
        wanted = [len(group["params"]) for group in known["param_groups"]]
        if sizes != wanted:
            where = show((*path, "param_groups"))
            self.differing.append(f"{where}: saved groups of {sizes} parameters, target {wanted}")
        states = items(saved.get("state"))
        for key, own in known["state"].items():
            if key in states and isinstance(own, dict):
                names, where = items(states[key]), show((*path, "state", key))
                self.missing += [f"{where}[{name!r}]" for name in own if name not in names]
                self.unexpected += [f"{where}[{name!r}]" for name in names if name not in own]
