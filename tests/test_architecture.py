"""The rules of ARCHITECTURE.md, enforced; each has a case in which it fails."""
from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "llmgw"
FILES = sorted(SRC.rglob("*.py"))
MAX_LINES = 400
PURE_LAYERS = {"domain", "parse", "engines", "decide"}
ROLES = {"server", "agent", "router", "ctl"}
SHARED = PURE_LAYERS | {"system", "probe", "relay", "api"}
MAY_IMPORT = {
    "domain": set(),
    "parse": {"domain"},
    "engines": {"domain", "parse"},
    "decide": {"domain"},
    "system": {"domain", "parse"},
    "probe": PURE_LAYERS | {"system"},
    "relay": PURE_LAYERS | {"system"},
    "api": PURE_LAYERS | {"system"},
    **{role: SHARED for role in ROLES},
}
# Run by another program's Python: they may import nothing of ours.
STANDALONE = ("engines/launchers/",)
# What says the version to a Python that cannot read the rest.
OLD_SYNTAX = ("__init__.py", "__main__.py")

IMPURE_MODULES = {
    "asyncio", "fcntl", "getpass", "glob", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "platform", "pwd", "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib.request", "uuid"}
PURE_IN_IMPURE = {"io.BytesIO", "io.StringIO"}
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today", "exec", "eval"}

# module -> where it may be imported
ONLY_IN = {
    **{name: ("system/",) for name in (
        "subprocess", "tempfile", "urllib.request", "http.client", "http.server", "socketserver", "socket", "ssl")},
    "asyncio": ("relay/", "router/", "agent/gate"),
    "sqlite3": ("server/store",),
    "curses": ("ctl/console/",),
}
TOO_NEW = {
    "tomllib", "asyncio.TaskGroup", "asyncio.timeout", "asyncio.Runner", "asyncio.Barrier", "contextlib.aclosing",
    "contextlib.chdir", "datetime.UTC", "enum.StrEnum", "enum.verify",
    "hashlib.file_digest", "itertools.batched", "itertools.pairwise", "typing.Self", "typing.TypeAlias",
    "typing.ParamSpec", "typing.Concatenate", "typing.TypeGuard", "typing.NotRequired", "typing.Required",
    "typing.assert_never", "typing.override", "typing.Never", "types.NoneType", "types.UnionType", "types.EllipsisType",
    "inspect.get_annotations", "operator.call", "math.cbrt", "math.exp2", "statistics.correlation",
    "warnings.deprecated", "sys.orig_argv", "sys.stdlib_module_names", "sys.exception",
    "logging.getLevelNamesMapping", "logging.getHandlerNames", "os.EFD_CLOEXEC", "os.eventfd", "os.unshare",
    "os.process_cpu_count", "pathlib.UnsupportedOperation", "importlib.resources.abc"}
TOO_NEW_KEYWORDS = {
    "zip": {"strict"}, "dataclass": {"slots", "kw_only", "weakref_slot", "match_args"}, "field": {"kw_only"},
    "Popen": {"process_group"}, "run": {"process_group"}, "rmtree": {"onexc"}, "extractall": {"filter"},
    "bisect": {"key"}, "bisect_left": {"key"}, "bisect_right": {"key"}, "insort": {"key"},
    "TemporaryDirectory": {"ignore_cleanup_errors", "delete"}, "NamedTemporaryFile": {"delete_on_close"}}
TOO_NEW_METHODS = {"bit_count", "walk_up", "removeprefixes", "hardlink_to", "add_note", "uncancel", "cancelling"}
LATER_GONE = {"cgi", "imp", "telnetlib", "asyncore", "asynchat", "distutils", "smtpd", "crypt", "pipes", "nntplib"}

DIGEST_TO_PATH = "domain/digest.py"
REGISTRY_HOSTS = re.compile(r"\bpypi\.(?:org|python\.org)\b|\bfiles\.pythonhosted\.org\b|\bdownload\.pytorch\.org\b"
                            r"|\bregistry-1\.docker\.io\b|\bindex\.docker\.io\b|\bconda\.anaconda\.org\b|\bregistry\.npmjs\b")


def imports(tree):
    """Yield (line, dotted name) of everything imported, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def attributes(tree):
    """Yield (line, dotted name) of every use like ``datetime.UTC``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def calls(tree):
    """Yield (line, last name of what is called, names of its keywords)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield (node.lineno, getattr(node.func, "attr", getattr(node.func, "id", "")),
                   {keyword.arg: keyword.value for keyword in node.keywords}, node)


def under(name, modules):
    """Return the entry of ``modules`` that ``name`` is, or is inside of."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in modules:
            return ".".join(parts[:end])
    return None


