"""After the tests: is a secret of theirs in a log, in the words of a program, or in what ctl printed?

Each cluster of a run makes tokens, keys and join strings of its own, of a form that nothing else has; replica keys are
known from the files that hold them. All of them are canaries.
"""
from __future__ import annotations

import json
import os
import re
import stat

SECRET = re.compile(rb"[A-Za-z0-9_-]{43,}")
FORM = re.compile(rb"llmgw_[a-z]{1,16}_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}")
JOIN = re.compile(rb"llmgw1\.[A-Za-z0-9_-]{43}\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]{43,})")
HELD_IN = {"table.json", "desired.json", "credential.json", "key"}        # and what lies below tokens/
SHOWN_IN = re.compile(r"\.(log|out|err|argv)(\.\d+)?$|^(log|record|stdout|stderr|command)$")
KEY_FIELDS = {"key", "token", "secret"}
MOST_BYTES = 64 << 20


def search(folder):
    """Return ["FILE: the first letters of what is in it"] for each file below ``folder`` that shows a secret."""
    held, shown = set(), []
    for parent, _, names in os.walk(str(folder)):
        for name in names:
            if name in HELD_IN or os.path.basename(parent) == "tokens":
                held |= _held(_read(os.path.join(parent, name)))
            elif SHOWN_IN.search(name):
                shown.append(os.path.join(parent, name))
    faults = []
    for path in shown:
        text = _read(path)
        secret = _secret_in(text, held)
        if secret:
            faults.append(f"{path}: {secret[:24].decode('ascii')}...")
    return faults


def _read(path):
    try:
        with open(path, "rb") as source:
            return source.read(MOST_BYTES) if stat.S_ISREG(os.fstat(source.fileno()).st_mode) else b""
    except OSError:                               # a link that leads nowhere
        return b""


def _held(data):
    """Return the secrets in a file that is meant to hold them."""
    try:
        found = _values(json.loads(data))
    except (ValueError, UnicodeDecodeError):
        found = {data.decode("ascii", "replace").strip()}
    return {value.encode("ascii", "replace")[-43:] for value in found if len(value) >= 43}


def _values(data):
    if isinstance(data, dict):
        own = {value for name, value in data.items() if name in KEY_FIELDS and isinstance(value, str)}
        return own.union(*map(_values, data.values()))
    return set().union(*map(_values, data)) if isinstance(data, list) else set()


def _secret_in(text, held):
    """Return a secret that the text shows, empty when it shows none."""
    for run in SECRET.finditer(text):
        word = run.group()
        if word[-43:] in held or word[:43] in held or FORM.search(word):
            return word
    join = JOIN.search(text)
    return join.group() if join else b""
