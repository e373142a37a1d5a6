"""Why a package manager installed nothing: lines as the four print them."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.parse.package_problem import Why, problem


@pytest.mark.parametrize("text, why, pid", [
    ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4711 (apt-get)\n"
     "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?\n",
     Why.LOCKED, 4711),
    ("E: Could not get lock /var/lib/dpkg/lock - open (11: Resource temporarily unavailable)\n"
     "E: Unable to lock the administration directory (/var/lib/dpkg/), is another process using it?\n", Why.LOCKED, 0),
    ("Waiting for process with pid 1234 to finish.\n", Why.LOCKED, 1234),
    ("Transaction failed: Failed to obtain rpm transaction lock. Another transaction is in progress.\n", Why.LOCKED, 0),
    ("Failed to obtain the transaction lock (logged in as: root).\nError: Could not run transaction.\n", Why.LOCKED, 0),
    ("Existing lock /var/run/yum.pid: another copy is running as pid 23.\nAnother app is currently holding the yum "
     "lock; exiting as configured by exit_on_lock\n", Why.LOCKED, 23),
    # dnf 4.14 and zypper 1.14, run
    ("metadata already locked by 17771\n  The application with PID 17771 is: sh\n    State  : Sleeping\n",
     Why.LOCKED, 17771),
    ("Errors during downloading metadata for repository 'base':\n  - Curl error (6): Couldn't resolve host name for "
     "http://mirror.invalid/base/repodata/repomd.xml [Could not resolve host: mirror.invalid]\nError: Failed to download "
     "metadata for repo 'base': Cannot download repomd.xml\nIgnoring repositories: base\nNo match for argument: "
     "libgomp\nError: Unable to find a match: libgomp\n", Why.OFFLINE, 0),
    ("Retrieving repository 'base' metadata [.error]\nRepository 'base' is invalid.\n - Download (curl) error for "
     "'http://mirror.invalid/base/content':\nError code: Connection failed\nError message: Could not resolve host: "
     "mirror.invalid\n'libgomp1' not found in package names. Trying capabilities.\nNo provider of 'libgomp1' found.\n",
     Why.OFFLINE, 0),
    ("System management is locked by the application with pid 19914 (zypper).\nClose this application before trying "
     "again.\n", Why.LOCKED, 19914),
    ("Err:1 http://mirror.example bookworm/main amd64 libgomp1\n  Temporary failure resolving 'mirror.example'\n"
     "E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?\n", Why.OFFLINE, 0),
    ("Could not connect to mirror.example:80 (10.0.0.9), connection timed out\n", Why.OFFLINE, 0),
    ("Errors during downloading metadata for repository 'baseos':\n  - Curl error (6): Couldn't resolve host name for "
     "https://mirror.example [Could not resolve host: mirror.example]\nError: Failed to download metadata for repo "
     "'baseos': Cannot prepare internal mirrorlist\n", Why.OFFLINE, 0),
    ("Cannot find a valid baseurl for repo: base/7/x86_64\n", Why.OFFLINE, 0),
    ("E: Unable to locate package libgomp1\n", Why.STALE, 0),
    ("E: Failed to fetch http://mirror.example/libgomp1.deb  404  Not Found [IP: 10.0.0.9 80]\n", Why.STALE, 0),
    ("No match for argument: libgomp\nError: Unable to find a match: libgomp\n", Why.UNKNOWN_PACKAGE, 0),
    ("No package libgomp available.\nError: Nothing to do\n", Why.UNKNOWN_PACKAGE, 0),
    ("'libgomp1' not found in package names. Trying capabilities.\nNo provider of 'libgomp1' found.\n",
     Why.UNKNOWN_PACKAGE, 0),
    ("E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem.\n", Why.BROKEN, 0),
    ("E: You don't have enough free space in /var/cache/apt/archives/.\n", Why.FULL, 0),
    ("This is a transactional-server, please use transactional-update to update or modify the system.\n", Why.READ_ONLY, 0),
    ("E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: Permission denied)\nE: Unable to acquire the "
     "dpkg frontend lock (/var/lib/dpkg/lock-frontend), are you root?\n", Why.NOT_ROOT, 0),
    ("", Why.OTHER, 0),
])
def test_known_lines_are_told_apart(text, why, pid):
    found = problem(text)
    assert (found.why, found.pid) == (why, pid)
    assert len(found.detail) <= 300 and not found.detail.startswith("E:")


def test_what_is_not_known_is_told_by_the_last_error_or_the_last_line():
    assert problem("Reading...\nE: Something new\nmore\n").detail == "Something new"
    assert problem("a\nb\n\n").detail == "b"


@given(st.text(max_size=500))
def test_any_text_has_a_problem(text):
    assert len(problem(text).detail) <= 300