def faults(text, path):
    """Yield what is wrong with the module ``path`` (relative to src/llmgw)."""
    if text.count("\n") > MAX_LINES:
        yield f"longer than {MAX_LINES} lines"
    try:
        tree = ast.parse(text, feature_version=(3, 9))
    except SyntaxError as error:
        yield f"line {error.lineno}: not Python 3.9 syntax: {error.msg}"
        return
    for rule in (module_shape, import_rules, place_rules, purity, age, dangers):
        yield from rule(tree, text, path)


def layer_of(path):
    return path.split("/")[0] if "/" in path else None


def module_shape(tree, text, path):
    public = not path.split("/")[-1].startswith("_") or path.endswith("/__init__.py")
    if public and text.strip() and not ast.get_docstring(tree):
        yield "a public module says in a docstring what it is for"
    future = any(name == "__future__.annotations" for _, name in imports(tree))
    if text.strip() and not future and not path.endswith(OLD_SYNTAX) and not path.startswith(STANDALONE) \
            and any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        yield "starts with `from __future__ import annotations`"
    if layer_of(path) is not None and layer_of(path) not in MAY_IMPORT:
        yield f"{layer_of(path)}/ is not a folder of the tree (ARCHITECTURE.md)"
    if any(word in path.split("/")[-1] for word in ("util", "helper", "manager", "common", "misc")):
        yield "is named after nothing; name the topic"


def import_rules(tree, text, path):
    layer = layer_of(path)
    for line, name in imports(tree):
        if name.startswith("."):
            yield f"line {line}: write absolute imports"
        parts = name.split(".")
        if parts[0] == "llmgw" and path.startswith(STANDALONE):
            yield f"line {line}: {path} runs under another program's Python and may import nothing of ours"
        elif parts[0] == "llmgw" and len(parts) > 1 and layer in MAY_IMPORT:
            if parts[1] != layer and parts[1] not in MAY_IMPORT[layer] | {"__version__"}:
                yield f"line {line}: {layer} may not import {parts[1]}"
        if parts[0] == "llmgw" and layer is None and len(parts) > 1 and parts[1] in ROLES and line_is_top(tree, line):
            yield f"line {line}: a role is imported only when it is chosen, inside a function"


def line_is_top(tree, line):
    return any(isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno == line for node in tree.body)


def place_rules(tree, text, path):
    if path.startswith(STANDALONE):
        return
    for line, name in imports(tree):
        known = under(name, ONLY_IN)
        if known and not path.startswith(ONLY_IN[known]):
            yield f"line {line}: {known} belongs to {' '.join(ONLY_IN[known])}"


def purity(tree, text, path):
    layer = layer_of(path)
    if layer not in PURE_LAYERS or path.startswith(STANDALONE):
        return
    for line, name in imports(tree):
        if name in PURE_IN_IMPURE or name == "io":
            continue
        if under(name, IMPURE_MODULES):
            yield f"line {line}: {layer} is pure, {under(name, IMPURE_MODULES)} is not"
    for line, name, _, _ in calls(tree):
        if name in IMPURE_CALLS:
            yield f"line {line}: {layer} is pure, {name}() is not"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: {layer} is pure, a module's changing variable is not"


def age(tree, text, path):
    if path.startswith(STANDALONE):
        return
    for line, name in list(imports(tree)) + list(attributes(tree)):
        if name in TOO_NEW:
            yield f"line {line}: {name} is newer than Python 3.9"
    for line, name in imports(tree):
        if name.split(".")[0] in LATER_GONE:
            yield f"line {line}: {name} is gone from newer Pythons"
    for line, name, keywords, _ in calls(tree):
        for keyword in sorted(TOO_NEW_KEYWORDS.get(name, set()) & set(keywords)):
            yield f"line {line}: {name}({keyword}=) is newer than Python 3.9"
        if name in TOO_NEW_METHODS:
            yield f"line {line}: {name}() is newer than Python 3.9"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and len(node.args) == 2 \
                and isinstance(node.args[1], ast.BinOp):
            yield f"line {node.lineno}: isinstance(x, A | B) is newer than Python 3.9"
    for line in unions_that_run(tree):
        yield f"line {line}: X | None outside an annotation is newer than Python 3.9"


def unions_that_run(tree):
    """Yield lines of ``X | None`` that Python 3.9 would compute: in aliases, and where dataclasses look."""
    annotations = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            for inner in ast.walk(getattr(node, field, None) or ast.Module(body=[], type_ignores=[])):
                annotations.add(id(inner))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and id(node) not in annotations \
                and any(isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)):
            yield node.lineno


