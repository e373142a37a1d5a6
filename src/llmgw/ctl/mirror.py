"""The mirror: weights and engine archives that the control plane keeps for its nodes."""
from __future__ import annotations

import argparse
from typing import List

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import add_options, connect
from llmgw.domain.view import MirrorView

TITLES = ("NAME", "KIND", "SIZE", "FILES", "DIGEST", "KEPT SINCE")


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    listing = commands.add_parser("list", help="show what the mirror holds")
    watch.arguments(listing, watch=False)
    listing.set_defaults(action=_list)

    model = commands.add_parser("import", help="bring a model's files in; a broken import goes on where it stopped")
    model.add_argument("files", metavar="FILE", nargs="+", help="its files, or their folder")
    model.add_argument("--name", default="", help="the model is mirror:NAME in server.yaml then; default: by the file")
    model.add_argument("--raw", action="store_true", help="take any files as they are, unchecked")
    model.add_argument("--allow-pickle", action="store_true", help="take files that run code when they are loaded")
    model.set_defaults(action=_import)

    engine = commands.add_parser("import-engine", help="bring a release archive of an engine, of uv or of Python in")
    engine.add_argument("archive", metavar="ARCHIVE", help="under the release's own file name")
    engine.add_argument("--sha256", metavar="HEX", required=True, help="the digest its publisher gives")
    engine.add_argument("--engine", default="", help="default: by the file name, llama.cpp, uv or python")
    engine.add_argument("--version", default="", metavar="V", help="default: taken from the file name")
    engine.set_defaults(action=_import_engine)
    pull = commands.add_parser("pull-engine",
                               help="bring all of vllm or sglang in, where there is internet: wheels, uv and Python")
    pull.add_argument("engine", metavar="ENGINE")
    pull.add_argument("--index", metavar="URL", default="", help="the package index (default: UV_DEFAULT_INDEX)")
    pull.add_argument("--platform", metavar="P", choices=("x86_64", "aarch64"), default="x86_64",
                      help="processor type of the nodes: x86_64 or aarch64 (default: %(default)s)")
    pull.add_argument("--list", metavar="FILE", default="", dest="listed",
                      help="take this list of packages (default: the fleet's)")
    pull.set_defaults(action=_pull_engine)
    for each in (listing, model, engine, pull):
        add_options(each)


def _list(options: argparse.Namespace) -> int:
    data = connect(options).json("GET", paths.MIRROR)
    if options.json:
        output.write_json(data)
        return 0
    mirror = wire.MIRROR_VIEW.decode(data, "mirror")
    output.write_table(TITLES, _rows(mirror),
                       empty="the mirror is empty: llmgw ctl mirror import FILE --name NAME")
    for sentence in mirror.activity:
        output.say(sentence)
    output.say(f"free: {output.size(mirror.free_bytes)}")
    return 0


def _rows(mirror: MirrorView) -> List[output.Row]:
    rows = [output.Row((model.name, model.format, output.size(model.size_bytes), str(len(model.files)),
                        model.fingerprint[:12], output.moment(model.imported_at)))
            for model in mirror.models]
    return rows + [output.Row((f"{held.engine} {held.version}", "engine", output.size(held.asset.size_bytes),
                               "1", held.asset.sha256[:12], output.moment(held.imported_at)),
                              (held.asset.name,))
                   for held in mirror.engines]


def _import(options: argparse.Namespace) -> int:
    from llmgw.ctl.importing import import_model
    made = import_model(connect(options), options.files, options.name, raw=options.raw,
                        allow_pickle=options.allow_pickle)
    output.say(f"{made.name}: {output.size(made.size_bytes)} in the mirror (weights: mirror:{made.name})")
    return 0


def _pull_engine(options: argparse.Namespace) -> int:
    import os

    from llmgw.ctl import pulling
    from llmgw.ctl.engines import wanted
    client = connect(options)
    index = pulling.index_of(options.index, os.environ)
    engine = wanted(client, options.engine)
    done = pulling.Pull(client, engine, options.platform, index).run(options.listed)
    output.say(f"{engine.name} {engine.version}: {done.packages} packages are in the mirror"
               + (", uv and Python too: nodes install from there" if not done.lacking else "")
               + f" ({output.size(done.new_bytes)} came now)")
    for sentence in done.lacking:
        output.say(f"llmgw: {sentence}")
    if done.lacking:
        output.say("  try: again where GitHub can be reached, or llmgw.pyz ctl mirror import-engine; where the server "
                   "itself reaches GitHub, nothing is to be done")
    return 1 if done.lacking else 0


def _import_engine(options: argparse.Namespace) -> int:
    from llmgw.ctl.importing import engine_of, import_engine
    engine = options.engine or engine_of(options.archive)
    version = import_engine(connect(options), options.archive, options.sha256, engine, options.version)
    output.say(f"{engine} {version}: in the mirror; nodes that want it install it now")
    return 0
