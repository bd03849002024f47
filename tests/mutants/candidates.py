"""Deliberate mistakes: changes of one place of the package, drawn at random."""

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_IN_C = {"==": "!=", "<": "<=", ">": ">=", "&&": "||", "+": "-", "*": "/", "+=": "-="}
_OTHER = _IN_C | {"and": "or", "is": "is not", "in": "not in", "//": "*", "%": "*"}
_OTHER |= {new: old for old, new in _OTHER.items() if new not in _OTHER}
_C_WORDS = "|".join(map(re.escape, [*_IN_C, *_IN_C.values()]))
_NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|^ *#[^\n]*|"(?:\\.|[^"\\\n])*"', re.S | re.M)


class Mutant(NamedTuple):
    """The characters [start, end) of a file are replaced."""

    path: str
    kind: str
    start: int
    end: int
    new: str
    lines: range  # tests that run one of these may see the change; of the whole file, if empty

    def change(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def text(self, source: str) -> str:
        """The lines before and after."""
        begin, rest = source.rfind("\n", 0, self.start) + 1, source[self.end :].partition("\n")[2]
        texts = (s[begin : len(s) - len(rest)].split() for s in (source, self.change(source)))
        return "  - {}\n  + {}\n".format(*map(" ".join, texts))


def _of_c(path: str, source: str) -> Iterator[Mutant]:
    code = _NO_CODE.sub(lambda found: re.sub(r"\S", " ", found[0]), source)
    for each in re.finditer(rf"(?<= )({_C_WORDS})(?= )|(?<![\w.])\d+(?![\w.])", code):
        new = _OTHER.get(each[0]) or str(int(each[0]) + 1)
        yield Mutant(path, each[1] or "constant", *each.span(), new, range(0))


def _of_python(path: str, source: str) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, lines in _nodes(ast.parse(source.encode("latin-1")), range(0)):
        for kind, start, end, new in _changes(node, source, starts):
            yield Mutant(path, kind, start, end, new, lines)


def _nodes(node: ast.AST, lines: range) -> Iterator[tuple[Any, range]]:
    """All in a node, with the lines of the statement; of a whole function where it is defined."""
    for child in ast.iter_child_nodes(node):
        own = lines
        if isinstance(child, ast.FunctionDef) or (isinstance(child, ast.stmt) and lines):
            own = range(child.lineno, (child.end_lineno or 0) + 1)
        yield child, own
        if not isinstance(child, ast.JoinedStr | ast.Raise):
            yield from _nodes(child, own)


def _changes(node: Any, source: str, starts: list[int]) -> Iterator[tuple[str, int, int, str]]:
    def at(node: Any) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    kind = type(node).__name__
    if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
        left, right = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)][:2]
        start, end = at(left)[1], at(right)[0]
        word = source[start:end].strip("() \n")
        if word in _OTHER and not {'"'} & {source[end], source[start - 1]}:  # texts are left alone
            yield kind, start, end, source[start:end].replace(word, _OTHER[word])
    elif isinstance(node, ast.UnaryOp):
        start = at(node)[0]
        yield kind, start, start + (3 if isinstance(node.op, ast.Not) else 1), ""
    elif isinstance(node, ast.Constant) and isinstance(value := node.value, bool | int | float):
        yield kind, *at(node), str(not value if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        (a, b), (c, d) = map(at, node.args[:2])
        of_either_order = getattr(node.func, "id", "") in ("max", "min")
        if "*" not in (source[a], source[c]) and source[a:b] != source[c:d] and not of_either_order:
            yield kind, a, d, source[c:d] + source[b:c] + source[a:b]
    elif isinstance(node, ast.Raise | ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement", *at(node), "pass"
    for test in [getattr(node, "test", None), *getattr(node, "ifs", [])]:
        if test and not source.startswith("TYPE_CHECKING", at(test)[0]):
            yield "condition", *at(test), f"(not ({source[slice(*at(test))]}))"


def _room(path: str) -> str:
    """The folder in the package; apart from it, what is written in C."""
    return (Path(path).parts[1:-1] or ("engine",))[0] + ("" if path.endswith(".py") else " (C)")


def draw(sources: dict[str, str], number: int, seed: int) -> list[Mutant]:
    """A room by the root of its length, a file by its length, a kind, a place; so many times."""
    dice, lengths, drawn = random.Random(seed), Counter[str](), dict[Mutant, None]()
    of = {
        p: [*(_of_python if p.endswith(".py") else _of_c)(p, sources[p])] for p in sorted(sources)
    }
    for path in filter(of.get, of):
        lengths[_room(path)] += len(sources[path])
    while len(drawn) < number:
        (room,) = dice.choices([*lengths], [length**0.5 for length in lengths.values()])
        paths = [path for path in of if of[path] and _room(path) == room]
        (path,) = dice.choices(paths, [len(sources[path]) for path in paths])
        kind = dice.choice(sorted({mutant.kind for mutant in of[path]}))
        drawn[dice.choice([mutant for mutant in of[path] if mutant.kind == kind])] = None
    return [*drawn]
