"""deploy/crds, made from the types in api/crds, and what is made from the chart: `python -m deploy.build [HELM]`.

Tests keep both fresh. Without the program helm the kustomize base stays as it is.

What `kubectl explain` says of a field is its docstring in the source, which only a reader of the source can see.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import msgspec

import api.crds
from api.crds.definition import definition
from api.crds.kinds import KINDS, Kind
from api.crds.meta import Part
from api.crds.schema import Docs
from deploy import chart

HERE = Path(__file__).parent
HEAD = "# Made from api/crds by `python -m deploy.build`.\n"


def docstrings() -> Docs:
    """The docstring of every field of every type in api/crds that has one."""
    found: dict[tuple[type, str], str] = {}
    for module in pkgutil.iter_modules(api.crds.__path__, "api.crds."):
        loaded = importlib.import_module(module.name)
        for node in ast.parse(inspect.getsource(loaded)).body:
            cls = getattr(loaded, node.name) if isinstance(node, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef) and isinstance(cls, type) and issubclass(cls, Part):
                found |= {(cls, field): text for field, text in _of_fields(node).items()}
    return found


def _of_fields(node: ast.ClassDef) -> dict[str, str]:
    """By field: text that stands alone right behind it."""
    found = {}
    for field, behind in zip(node.body, node.body[1:], strict=False):
        match field, behind:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def path_of(kind: Kind) -> Path:
    return HERE / "crds" / f"{kind.group}_{kind.plural}.yaml"


def text_of(kind: Kind, docs: Docs) -> str:
    return HEAD + msgspec.yaml.encode(definition(kind, docs)).decode()


if __name__ == "__main__":
    said = docstrings()
    for made in KINDS:
        path_of(made).write_text(text_of(made, said))
    values = (chart.CHART / "values.yaml").read_text()
    chart.DOCUMENT.write_text(chart.documented(chart.DOCUMENT.read_text(), values))
    for helm in sys.argv[1:]:
        chart.BASE.write_text(chart.base(helm))
