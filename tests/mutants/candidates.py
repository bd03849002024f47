"""Deliberate mistakes: changes of one place of the package, drawn at random."""

import ast
import random
import re
from collections.abc import Iterator
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

    def change(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def line(self, source: str) -> int:
        return source.count("\n", 0, self.start) + 1

    def text(self, source: str) -> str:
        """The lines before and after."""
        begin, rest = source.rfind("\n", 0, self.start) + 1, source[self.end :].partition("\n")[2]
        texts = (s[begin : len(s) - len(rest)].split() for s in (source, self.change(source)))
        return "  - {}\n  + {}\n".format(*map(" ".join, texts))


def _of_c(path: str, source: str) -> Iterator[Mutant]:
    code = _NO_CODE.sub(lambda found: re.sub(r"\S", " ", found[0]), source)
    for each in re.finditer(rf"(?<= )({_C_WORDS})(?= )|(?<![\w.])\d+(?![\w.])", code):
        new = _OTHER.get(each[0]) or str(int(each[0]) + 1)
        yield Mutant(path, each[1] or "constant", *each.span(), new)


def _of_python(path: str, source: str) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _nodes(ast.parse(source.encode("latin-1"))):
        for kind, start, end, new in _changes(node, source, starts):
            yield Mutant(path, kind, start, end, new)


def _nodes(node: ast.AST) -> Iterator[Any]:
    """All in a node, but for what is in texts and in statements that raise."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.JoinedStr | ast.Raise):
            yield from _nodes(child)


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
        if "*" not in (source[a], source[c]):
            yield kind, a, d, source[c:d] + source[b:c] + source[a:b]
    elif isinstance(node, ast.Raise | ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement", *at(node), "pass"
    for test in [getattr(node, "test", None), *getattr(node, "ifs", [])]:
        if test and not source.startswith("TYPE_CHECKING", at(test)[0]):
            yield "condition", *at(test), f"(not ({source[slice(*at(test))]}))"


def draw(
    sources: dict[str, str], lines_run: dict[str, set[int]], number: int, seed: int
) -> list[Mutant]:
    """A file by the root of its length, then the kind of a change, then its place."""
    of = {}
    for path, source in sources.items():
        if path.endswith(".py"):
            run = lines_run.get(path, set[int]())
            of[path] = [m for m in _of_python(path, source) if m.line(source) in run]
        else:
            of[path] = [*_of_c(path, source)]
    paths = sorted(path for path in of if of[path])
    weights = [len(sources[path]) ** 0.5 for path in paths]
    dice, drawn = random.Random(seed), dict[Mutant, None]()
    while len(drawn) < number:
        (path,) = dice.choices(paths, weights)
        kind = dice.choice(sorted({m.kind for m in of[path]}))
        drawn[dice.choice([m for m in of[path] if m.kind == kind])] = None
    return list(drawn)
