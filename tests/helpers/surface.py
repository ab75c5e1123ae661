"""The public surface of `pagedkv.api` as text: names, signatures, fields with annotation, default and gate, constants.

Read from the source, so that nothing has to be imported. After a change that was meant:

    python -m tests.helpers.surface > tests/api/surface.txt
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

API = Path(__file__).resolve().parents[2] / "pagedkv" / "api"


def surface(folder: Path = API) -> str:
    """Every module of the folder, by name, one line for each public thing."""
    lines = []
    for path in sorted(folder.glob("*.py")):
        module = "pagedkv.api" if path.stem == "__init__" else f"pagedkv.api.{path.stem}"
        lines += [f"# {module}", *_body(ast.parse(path.read_text("utf-8")).body, ""), ""]
    return "\n".join(lines)


def _body(nodes: list[ast.stmt], indent: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from _class(node, indent)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function(node, indent)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            yield from _value(node, indent)


def _class(node: ast.ClassDef, indent: str) -> Iterator[str]:
    if not _private(node.name):
        bases = ", ".join(ast.unparse(base) for base in (*node.bases, *node.keywords))
        yield f"{indent}{_decorators(node)}class {node.name}({bases})"
        yield from _body(node.body, f"{indent}    ")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, indent: str) -> Iterator[str]:
    if not _private(node.name) or node.name == "__init__":
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        yield f"{indent}{_decorators(node)}{kind} {node.name}({ast.unparse(node.args)}){returns}"


def _value(node: ast.AnnAssign | ast.Assign, indent: str) -> Iterator[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    names = [ast.unparse(target) for target in targets]
    if not all(map(_private, names)) or names == ["__all__"]:
        yield f"{indent}{ast.unparse(node)}"


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)


def _private(name: str) -> bool:
    return name.startswith("_")


if __name__ == "__main__":
    print(surface(), end="")
