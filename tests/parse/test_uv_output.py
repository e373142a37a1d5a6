"""What uv 0.13.9 really printed, shortened in places."""
from __future__ import annotations

import pytest

from llmgw.parse.uv_output import Problem, Progress, Trouble, problem, progress

INSTALL = """Using Python 3.12.1 environment at: env
Resolved 196 packages in 849ms
Downloading torch (502.2MiB)
Downloading numpy (15.8MiB)
 Downloaded numpy
Downloading setuptools (1.0MiB)
 Downloaded setuptools
 Downloaded torch
Prepared 196 packages in 20.1s
Installed 196 packages in 5.4s
 + vllm==0.30.0
"""
MIB = 1 << 20


def after(text):
    now = Progress()
    for line in text.splitlines():
        now = progress(now, line)
    return now


def test_progress_is_what_uv_announced_and_what_of_it_came():
    halfway = after(INSTALL.partition("Downloading setuptools")[0])
    assert (halfway.resolved, halfway.prepared) == (196, False)
    assert (halfway.done_bytes, halfway.total_bytes) == (int(15.8 * MIB), int(502.2 * MIB) + int(15.8 * MIB))
    whole = after(INSTALL)
    assert whole.prepared and whole.done_bytes == whole.total_bytes == int(502.2 * MIB) + int(15.8 * MIB) + MIB


def test_a_python_and_colours_and_nonsense_are_taken_as_they_come():
    assert after("Downloading cpython-3.12.1-linux-x86_64-gnu (download) (25.7MiB)\n").total_bytes == int(25.7 * MIB)
    assert after("\x1b[2mResolved \x1b[1m1 package\x1b[0m in 5ms\x1b[0m").resolved == 1
    assert after("Downloading x (much)\nDownloaded\nResolved packages") == Progress(started={"x": 0})


def test_a_wrong_hash_is_named_by_its_package():
    assert problem("""error: Failed to download `idna==3.11`
  cause: Hash mismatch for `idna==3.11`

         Expected:
           sha256:771a87f49d9defaf64091e6e6fe9c18d4833f140bd19464795bc32d966ca37ea
""") == Problem(Trouble.WRONG_HASH, "idna==3.11")


@pytest.mark.parametrize("text, what", [
    ("error: Hash-checking is required, but no trusted hash was provided for: `charset-normalizer`", "charset-normalizer"),
    ("error: In `--require-hashes` mode, all requirements must have a hash, but none were provided for: idna==3.11", "idna==3.11")])
def test_a_package_without_a_hash_is_named(text, what):
    assert problem(text) == Problem(Trouble.NO_HASH, what)


def test_a_full_disk_is_one_whatever_failed_for_it():
    assert problem("""error: Failed to download `numpy==2.5.5`
  cause: Failed to extract archive: numpy-2.5.5.whl
  cause: I/O operation failed during extraction
  cause: failed to write to file `/d/x.py`: No space left on device (os error 28)
""").trouble is Trouble.DISK_FULL


@pytest.mark.parametrize("cause, why", [
    ("cause: Connection refused (os error 111)", "http://127.0.0.1:9: Connection refused"),
    ("cause: failed to lookup address information: Name does not resolve",
     "http://127.0.0.1:9: failed to lookup address information: Name does not resolve")])
def test_an_index_that_is_down_is_named_by_its_address_and_the_last_cause(cause, why):
    assert problem(f"""error: Request failed after 3 retries in 7.0s
  cause: Failed to fetch: http://127.0.0.1:9/simple/idna/
  cause: error sending request for url (http://127.0.0.1:9/simple/idna/)
  cause: client error (Connect)
  {cause}
""") == Problem(Trouble.UNREACHABLE, why)


@pytest.mark.parametrize("status, trouble, what", [
    ("404 File not found", Trouble.GONE, "idna-3.11-py3-none-any.whl"),
    ("403 Forbidden", Trouble.REFUSED, "http://127.0.0.1:8977 (HTTP 403)"),
    ("500 Internal Server Error", Trouble.UNREACHABLE, "http://127.0.0.1:8977 has a fault of its own (HTTP 500)")])
def test_what_an_index_answers_is_told_apart(status, trouble, what):
    side = "server" if status.startswith("5") else "client"
    url = "http://127.0.0.1:8977/simple/idna/idna-3.11-py3-none-any.whl"
    assert problem(f"error: Failed to fetch: {url}\n  cause: HTTP status {side} error ({status}) for url ({url})\n") \
        == Problem(trouble, what)


@pytest.mark.parametrize("cause, what", [
    ("there is no version of idna==3.11 and you require idna==3.11, we can", "idna==3.11"),
    ("tinydep==1.0 was yanked (reason: bad) and all versions of vllm depend on tinydep==1.0, we can", "tinydep==1.0"),
    ("idnaxyz was not found in the package registry and you require idnaxyz==1, we can", "idnaxyz")])
def test_a_version_or_package_that_is_no_longer_offered_is_gone(cause, what):
    assert problem(f"error: No solution found when resolving dependencies\n  cause: Because {cause} conclude.\n") \
        == Problem(Trouble.GONE, what)


def test_an_index_without_upload_dates_is_no_vanished_package():
    assert problem("""warning: `idna-3.11-py3-none-any.whl` is missing an upload date, but user provided: 2026-09-23T05:22:21Z
error: No solution found when resolving dependencies
  cause: Because there is no version of idna==3.11 and you require idna==3.11, we can conclude
""") == Problem(Trouble.NO_DATES, "idna-3.11-py3-none-any.whl")


def test_an_index_that_wants_a_login_is_no_vanished_package():
    assert problem("""error: No solution found when resolving dependencies
  cause: Because idna was not found in the package registry and you require idna==3.11, we can conclude that
hint: An index URL (http://127.0.0.1:8978/simple) could not be queried due to a lack of valid authentication credentials (401 Unauthorized)
""") == Problem(Trouble.REFUSED, "http://127.0.0.1:8978")


def test_no_login_of_an_index_is_repeated():
    said = problem("error: x\n cause: Failed to fetch: https://user:secret@index.example/simple/a/\n cause: dns error\n")
    assert said.trouble is Trouble.UNREACHABLE and "secret" not in said.what
    said = problem("error: x\n cause: Failed to fetch: http://index/a\n cause: tunnel http://me:secret@proxy:3128 refused\n")
    assert said.trouble is Trouble.UNREACHABLE and "secret" not in said.what and "http://proxy:3128" in said.what


def test_something_else_is_told_in_its_own_words():
    assert problem("warning: x\nerror: The interpreter at `/x` is broken\n") == Problem(Trouble.OTHER, "The interpreter at `/x` is broken")
    assert problem("error: Failed to install x\n  cause: a\n  cause: b\n") == Problem(Trouble.OTHER, "Failed to install x: b")
    assert problem("") == Problem(Trouble.OTHER, "it said nothing")
