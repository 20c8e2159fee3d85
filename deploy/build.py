"""Generates deploy/crds, files of the chart, the kustomize base and the table of values (`python -m deploy.build [HELM]`).
Field descriptions are docstrings of the source. Without the helm program the kustomize base is left
unchanged.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import msgspec

import api.colocation_profile
import api.katalyst
from agent.config.profiles import PROFILES
from api.colocation_profile import COLOCATION_PROFILE_KIND
from api.katalyst.crd_schema import FieldDocs, crd_manifest
from api.katalyst.kinds import KATALYST_KINDS, KatalystKind
from api.katalyst.meta import KatalystStruct
from deploy import chart

DEPLOY_DIR = Path(__file__).parent
DEFINED_KINDS = (*KATALYST_KINDS, COLOCATION_PROFILE_KIND)
"""Kinds with a definition in deploy/crds: Katalyst's and ours."""
PROFILES_HEADER = "# Generated from agent/config/profiles.py by `python -m deploy.build`.\n"
CRD_HEADER = "# Generated from api/katalyst by `python -m deploy.build`.\n"


def collect_field_docs() -> FieldDocs:
    """Docstrings of all fields of the types in api/katalyst and of our own kinds."""
    docs: dict[tuple[type, str], str] = {}
    modules = [module.name for module in pkgutil.iter_modules(api.katalyst.__path__, "api.katalyst.")]
    for name in (*modules, api.colocation_profile.__name__):
        loaded = importlib.import_module(name)
        for node in ast.parse(inspect.getsource(loaded)).body:
            cls = getattr(loaded, node.name) if isinstance(node, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef) and isinstance(cls, type) and issubclass(cls, KatalystStruct):
                docs |= {(cls, field): text for field, text in _field_docstrings(node).items()}
    return docs


def _field_docstrings(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, statement in zip(node.body, node.body[1:], strict=False):
        match field, statement:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def crd_path(kind: KatalystKind) -> Path:
    return DEPLOY_DIR / "crds" / f"{kind.group}_{kind.plural}.yaml"


def crd_text(kind: KatalystKind, docs: FieldDocs) -> str:
    return CRD_HEADER + msgspec.yaml.encode(crd_manifest(kind, docs)).decode()


def profiles_text() -> str:
    """Return the profiles of the agent in the form that the chart's templates read."""
    profiles = {
        name: {"purpose": profile.purpose, "act": profile.act.value, "settings": profile.settings}
        for name, profile in PROFILES.items()
    }
    return PROFILES_HEADER + msgspec.yaml.encode(profiles).decode()


def write_chart_files() -> None:
    """Write the files of the chart that have their source elsewhere, and delete those whose source is gone.

    They are copies, because helm reports each symbolic link of a chart with every command.
    """
    for copy in sorted({*chart.copied_files(), *chart.copies()}):
        source = chart.copied_files().get(copy)
        copy.parent.mkdir(exist_ok=True)
        if source is None:
            copy.unlink()
        else:
            copy.write_bytes(source.read_bytes())
    chart.PROFILES_FILE.write_text(profiles_text())


if __name__ == "__main__":
    docs = collect_field_docs()
    for kind in DEFINED_KINDS:
        crd_path(kind).write_text(crd_text(kind, docs))
    write_chart_files()
    values = (chart.CHART_DIR / "values.yaml").read_text()
    chart.INSTALL_DOCUMENT.write_text(chart.insert_values_table(chart.INSTALL_DOCUMENT.read_text(), values))
    for helm in sys.argv[1:]:
        chart.KUSTOMIZE_BASE.write_text(chart.render_base(helm))
