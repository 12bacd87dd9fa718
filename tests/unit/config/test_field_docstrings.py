"""Every key of the configuration has a docstring: the reference is generated from them."""

import ast
from pathlib import Path

import pytest

from megarl.config import schema

FILES = sorted(path for path in Path(schema.__path__[0]).glob("*.py") if path.stem not in ("algo", "key"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_field_and_choice_says_what_it_means(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef):
            continue
        is_enum = any(isinstance(base, ast.Name) and base.id == "Enum" for base in node.bases)
        for member, after in zip(node.body, [*node.body[1:], None], strict=True):
            name = getattr(getattr(member, "target", None), "id", None)
            if is_enum and isinstance(member, ast.Assign):
                name = ast.unparse(member.targets[0])
            says = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if name and not says:
                missing.append(f"{node.name}.{name}")
    assert missing == []