def dangers(tree, text, path):
    for line, name, keywords, node in calls(tree):
        if name in ("extractall", "extract") and isinstance(node.func, ast.Attribute):
            yield f"line {line}: {name}() trusts the archive: use system/unpack.py"
        if "shell" in keywords and not is_false(keywords["shell"]):
            yield f"line {line}: shell= : a program is a list of words"
        if name in ("system", "popen") and isinstance(node.func, ast.Attribute) \
                and getattr(node.func.value, "id", "") == "os":
            yield f"line {line}: os.{name}() is a shell: a program is a list of words"
    if REGISTRY_HOSTS.search(text):
        yield f"names a package registry: {REGISTRY_HOSTS.search(text).group(0)}"
    if path != DIGEST_TO_PATH:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_blob_path(node.value) \
                    and not is_docstring(tree, node):
                yield f"line {node.lineno}: only {DIGEST_TO_PATH} turns a digest into a path"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: a bare except hides Ctrl-C"


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


def is_blob_path(text):
    return "blobs/sha256/" in text


def is_docstring(tree, node):
    return any(isinstance(holder, (ast.Module, ast.ClassDef, ast.FunctionDef)) and holder.body
               and isinstance(holder.body[0], ast.Expr) and holder.body[0].value is node for holder in ast.walk(tree))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_every_module_keeps_the_rules(path):
    assert list(faults(path.read_text(encoding="utf-8"), path.relative_to(SRC).as_posix())) == []


HEAD = '"""What it is for."""\nfrom __future__ import annotations\n'


@pytest.mark.parametrize("path, text, fault", [
    ("decide/x.py", "import time\n", "decide is pure, time is not"),
    ("decide/x.py", "import http.client\n", "decide is pure, http is not"),
    ("parse/x.py", "from urllib.request import urlopen\n", "parse is pure, urllib.request is not"),
    ("decide/x.py", "from datetime import datetime\ndatetime.now()\n", "now() is not"),
    ("engines/x.py", "open('f')\n", "open() is not"),
    ("decide/x.py", "def f():\n    from os import path\n", "os is not"),
    ("decide/x.py", "n = 0\ndef f():\n    global n\n", "changing variable is not"),
    ("domain/x.py", "from llmgw.decide import placement\n", "domain may not import decide"),
    ("decide/x.py", "from llmgw import system\n", "decide may not import system"),
    ("decide/x.py", "from llmgw.engines import base\n", "decide may not import engines"),
    ("system/x.py", "from llmgw.api import paths\n", "system may not import api"),
    ("probe/x.py", "from llmgw.relay import server\n", "probe may not import relay"),
    ("relay/x.py", "from llmgw.api import paths\n", "relay may not import api"),
    ("api/x.py", "from llmgw.probe import facts\n", "api may not import probe"),
    ("agent/x.py", "from llmgw.server import store\n", "agent may not import server"),
    ("server/x.py", "from llmgw.router import main\n", "server may not import router"),
    ("ctl/x.py", "from llmgw.agent import main\n", "ctl may not import agent"),
    ("router/x.py", "def f():\n    from llmgw.ctl import main\n", "router may not import ctl"),
    ("up.py", "from llmgw.server import main\n", "only when it is chosen"),
    ("server/x.py", "from . import store\n", "absolute imports"),
    ("helm/x.py", "x = 1\n", "not a folder of the tree"),
    ("server/utils.py", "x = 1\n", "name the topic"),
    ("engines/launchers/x.py", "import llmgw\n", "may import nothing of ours"),
    ("agent/x.py", "import subprocess\n", "subprocess belongs to system/"),
    ("ctl/x.py", "from http.client import HTTPConnection\n", "http.client belongs to system/"),
    ("router/x.py", "import ssl\n", "ssl belongs to system/"),
    ("server/x.py", "import asyncio\n", "asyncio belongs to relay/"),
    ("agent/heart.py", "import asyncio\n", "asyncio belongs to relay/"),
    ("server/mirror.py", "import sqlite3\n", "sqlite3 belongs to server/store"),
    ("ctl/x.py", "import curses\n", "curses belongs to ctl/console/"),
    ("system/x.py", "from enum import StrEnum\n", "newer than Python 3.9"),
    ("system/x.py", "import datetime\nx = datetime.UTC\n", "datetime.UTC is newer"),
    ("system/x.py", "import asyncio\nasyncio.TaskGroup()\n", "asyncio.TaskGroup is newer"),
    ("domain/x.py", "list(zip(a, b, strict=True))\n", "zip(strict=) is newer"),
    ("domain/x.py", "@dataclass(slots=True)\nclass A:\n    pass\n", "dataclass(slots=) is newer"),
    ("domain/x.py", "isinstance(x, int | str)\n", "isinstance(x, A | B) is newer"),
    ("domain/x.py", "Alias = int | None\n", "outside an annotation"),
    ("domain/x.py", "match x:\n    case 1:\n        pass\n", "not Python 3.9 syntax"),
    ("system/x.py", "import telnetlib\n", "gone from newer"),
    ("domain/x.py", "x = 1\n" * 401, "longer than 400 lines"),
    ("system/x.py", "archive.extractall(folder)\n", "extractall() trusts the archive"),
    ("system/x.py", "subprocess.run('ls', shell=True)\n", "a program is a list of words"),
    ("system/x.py", "import os\nos.system('ls')\n", "a program is a list of words"),
    ("system/x.py", "url = 'https://pypi" + ".org/simple'\n", "names a package registry"),
    ("server/x.py", "path = f'blobs/sha256/{digest}'\n", "turns a digest into a path"),
    ("server/x.py", "try:\n    f()\nexcept:\n    pass\n", "hides Ctrl-C"),
])
def test_each_rule_can_fail(path, text, fault):
    assert any(fault in found for found in faults(HEAD + text, path)), list(faults(HEAD + text, path))


