"""Which model `up` serves: the command line, or what the last run wrote; and its server.yaml."""
from __future__ import annotations

import argparse
import glob
import json
import os
import re
from dataclasses import dataclass
from typing import List

from llmgw.api import paths, wire
from llmgw.api.client import ControlClient
from llmgw.domain.engine import DEFAULT_VERSIONS, LLAMA_CPP
from llmgw.domain.errors import ApiError, LlmgwError, UsageError
from llmgw.domain.model import Weights
from llmgw.domain.names import check_name, file_name
from llmgw.parse import cluster_yaml, weights_source
from llmgw.system import data_dir, files

# Small enough for every machine, open to everybody, and with a chat template of its own.
FIRST_MODEL = "hf:ggml-org/gemma-3-270m-it-GGUF:gemma-3-270m-it-Q8_0.gguf"
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_HEAD = ("# Written by `llmgw.pyz up`, and again by every `up --model`. Edits take effect at once.\n"
         "# To keep a file of your own: llmgw.pyz up --config FILE\n")


@dataclass(frozen=True)
class Wanted:
    """``path`` is a local file, ``hub`` an hf: address; with neither, what server.yaml says."""

    name: str = ""
    path: str = ""
    hub: str = ""
    template: str = ""
    context_length: int = 0
    config: str = ""
    none: bool = False

    def config_path(self, folder: str) -> str:
        return self.config or os.path.join(folder, "server.yaml")

    def write_config(self, folder: str, *, with_model: bool = False) -> str:
        """Write server.yaml where it is ours to write, and return its path.

        A local file is named in it only ``with_model``: once it is in the mirror.
        """
        path = self.config_path(folder)
        if self.config or not (self.path or self.hub or self.none):
            return path
        text = f"{_HEAD}cluster: up\nengines:\n  {LLAMA_CPP}: {{version: {DEFAULT_VERSIONS[LLAMA_CPP]}}}\n"
        if self.hub or with_model:
            text += self._entry(folder)
        elif self.path and self._is_served_already(path):
            return path                      # the second start: nothing to take away and give back
        _write_if_new(path, text if "models:" in text else text + "models: []\n")
        return path

    def _entry(self, folder: str) -> str:
        text = (f"models:\n  - name: {self.name}\n    engine: {LLAMA_CPP}\n"
                f"    weights: {self.hub or 'mirror:' + self.name}\n")
        if self.context_length:
            text += f"    context_length: {self.context_length}\n"
        if self.template:
            kept = f"{file_name(self.name)}.jinja"
            _write_if_new(os.path.join(folder, kept), _template(self.template))
            text += f"    chat_template: {kept}\n"
        return text

    def _is_served_already(self, path: str) -> bool:
        known = (files.read_bytes(path) or b"").decode("utf-8", "replace")
        return f"- name: {self.name}\n" in known and f"weights: mirror:{self.name}\n" in known

    def has_template(self, model: str, folder: str) -> bool:
        """Say whether server.yaml gives ``model`` a chat template, as base models need one."""
        path = self.config_path(folder)

        def read_beside(name: str) -> bytes:
            data = files.read_bytes(os.path.join(os.path.dirname(path), name))
            if data is None:
                raise UsageError(f"{name}: there is no such file")
            return data

        try:
            config = cluster_yaml.decode(files.read_bytes(path) or b"", path, read_beside, {})
        except LlmgwError:
            return False
        return any(spec.name == model and spec.chat_template for spec in config.models)

    def files(self) -> List[str]:
        """Return the file, or all parts of a split one."""
        part = _PART.fullmatch(self.path)
        if part is None:
            return [self.path]
        return sorted(glob.glob(f"{glob.escape(part.group(1))}-?????-of-{part.group(2)}.gguf"))

    def is_imported(self, folder: str, client: ControlClient) -> bool:
        """Say whether the mirror still holds what an earlier run imported from these very files."""
        try:
            known = json.loads(files.read_bytes(_note(folder)) or b"{}")
            held = client.call("GET", paths.fill(paths.MIRROR_MODEL, model=self.name), receive=wire.WEIGHTS)
        except (ValueError, ApiError):
            return False
        return bool(known == self._identity(held))

    def note_imported(self, folder: str, client: ControlClient) -> None:
        """Remember what was just imported, so that the next start need not read it again."""
        held = client.call("GET", paths.fill(paths.MIRROR_MODEL, model=self.name), receive=wire.WEIGHTS)
        files.write_json(_note(folder), self._identity(held))

    def _identity(self, held: Weights) -> object:
        return {"name": self.name, "fingerprint": held.fingerprint, "files": [
            [path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in self.files()]}


def choose(options: argparse.Namespace) -> Wanted:
    """Return what the command line asks for; refuse what cannot be meant."""
    extra = [flag for flag, value in (("--name", options.name), ("--context-length", options.context_length),
                                      ("--chat-template", options.chat_template)) if value]
    if extra and not options.model:
        raise UsageError(f"{extra[0]} says something about a model, and --model names none")
    if options.config:
        return Wanted(config=_existing(options.config))
    if options.no_model:
        return Wanted(none=True)
    folder_has_one = os.path.exists(os.path.join(_folder(options), "server.yaml"))
    if not options.model and folder_has_one:
        return Wanted()
    template = _existing(options.chat_template) if options.chat_template else ""
    length = options.context_length or 0
    if length < 0:
        raise UsageError(f"--context-length must be positive: {length}")
    named = options.model or FIRST_MODEL
    if named.startswith("hf:"):
        return Wanted(name=_name(options.name, _hub_name(named)), hub=named, template=template,
                      context_length=length)
    path = _existing(named)
    if not path.lower().endswith(".gguf"):
        raise UsageError(f"{named}: `up --model` serves GGUF files",
                         hint="for others write a server.yaml and give it with --config")
    return Wanted(name=_name(options.name, os.path.basename(path)[:-len(".gguf")]), path=path,
                  template=template, context_length=length)


def _folder(options: argparse.Namespace) -> str:
    return data_dir.role_dir("up", options.data_dir)


def _existing(path: str) -> str:
    if not os.path.isfile(path):
        raise UsageError(f"{path}: {'not a file' if os.path.exists(path) else 'there is no such file'}")
    return os.path.abspath(path)


def _name(given: str, found: str) -> str:
    """Return the name that was given, or one made of a file's or repository's name."""
    if given:
        return check_name(given, "model name")
    found = re.sub(r"-\d{5}-of-\d{5}$", "", found)
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", found).strip("-.") or "model", "model name")


def _hub_name(address: str) -> str:
    source = weights_source.hub(address)
    named = os.path.basename(source.file)[:-len(".gguf")] if source.file.lower().endswith(".gguf") else source.repo
    return re.sub(r"-gguf$", "", named.rpartition("/")[2], flags=re.IGNORECASE)


def _template(path: str) -> bytes:
    data = files.read_bytes(path, 1 << 20)
    if not data:
        raise UsageError(f"{path}: the template is empty")
    return data


def _write_if_new(path: str, data: "str | bytes") -> None:
    wanted = data.encode() if isinstance(data, str) else data
    if files.read_bytes(path) != wanted:
        files.write_atomic(path, wanted)


def _note(folder: str) -> str:
    return os.path.join(folder, "imported.json")
