"""A second way to everything that the viewer writes for a folder of dumps, as the format is
defined, without any tree.

    reference.py DUMPS WRITTEN...    WRITTEN folders hold cpp_stack, py_stack, cpp_stack.svg and
                                     py_stack.svg of DUMPS

Prints what differs, and the files that no dump can be read from; the exit code is 1 when something
differs. It shares no code with the viewer: the wire format, the labels, the colours and the widths
are done here once more, the slow way.
"""

import os
import re
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict

SVG = "{http://www.w3.org/2000/svg}"
KNOWN = set(range(1, 12)) | set(range(100, 106))


class NoDump(Exception):
    """A file is not a dump."""


def varint(data, at):
    value = 0
    for i in range(10):
        if at + i >= len(data):
            raise NoDump("truncated")
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >= 1 << 64:
                raise NoDump("a number of more than 64 bits")
            return value, at + i + 1
    raise NoDump("a number of more than ten bytes")


def fields(data):
    """Every field of a message: number, wire type, value."""
    at, groups = 0, []
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise NoDump("no field has this number")
        value = None
        if wire == 0:
            value, at = varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire == 3:
            groups.append(number)
        elif wire == 4:
            if not groups or groups.pop() != number:
                raise NoDump("the end of a group that did not begin")
        else:
            raise NoDump("no wire type")
        if at > len(data):
            raise NoDump("truncated")
        if not groups and wire not in (3, 4):
            yield number, wire, value
    if groups:
        raise NoDump("truncated")


def message(wire, value):
    if wire != 2:
        raise NoDump("a field has a wrong type")
    return value


def text(value):
    return value.decode("utf-8", errors="replace")


def names(frames_field, thread):
    """The names of one thread, root first."""
    leaf_first = []
    for number, wire, value in fields(thread):
        if number == frames_field:
            frame = {1: b"", 2: b""}
            for inner, inner_wire, name in fields(message(wire, value)):
                if inner in frame:
                    frame[inner] = message(inner_wire, name)
            leaf_first.append((text(frame[1]), text(frame[2])))
    drawn = []
    for func, file in reversed(leaf_first):
        name = clean(func) + "@" + clean(file)
        if "lto_priv" in name:
            break
        drawn.append(name)
    return tuple(drawn)


# Characters of the category Cf that are seen, and others that are not.
VISIBLE = set(map(chr, [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)]))
INVISIBLE = set(map(chr, [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2065, 0x3164, 0xFFA0, *range(0x180B, 0x1810)]))
INVISIBLE |= set(map(chr, [*range(0xFE00, 0xFE10), *range(0xFFF0, 0xFFF9), *range(0xFDD0, 0xFDF0), *range(0xE0000, 0xE1000)]))


def clean(name):
    return "".join(map(seen, name))


def seen(c):
    if c == ";":
        return ","
    if c in "\t\n\v\f\r\x85\u2028\u2029":
        return " "
    hidden = unicodedata.category(c) in ("Cc", "Cf") and c not in VISIBLE
    return "\ufffd" if hidden or c in INVISIBLE or ord(c) & 0xFFFE == 0xFFFE else c


def stacks(path):
    """The native and the Python stacks of one file."""
    if not os.path.isfile(path):
        raise NoDump("no regular file")
    with open(path, "rb") as file:
        data = file.read()
    state, threads, known = "", {1: [], 2: []}, False
    for number, wire, value in fields(data):
        known |= number in KNOWN
        if number in threads:
            threads[number].append(names({1: 3, 2: 7}[number], message(wire, value)))
        elif number == 11:
            state = text(message(wire, value))
    if not known:
        raise NoDump("no field of a dump")
    state = "State@" + clean(state)
    state = () if "lto_priv" in state else (state,)
    return [[stack for stack in [state, *threads[mode]] if stack] for mode in (1, 2)]


def runs(ranks):
    """Ascending, maximal runs, joined by a slash."""
    found = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return "/".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def lines(of_ranks, world):
    """The folded text, as a set of lines: each a tuple of labels."""
    has = defaultdict(set)
    for rank, stack in of_ranks:
        for depth in range(1, len(stack) + 1):
            has[stack[:depth]].add(rank)
    labels = {
        path: f"{path[-1]}@{runs(ranks)}|{runs(set(range(world)) - ranks)}" for path, ranks in has.items()
    }
    ends = {stack for _, stack in of_ranks}
    return {tuple(labels[stack[:depth]] for depth in range(1, len(stack) + 1)) for stack in ends}