@pytest.mark.parametrize("text, fault", [
    ("from __future__ import annotations\nx = 1\n", "says in a docstring"),
    ('"""What."""\ndef f():\n    pass\n', "from __future__ import annotations"),
])
def test_the_rules_about_a_modules_head_can_fail(text, fault):
    assert any(fault in found for found in faults(text, "server/x.py"))


@pytest.mark.parametrize("path, text", [
    ("decide/x.py", "import io\nfrom llmgw.domain import node\ndef f(x: int | None) -> str | None:\n    return None\n"),
    ("system/x.py", "import subprocess\nsubprocess.run(['ls'], shell=False)\nx = flags | other\n"),
    ("agent/gate.py", "import asyncio\n"),
    ("server/store_sqlite.py", "import sqlite3\n"),
    ("api/x.py", 'def f():\n    """See blobs/sha256/HEX."""\nfrom llmgw.decide import routing\n'),
    ("up.py", "def run(argv, debug=False):\n    from llmgw.server import main\n"),
])
def test_what_is_allowed_has_no_fault(path, text):
    assert list(faults(HEAD + text, path)) == []


def error_classes():
    """Return {class name: (reason, file)} of every class below LlmgwError, wherever it is defined."""
    classes = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [getattr(base, "attr", getattr(base, "id", "")) for base in node.bases]
                reason = [item.value.value for item in node.body if isinstance(item, ast.Assign)
                          and getattr(item.targets[0], "id", "") == "reason" and isinstance(item.value, ast.Constant)]
                classes[node.name] = (bases, reason[0] if reason else None, path.relative_to(SRC).as_posix())
    ours = {"LlmgwError"}
    while True:
        more = {name for name, (bases, _, _) in classes.items() if ours & set(bases)} - ours
        if not more:
            return {name: classes[name][1:] for name in ours}
        ours |= more


def reason_faults(classes):
    seen = {}
    for name, (reason, path) in sorted(classes.items()):
        if not reason or not re.fullmatch(r"[A-Z][A-Za-z0-9]*", reason):
            yield f"{path}: {name} has no reason in one CamelCase word of its own"
        elif reason in seen:
            yield f"{path}: {name} and {seen[reason]} have the same reason {reason}"
        seen.setdefault(reason, name)


def test_every_error_has_a_reason_of_its_own():
    classes = error_classes()
    assert len(classes) > 10 and list(reason_faults(classes)) == []


@pytest.mark.parametrize("classes", [
    {"A": ("Same", "f"), "B": ("Same", "f")}, {"A": (None, "f")}, {"A": ("two words", "f")}], ids=str)
def test_the_rule_about_reasons_can_fail(classes):
    assert list(reason_faults(classes))


def project_files():
    """Yield the text files of the project outside tests/data."""
    skipped = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not skipped & set(parts) and not parts[0].startswith(".venv") \
                and path.suffix in {".py", ".md", ".sh", ".toml", ".yaml", ".yml", ".service", ".html", ".js", ""}:
            yield path


def test_no_file_of_the_project_names_a_package_registry():
    found = [(path.relative_to(ROOT).as_posix(), REGISTRY_HOSTS.search(text).group(0)) for path in project_files()
             for text in [path.read_text(encoding="utf-8", errors="replace")] if REGISTRY_HOSTS.search(text)
             and path != pathlib.Path(__file__).resolve()]
    assert found == []


def test_tests_of_pure_layers_replace_nothing_of_ours():
    """A pure function needs no patching: what it needs is passed in."""
    patched = [path.relative_to(ROOT).as_posix() for layer in PURE_LAYERS
               for path in (ROOT / "tests" / layer).rglob("*.py")
               if re.search(r"\bmonkeypatch\b|mock\.patch|\bpatch\(", path.read_text(encoding="utf-8"))]
    assert patched == []
