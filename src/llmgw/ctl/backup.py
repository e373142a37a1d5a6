"""Write the control plane's whole database to a file, while it runs. It holds secrets: the file is 0600."""
from __future__ import annotations

import argparse
import contextlib
import os

from llmgw.api import paths
from llmgw.ctl import output
from llmgw.ctl.connection import connect
from llmgw.domain.errors import ParseError
from llmgw.system import files

MAGIC = b"SQLite format 3\0"
PIECE_BYTES = 1 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="is replaced when it exists, once the backup is whole")


def action(options: argparse.Namespace) -> int:
    client = connect(options)
    scratch, size_bytes = f"{options.file}.partial", 0
    with client.stream(paths.BACKUP, timeout=120.0) as source:
        with files.storing("write", options.file):
            try:
                handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(handle, "wb") as out:
                    piece = source.read(PIECE_BYTES)
                    if not piece.startswith(MAGIC):
                        raise ParseError("the server did not send a database")
                    while piece:
                        size_bytes += out.write(piece)
                        piece = source.read(PIECE_BYTES)
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(scratch, options.file)
                files.fsync_dir(os.path.dirname(os.path.abspath(options.file)))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
                raise
    output.say(f"{options.file}: {output.size(size_bytes)}; keys and tokens are in it, keep it safe")
    return 0
