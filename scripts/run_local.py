"""`make run`: serve a small real model from this machine with ./llmgw.pyz up, with or without GitHub.

Where GitHub and Hugging Face answer, `up` brings engine and model from there. Where they do not,
scripts/bring.py has both, and they enter through the product's own door: ctl mirror import-engine, ctl mirror import.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "src")]

import bring

from llmgw.system import data_dir
from llmgw.up_model import FIRST_MODEL

PYZ = str(ROOT / "llmgw.pyz")
HOSTS = {"GitHub": "https://api.github.com/", "Hugging Face": "https://huggingface.co/api/models?limit=1"}
PROBE_SECONDS = 4.0
SERVER_SECONDS = 120.0
NAME = "gemma-3-270m"
TEMPLATE = ROOT / "tests" / "data" / "templates" / "qa.jinja"
CONFIG = f"""\
# Written by `make run`: a base model, so the chat template is ours.
cluster: local
engines:
  llama.cpp: {{version: {bring.RELEASE}}}
models:
  - name: {NAME}
    engine: llama.cpp
    weights: mirror:{NAME}
    context_length: 2048
    parallel: 2
    chat_template: qa.jinja
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="FILE or hf:ORG/REPO[:FILE]; default: a small one")
    model = parser.parse_args().model
    silent = unreachable_hosts()
    if not silent:
        return attend(start(["--model", model or FIRST_MODEL]))
    say(f"{' and '.join(silent)} cannot be reached from here: engine and model come from the package index instead")
    if model.startswith("hf:"):
        say(f"{model} cannot be had then; give a file: make run MODEL=FILE")
        return 1
    try:
        archive = bring.llama_archive()
        weights = None if model else bring.gemma()
    except bring.CannotBring as error:
        say(str(error))
        return 1
    since = time.time()
    child = start(["--model", model] if model else ["--config", str(write_config())])
    return attend(child, lambda: import_missing(child, since, archive, weights))


def unreachable_hosts() -> List[str]:
    """Return who does not answer in a few seconds, through the proxies of the environment."""
    with ThreadPoolExecutor(len(HOSTS)) as pool:
        return [name for name, answers in zip(HOSTS, pool.map(answers_at, HOSTS.values())) if not answers]


def answers_at(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "llmgw"}),
                               timeout=PROBE_SECONDS).close()
        return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code in (401, 403, 429)      # it is there; it counts our questions
    except (OSError, ValueError):
        return False


def write_config() -> Path:
    """Write server.yaml and its template into the cache folder; unchanged files stay untouched."""
    folder = bring.make(bring.cache_dir() / "run")
    for name, text in (("qa.jinja", TEMPLATE.read_text(encoding="utf-8")), ("server.yaml", CONFIG)):
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            half = folder / f".{name}.tmp"
            half.write_text(text, encoding="utf-8")
            os.replace(half, path)
    return folder / "server.yaml"


# -- up and its end ----------------------------------------------------------------------------------

def start(words: List[str]) -> subprocess.Popen:
    """Start `up` in a session of its own, so that a signal reaches it once, through us."""
    return subprocess.Popen([sys.executable, "-I", PYZ, "up", *words], start_new_session=True, cwd=str(ROOT))


def attend(child: subprocess.Popen, work: Optional[Any] = None) -> int:
    """Do ``work``, then wait for ``child``; pass signals on, and leave nothing when the work fails."""
    def pass_on(number: int, frame: object) -> None:
        if child.poll() is None:
            child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    failed = False
    if work is not None:
        try:
            work()
        except CannotImport as error:
            failed = True
            if child.poll() is None:
                say(str(error))
                child.terminate()
    return child.wait() or int(failed)


class CannotImport(Exception):
    """The engine or the model did not get into the mirror."""


# -- the product's own door ---------------------------------------------------------------------------

def import_missing(child: subprocess.Popen, since: float, archive: bring.Archive, weights: Optional[Path]) -> None:
    """Import what the mirror does not show yet."""
    where = wait_for_server(child, since)
    held = json.loads(ctl(child, where, "list", "--json"))
    if archive.sha256 not in [engine["asset"]["sha256"] for engine in held["engines"]]:
        ctl(child, where, "import-engine", str(archive.path), "--sha256", archive.sha256)
    if weights is not None and not any(model["name"] == NAME and bring.MODEL_SHA256 in json.dumps(model)
                                       for model in held["models"]):
        ctl(child, where, "import", str(weights), "--name", NAME)


def wait_for_server(child: subprocess.Popen, since: float) -> Dict[str, str]:
    """Return what the server of this `up` wrote down about itself once it listens."""
    path = Path(data_dir.endpoint_file(os.path.join(data_dir.role_dir("up"), "server")))
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise CannotImport("up ended")
        try:
            if path.stat().st_mtime >= since - 1:
                where = json.loads(path.read_text(encoding="utf-8"))
                os.kill(int(where["pid"]), 0)
                return where
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.1)
    raise CannotImport(f"no server wrote {path} in {SERVER_SECONDS:g} seconds")


def ctl(child: subprocess.Popen, where: Dict[str, str], *words: str) -> str:
    """Run a `ctl mirror` command against that server and return what it printed."""
    argv = [sys.executable, "-I", PYZ, "ctl", "mirror", *words,
            "--server", where["url"], "--token-file", where["admin_token_file"]]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as command:
        while True:
            try:
                out, _ = command.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if child.poll() is not None:      # told to stop, or died: nothing to import into
                    command.kill()
    if command.returncode:
        raise CannotImport(f"ctl mirror {words[0]} failed (exit {command.returncode})")
    return out


def say(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not shutil.which(PYZ):
        sys.exit("run: there is no llmgw.pyz here: make run builds it")
    sys.exit(main())