def colour(label):
    rules = [
        (r"(?i)/torch|nccl", "green"),
        (r"::", "yellow"),
        (r"(?i:python.*\.[ch]:\d)|\.py:\d", "cyan"),
        (r"State@", "purple"),
    ]
    return next((name for rule, name in rules if re.search(rule, label, re.ASCII)), "red")


def hue(fill):
    red, green, blue = map(int, re.fullmatch(r"rgb\((\d+),(\d+),(\d+)\)", fill).groups())
    # Shades of one hue lie closer together than this, those of another one farther apart.
    high = max(red, green, blue) - 48
    return {
        (False, True, False): "green",
        (True, True, False): "yellow",
        (False, True, True): "cyan",
        (True, False, True): "purple",
        (True, False, False): "red",
    }.get((red >= high, green >= high, blue >= high), fill)


def drawable(label, root):
    """Pictures replace characters that XML and the drawing library cannot represent."""
    label = label.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
    return label.lstrip("\u200b") if root else label


def picture(path, folded, title):
    """Returns the errors of a picture: each frame has its label, its colour, and a width of one for
    each end.
    """
    root = ElementTree.parse(path).getroot()
    if root.get("width") != "1600":
        yield f"{path}: width {root.get('width')}"
    # An empty picture says so in place of its title.
    if folded and not any(node.text == title for node in root.iter(SVG + "text")):
        yield f"{path}: no title {title!r}"
    expected, inner = Counter(), Counter()
    for line in folded:
        for depth in range(1, len(line) + 1):
            inner[line[:depth]] += 1
    for path_of, count in inner.items():
        expected[drawable(path_of[-1], len(path_of) == 1), count, colour(path_of[-1])] += 1
    found = Counter()
    for group in root.iter(SVG + "g"):
        name, rect = group.find(SVG + "title"), group.find(SVG + "rect")
        if name is None or rect is None:
            continue
        label, count = re.fullmatch(r"(?s)(.*) \(([\d,]+) samples?, [\d.]+%\)", name.text).groups()
        count = int(count.replace(",", ""))
        if label == "all":
            if count != len(folded):
                yield f"{path}: {count} stacks in all instead of {len(folded)}"
            continue
        width = float(rect.get("width").rstrip("%"))
        if abs(width - 100 * count / len(folded)) > 0.02:
            yield f"{path}: {label} is {width} % wide with {count} of {len(folded)} stacks"
        found[label.lstrip("\u200b") if label.startswith("\u200b") else label, count, hue(rect.get("fill"))] += 1
    for frame in (expected - found) + (found - expected):
        yield f"{path}: {expected[frame]} expected, {found[frame]} drawn: {frame}"


def main(dumps, *written):
    names = {}
    left_out = []
    for name in os.listdir(os.fsencode(dumps)):
        if not name.endswith(b".stacktrace"):
            continue
        parts = re.fullmatch(rb"([0-9]+)-([0-9]+)\.stacktrace", name)
        if parts and max(map(int, parts.groups())) < 1 << 32:
            names[name] = tuple(map(int, parts.groups()))
        else:
            left_out.append(name)
    world = max((world for _, world in names.values()), default=0)
    of_mode = ([], [])
    for name, (rank, _) in names.items():
        try:
            both = stacks(os.path.join(os.fsencode(dumps), name))
        except NoDump:
            left_out.append(name)
            continue
        for mode, found in zip(of_mode, both):
            mode.extend((rank, stack) for stack in found)
    wrong = []
    for folder in written:
        for mode, of_ranks in zip(("cpp", "py"), of_mode):
            expected = lines(of_ranks, world)
            path = os.path.join(folder, f"{mode}_stack")
            with open(path, encoding="utf-8", newline="") as file:
                got = file.read()
            if got and not got.endswith("\n"):
                wrong.append(f"{path}: the last line does not end")
            got = Counter(got.split("\n")[:-1])
            wanted = Counter(";".join(line) + " 1" for line in expected)
            wrong += [f"{path}: {wanted[line]} expected, {got[line]} there: {line!r}" for line in (wanted - got) + (got - wanted)]
            wrong += picture(path + ".svg", expected, f"merge stack in {mode}")
    for name in sorted(left_out):
        print("left out:", ascii(os.fsdecode(name)))
    for line in wrong[:20]:
        print("WRONG", ascii(line))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
