"""The mirror: weights and engine archives that the control plane keeps for its nodes."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, List, Tuple

from llmgw.ctl import mirror_care, output, watch
from llmgw.ctl.connection import add_options, connect
from llmgw.domain.errors import UsageError

if TYPE_CHECKING:
    from llmgw.ctl import ollama


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    listing = commands.add_parser("list", help="show what the mirror holds")
    watch.arguments(listing, watch=False)
    listing.set_defaults(action=mirror_care.list_)

    model = commands.add_parser("import", help="bring a model's files in; a broken import goes on where it stopped")
    model.add_argument("files", metavar="FILE", nargs="+", help="its files, or their folder")
    model.add_argument("--name", default="", help="the model is mirror:NAME in server.yaml then; default: by the file")
    model.add_argument("--raw", action="store_true", help="take any files as they are, unchecked")
    model.add_argument("--allow-pickle", action="store_true", help="take files that run code when they are loaded")
    model.add_argument("--link", action="store_true",
                       help="on the server's machine and filesystem: share the files instead of copying them")
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
    for each in (listing, model, engine, pull, *_more(commands)):
        add_options(each)


def _more(commands: Any) -> List[argparse.ArgumentParser]:
    """Add what brings models from elsewhere, and what looks after the mirror."""
    ollama = commands.add_parser("import-ollama", help="bring a model of this machine's Ollama in")
    ollama.add_argument("model", metavar="MODEL[:TAG]", nargs="?", default="", help="as `ollama list` names it")
    ollama.add_argument("--list", action="store_true", dest="only_list", help="show what Ollama has here")
    ollama.add_argument("--json", action="store_true", help="with --list: print JSON for programs")
    ollama.add_argument("--name", default="", help="its name in the mirror; default: MODEL, or MODEL-TAG")
    ollama.add_argument("--dir", metavar="DIR", default="", help="its folder of models; default: where Ollama looks")
    ollama.set_defaults(action=_import_ollama)
    hub = commands.add_parser("pull", help="let the server fetch a model from Hugging Face")
    hub.add_argument("source", metavar="hf:ORG/REPO[@REV][:FILE]")
    hub.add_argument("--include", metavar="GLOB", default="", help="the files to take, such as '*Q4_K_M*'")
    hub.add_argument("--name", default="", help="its name in the mirror; default: by the repository")
    hub.set_defaults(action=_pull)
    shown = commands.add_parser("show", help="all that is known of one model")
    shown.add_argument("name", metavar="NAME")
    shown.add_argument("--json", action="store_true", help="print JSON for programs")
    shown.set_defaults(action=mirror_care.show)
    remove = commands.add_parser("remove", help="forget a model and the files that nothing else needs")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--force", action="store_true", help="although it is in use")
    remove.set_defaults(action=mirror_care.remove)
    collect = commands.add_parser("gc", help="clear away files that nothing needs")
    collect.add_argument("--dry-run", action="store_true", help="only name them")
    collect.add_argument("--json", action="store_true", help="print JSON for programs")
    collect.set_defaults(action=mirror_care.collect)
    verify = commands.add_parser("verify", help="let the server read its files again")
    verify.add_argument("name", metavar="NAME", nargs="?", default="", help="only this model")
    verify.set_defaults(action=mirror_care.verify)
    return [ollama, hub, shown, remove, collect, verify]


def _import(options: argparse.Namespace) -> int:
    from llmgw.ctl.importing import import_model
    made = import_model(connect(options), options.files, options.name, raw=options.raw,
                        allow_pickle=options.allow_pickle, link=options.link)
    output.say(f"{made.name}: {output.size(made.size_bytes)} in the mirror (weights: mirror:{made.name})")
    return 0


def _import_ollama(options: argparse.Namespace) -> int:
    import os

    from llmgw.ctl import ollama
    from llmgw.parse import ollama_manifest
    folder, client = ollama.find(options.dir, os.environ), connect(options)
    if options.only_list:
        return _list_ollama(ollama.listed(folder, mirror_care.view(client)), ollama.partial_downloads(folder), options)
    if not options.model:
        raise UsageError("which model?", hint="llmgw.pyz ctl mirror import-ollama --list shows them")
    made = ollama.bring(client, folder, ollama_manifest.name(options.model), options.name)
    output.say(f"{made.name}: {output.size(made.size_bytes)} in the mirror (weights: mirror:{made.name})")
    return 0


def _list_ollama(found: "List[Tuple[ollama.Entry, str]]", partial: int, options: argparse.Namespace) -> int:
    if options.json:
        output.write_json({"items": [{"name": str(entry.name), "size_bytes": entry.size_bytes, "vision": entry.vision,
                                      "problem": entry.problem, "mirror": kept} for entry, kept in found]})
        return 0
    output.write_table(("MODEL", "SIZE", "VISION", "IN THE MIRROR"), [
        output.Row((str(entry.name), output.size(entry.size_bytes) if not entry.problem else "-",
                    "yes" if entry.vision else "no", kept or "-"), (entry.problem,) if entry.problem else ())
        for entry, kept in found], empty="Ollama has no models here")
    if partial:
        output.say(f"{partial} downloads of Ollama have not ended")
    return 0


def _pull(options: argparse.Namespace) -> int:
    from llmgw.ctl import hub_pull
    made = hub_pull.pull(connect(options), options.source, options.include, options.name)
    output.say(f"{made['name']}: {output.size(made['total_bytes'])} in the mirror at commit {made['revision']:.12} "
               f"(weights: mirror:{made['name']})")
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
