"""From valid inputs to bent ones, by a few moves that anybody can replay.

A move is three numbers: which, where (a share of the input), and with what. So a case is a short
list of numbers, whoever draws them: hypothesis, which makes them fewer and smaller when something
breaks, or a random generator for hours.
"""

MOST_BYTES = 64 * 1024
NUMBERS = (
    b"0", b"-1", b"1e999", b"1e308", b"nan", b"-0.0", b"2147483648", b"9223372036854775808",
    b"18446744073709551616", b"-9223372036854775809", b"9" * 400, b"9" * 5000, b"1_0", b"0x10",
)  # fmt: skip
WORDS = (
    b"", b"null", b"true", b"[]", b"{}", b'""', b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800",
    b"\n", b"\r", b",", b"=", b"[", b"]", b'"', b"'", b"#", b"a.b = 1\n", b"inf", b"[[x]]\n",
    b"1979-05-27", "\u0661".encode(), b"[0-999999]", b"\xef\xbb\xbf",
)  # fmt: skip
MOVES = 9


def mutated(seeds, first, moves):
    """`seeds[first]` after these (which, where in 0..2**16, with) moves; at most MOST_BYTES."""
    data = seeds[first % len(seeds)]
    for which, where, what in moves:
        data = _moved(data, which % MOVES, where * len(data) >> 16, what, seeds)[:MOST_BYTES]
    return data


def _moved(data, which, at, what, seeds):
    """One move."""
    if which == 0:  # a bit
        return data[:at] + bytes(b ^ 1 << what % 8 for b in data[at : at + 1]) + data[at + 1 :]
    if which == 1:  # the rest is missing
        return data[:at]
    if which == 2:  # a piece is missing
        return data[:at] + data[at + 1 + what % 16 :]
    if which == 3:  # what another one has from there on
        other = seeds[what % len(seeds)]
        return data[:at] + other[at * len(other) // max(1, len(data)) :]
    if which == 4:  # a piece, again and again
        piece = data[at : at + 1 + what % 16]
        return data[:at] + piece * (2 << what % 14) + data[at:]
    if which == 5:  # a word
        return data[:at] + WORDS[what % len(WORDS)] + data[at:]
    if which == 6:  # four bytes of a length
        word = (b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80")[what % 4]
        return data[:at] + word + data[at + 4 :]
    number = NUMBERS[what % len(NUMBERS)]  # the next number, or the next value
    begin, end = _number(data, at) if which == 7 else _value(data, at)
    replacement = number if which == 7 else WORDS[what % len(WORDS)]
    return data[:begin] + replacement + data[end:]


def _number(data, at):
    """The next run of digits from `at` on."""
    while at < len(data) and not data[at : at + 1].isdigit():
        at += 1
    end = at
    while end < len(data) and data[end : end + 1].isdigit():
        end += 1
    return at, end


def _value(data, at):
    """What stands between the next ':' or '=' and the next end of a value."""
    while at < len(data) and data[at : at + 1] not in b":=":
        at += 1
    at = end = min(at + 1, len(data))
    while end < len(data) and data[end : end + 1] not in b",\n}]":
        end += 1
    return at, end
