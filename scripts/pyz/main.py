# -*- coding: utf-8 -*-
"""The first Python code of llmgw.pyz (its __main__): refuse an old Python, then start the packed llmgw.

Python 2.7 syntax on purpose. It stands where shiv's own start would be, and differs from it in four ways.
Code runs only from a folder that nobody but root and this user can write. A folder with a file missing or
cut short is made anew. Nothing in the environment can put other code first. And it costs 25 ms less.
Where no folder can be used (no home, read-only, full disk), llmgw runs from the file itself, a bit slower.
"""
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("llmgw: needs Python 3.9 or newer, but %s is Python %d.%d.%d. "
                     "Set LLMGW_PYTHON or install a newer python3.\n"
                     % ((sys.executable,) + tuple(sys.version_info[:3])))
    sys.exit(69)

import os

BUILD = "@BUILD@"                      # sha256 of what is packed, put in by build_pyz.py
PREFIX = "llmgw-"
LISTING = ".whole"                     # "SIZE NAME" of each file, then BUILD; locked while llmgw runs from there
SCRATCH_SECONDS = 3600


def candidates():
    """Return the folders to unpack in, best first: SHIV_ROOT alone, or the caches of the environment and the user."""
    named = os.environ.get("SHIV_ROOT", "")
    if named:
        return [os.path.abspath(named)]
    caches = [os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.environ.get("HOME", ""), ".cache")]
    try:
        import pwd
        caches.append(os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".cache"))
    except (ImportError, KeyError):
        pass                           # a container's uid that is in no passwd file
    return [os.path.join(cache, "llmgw", "pyz") for cache in caches if cache.startswith("/")]


def trusted(folder):
    """Tell whether nobody but root and this user can write to ``folder``, or put another in its place."""
    path = os.path.realpath(folder)
    leaf = True
    while True:
        found = os.lstat(path)
        if found.st_uid not in (0, os.geteuid()):
            return False
        if found.st_mode & 0o022 and (leaf or not found.st_mode & 0o1000):
            return False
        if path == os.path.dirname(path):
            return True
        path, leaf = os.path.dirname(path), False


def prepare(root):
    """Make ``root`` (0700) if need be; tell whether it is a place to run code from."""
    path = root
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not trusted(path):
        return False
    os.makedirs(root, mode=0o700, exist_ok=True)
    return trusted(root)


def whole(place):
    """Tell whether ``place`` holds every file in its full length, and keep it from being cleaned away."""
    try:
        handle = os.open(os.path.join(place, LISTING), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        import fcntl
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)     # held by the open file until this process ends
    except (ImportError, OSError):
        pass                           # a filesystem without locks: nothing is cleaned there either
    try:
        with open(os.path.join(place, LISTING)) as listing:
            lines = listing.read().split("\n")
        sizes = [line.split(" ", 1) for line in lines[:-2]]
        if lines[-2:] == [BUILD, ""] and all(
                os.stat(os.path.join(place, name)).st_size == int(size) for size, name in sizes):
            return True
    except (OSError, ValueError):
        pass
    os.close(handle)
    return False


def unpack(archive, root, place):
    """Unpack beside ``place`` and rename; several at once are all right, the first one counts."""
    import pathlib
    import shutil
    import zipfile

    import _bootstrap
    scratch = os.path.join(root, ".new-%d-%s" % (os.getpid(), os.urandom(6).hex()))
    mask = os.umask(0o022)
    try:
        os.mkdir(scratch, 0o700)
        new = os.path.join(scratch, "new")
        with zipfile.ZipFile(archive) as packed:
            _bootstrap.extract_site_packages(packed, pathlib.Path(new))
        names = sorted(os.path.relpath(os.path.join(folder, name), new)
                       for folder, _, files in os.walk(new) for name in files)
        with open(os.path.join(new, LISTING), "w") as listing:
            for name in names:
                listing.write("%d %s\n" % (os.stat(os.path.join(new, name)).st_size, name))
            listing.write(BUILD + "\n")
        try:
            os.rename(new, place)
        except OSError:                # another start was faster, or what is there is damaged
            if not whole(place):
                os.rename(place, os.path.join(scratch, "damaged"))
                os.rename(new, place)
    finally:
        os.umask(mask)
        shutil.rmtree(scratch, ignore_errors=True)


def clean(root, place):
    """Remove older builds that nothing runs from, and what a killed start left."""
    import fcntl
    import shutil
    import time
    for name in os.listdir(root):
        path = os.path.join(root, name)
        try:
            if name.startswith(".new-"):
                if time.time() - os.lstat(path).st_mtime > SCRATCH_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            elif name.startswith(PREFIX) and path != place:
                with open(os.path.join(path, LISTING)) as listing:
                    fcntl.flock(listing, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass                       # in use, or no folder of ours


def code_folder(archive):
    """Return the folder to import llmgw from: unpacked, or inside the archive when no folder will do."""
    for root in candidates():
        place = os.path.join(root, PREFIX + BUILD[:32])
        try:
            if os.path.isdir(place) and trusted(place) and whole(place):
                return os.path.join(place, "site-packages")
            if prepare(root):
                unpack(archive, root, place)
                if trusted(place) and whole(place):
                    clean(root, place)
                    return os.path.join(place, "site-packages")
            why = "others can write there, or have written there"
        except OSError as error:
            why = error.strerror or str(error)
        if os.environ.get("SHIV_ROOT"):
            sys.stderr.write("llmgw: SHIV_ROOT %s cannot be used (%s): running from the file itself\n" % (root, why))
    return os.path.join(archive, "site-packages")


def start():
    archive = os.path.abspath(os.path.dirname(__file__))
    for name in [name for name in os.environ if name.startswith("SHIV_") and name != "SHIV_ROOT"]:
        del os.environ[name]
    if not sys.flags.isolated:         # python3 llmgw.pyz, without -I
        planted = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) not in planted]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != archive]
    # `_bootstrap` is needed for unpacking only, and must come from the archive
    sys.path.insert(0, archive)
    try:
        sys.path[0] = code_folder(archive)
        from llmgw.cli import main
        main()
    except ImportError as error:       # Debian's python3-minimal has no more than half of the library
        if (error.name or "").split(".")[0] in ("", "llmgw", "_bootstrap"):
            raise
        sys.stderr.write("llmgw: %s lacks a part of Python's own library (%s). Debian/Ubuntu: apt-get install python3; "
                         "or set LLMGW_PYTHON to another Python.\n" % (sys.executable, error))
        sys.exit(69)


if __name__ == "__main__":
    start()
