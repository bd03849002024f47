"""The examples in the docstrings of public names."""

import ast
import doctest
import importlib
from itertools import pairwise
from pathlib import Path
from types import ModuleType


def docstring(module: ModuleType, name: str) -> str:
    """The docstring of a public name; of a type alias, the string below its assignment."""
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and any(a.asname == name for a in node.names):
            return docstring(importlib.import_module(str(node.module)), name)
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return str(ast.literal_eval(below.value)) if isinstance(below, ast.Expr) else ""
    return getattr(module, name).__doc__ or ""


def complaints(name: str, doc: str) -> str:
    """Runs the examples of a docstring; returns what is not as the docstring says."""
    test = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    if not test.examples:
        return f"{name} has no example in its docstring"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)
