"""Check names and prose against the vocabulary of the field: deny lists, full-sentence docstrings, unique names.

    python -m tests.language [PATH ...]      list violations in these files, or in the whole tree
    python -m tests.language --count         one line per file, most violations first

The rules keep the code readable for Kubernetes and kernel engineers who have never met the authors (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("api", "common", "kube", "probes", "agent", "exporters", "controller", "cli", "demo")
PACKAGES = (*PRODUCT, "bench", "dashboards", "deploy", "tools")
NAMES = frozenset(
    (  # noqa: SIM905 - a paragraph is easier to keep than 50 quoted words
        "pace told kept found asked seen known wanted promised foretold beside whole one said says nobody whoever "
        "who whom he him his heir deaf hands theirs ours obey obeyed judge judged culprit guilt mend wish "
        "wishes lent lend lends begun anew placed made taken meant gone somebody "
    ).split()
)
"""Identifiers that say nothing by themselves: participles, pronouns and persons."""
LABELS = NAMES | {"ask", "tended"}
"""Words that no component has as its name or form: users read both in `dioptase doctor` and in metrics."""
PARTS = frozenset(
    (  # noqa: SIM905
        "told asked foretold nobody whoever who whom him heir obey obeys obeyed judge judges judged culprit guilt mend "
        "mended wish wishes lend lends lent begun anew somebody promised beside deaf"
    ).split()
)
"""Words that no longer identifier contains either, between underscores or capitals."""
THIRD_PERSON = frozenset(
    (  # noqa: SIM905 - a paragraph is easier to keep than 50 quoted words
        "Adds Applies Calls Cancels Checks Closes Compares Computes Connects Decides Does Drops Ends Evaluates Evicts Excludes "
        "Gives Hands Loads Makes Notifies Opens Passes Publishes Raises Reads Records Refuses Removes Restores Returns Runs "
        "Saves Sends Serves Sets Starts Stops Takes Updates Uses Writes Yields"
    ).split()
)
"""Verbs with which no docstring of a function begins: it has the imperative, as PEP 257 recommends."""
WORDS = frozenset(
    (  # noqa: SIM905 - a paragraph is easier to keep than 50 quoted words
        "who whom whoever whomever nobody somebody he him his himself she anew foretold foretell foretells "
        "mend mended mends lest begun shyly heir told shall wherein obey obeyed obeys asked promised "
        "thereof whence hither "
    ).split()
)
"""Words of prose that are archaic, or that make a person of a machine."""
_TEMPLATE_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_WORD = re.compile(r"(?<![\w`./{-])[A-Za-z]+(?![\w`/}-])")
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_OPENING = re.compile(r"[A-Z0-9`\"'(\[/*$<%~.-]|/|e\.g\.")
_CLOSING = (".", "?", "!", ":", ".)", "```", "::")
ENDINGS = (".py", ".md", ".js", ".c", ".h", ".yaml", ".yml", ".tpl", ".html", ".sh", ".txt")


class Violation(NamedTuple):
    """One place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def in_prose(text: str) -> list[str]:
    """Denied words of a comment, docstring, message or document; quoted code in backticks does not count."""
    text = re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL)
    return [word for word in _WORD.findall(text) if word.lower() in WORDS]


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def _labels(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings with a denied word that are assigned to a variable `name` or `form`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = list(zip(targets, values, strict=False))
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case _:
                continue
        for target, value in pairs:
            label = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if label not in ("name", "form") or not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            if LABELS & set(re.split(r"[^a-z]+", value.value.lower())):
                yield node.lineno, value.value


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and those behind a constant or a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
            continue
        for number, child in enumerate(body):
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                before = body[number - 1] if number else None
                if number == 0 or isinstance(before, ast.Assign | ast.AnnAssign):
                    yield child.lineno, child.value.value


def _third_person(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """First lines of the docstrings of functions that do not begin in the imperative; a property may have any form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            decorators = {getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list}
            if text.split(" ", 1)[0] in THIRD_PERSON and not decorators & {"property", "cached_property"}:
                yield node.lineno, text.splitlines()[0]


def _messages(tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    """String constants that hold more than one word, and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def python_violations(path: str, text: str) -> Iterator[Violation]:
    """Violations of a Python file: identifiers, docstrings, comments and messages."""
    tree = ast.parse(text)
    for line, name in _names(tree):
        if name.strip("_").lower() in NAMES or PARTS & {part.lower() for part in _PART.findall(name)}:
            yield Violation(path, line, "identifier", name)
    yield from (Violation(path, line, "label", label) for line, label in _labels(tree))
    if path.partition("/")[0] in PRODUCT:
        yield from (Violation(path, line, "mood", opening) for line, opening in _third_person(tree))
    documented = set()
    for line, docstring in _docstrings(tree):
        documented.add(docstring)
        stripped = docstring.strip()
        if not stripped or not _OPENING.match(stripped) or not stripped.endswith(_CLOSING):
            yield Violation(path, line, "docstring", stripped.splitlines()[0] if stripped else "(empty)")
        for word in in_prose(stripped):
            yield Violation(path, line, "word", word)
    for line, message in _messages(tree, text):
        if message not in documented:
            for word in in_prose(message):
                yield Violation(path, line, "word", word)


def document_violations(path: str, text: str) -> Iterator[Violation]:
    """Violations of a document or of code in another language: words alone."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= path.endswith(".md") and line.lstrip().startswith("```")
        if not fenced:
            for word in in_prose(line):
                yield Violation(path, number, "word", word)
        if path.endswith(".tpl"):
            for variable in sorted({*_TEMPLATE_VARIABLE.findall(line)}):
                if variable.lower() in NAMES:
                    yield Violation(path, number, "identifier", variable)


def violations(path: Path) -> list[Violation]:
    """All violations of one file."""
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    return list(python_violations(name, text) if path.suffix == ".py" else document_violations(name, text))


def files() -> list[Path]:
    """Every file that the rules hold for: code, documents, charts and the page; not what a generator wrote."""
    roots = [
        *(ROOT / name for name in (*PACKAGES, "docs", "tests")),
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
        ROOT / "Vagrantfile",
    ]
    listed = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    return sorted(
        path
        for path in listed
        if path.suffix in ENDINGS
        and not path.name.endswith(("_pb2.py", ".min.js"))
        and not {"golden", "captures", "modules", "client", "crds-yaml"} & set(path.relative_to(ROOT).parts)
        and path.name not in ("language.py", "test_language.py")
    )


def twins() -> list[str]:
    """Public classes that exist twice in the product, and file names that exist twice in one package."""
    classes: dict[str, list[str]] = defaultdict(list)
    stems: dict[tuple[str, str], list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if path.name.endswith("_pb2.py"):
                continue
            if path.name not in ("__init__.py", "__main__.py"):
                stems[package, path.name].append(name)
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(name)
    return [
        f"{what}: {', '.join(where)}"
        for what, where in [*classes.items(), *((k[1], v) for k, v in stems.items())]
        if len(where) > 1
    ]


def main(arguments: Sequence[str]) -> int:
    """List violations; the exit status is 1 if there are any."""
    paths = [Path(argument).resolve() for argument in arguments if not argument.startswith("--")]
    chosen = [
        p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path]) if p.is_file()
    ] or files()
    everything = [one for path in chosen if path in set(files()) for one in violations(path)]
    if "--count" in arguments:
        counts: dict[str, int] = defaultdict(int)
        for violation in everything:
            counts[violation.path] += 1
        for path, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{count:5} {path}")
    else:
        print("\n".join(map(str, everything)))
    print(f"{len(everything)} violations")
    return 1 if everything else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
