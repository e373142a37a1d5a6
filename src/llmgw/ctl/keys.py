"""Users' keys: what a client sends as its API key."""
from __future__ import annotations

import argparse

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import add_options, connect
from llmgw.domain.view import KeyView

TITLES = ("KEY", "NAME", "MODELS", "MADE", "STATE")


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    create = commands.add_parser("create", help="make a key and print it, this once")
    create.add_argument("name", metavar="NAME", help="whose or what it is for")
    create.add_argument("--model", metavar="MODEL", action="append", default=[],
                        help="only for this model; may be repeated (without: all models)")
    create.add_argument("--json", action="store_true", help="print JSON for programs")
    create.set_defaults(action=_create)
    listing = commands.add_parser("list", help="show all keys, never their secrets")
    watch.arguments(listing, watch=False)
    listing.set_defaults(action=_list)
    revoke = commands.add_parser("revoke", help="stop a key from opening anything")
    revoke.add_argument("key", metavar="ID", help="as `keys list` shows it")
    revoke.set_defaults(action=_revoke)
    for each in (create, listing, revoke):
        add_options(each)


def _create(options: argparse.Namespace) -> int:
    data = connect(options).json("POST", paths.KEYS, {"name": options.name, "models": options.model})
    key = wire.KEY_VIEW.decode(data, "key")
    if options.json:
        output.write_json(data)
        return 0
    output.say(f"key {key.id} for {key.name}; it is shown only this once:")
    output.write(output.clean(key.secret))
    return 0


def _list(options: argparse.Namespace) -> int:
    data = connect(options).json("GET", paths.KEYS)
    if options.json:
        output.write_json(data)
        return 0
    keys = [wire.KEY_VIEW.decode(item, "key") for item in data["items"]]
    output.write_table(TITLES, [_row(key) for key in keys],
                       empty="no key yet: llmgw.pyz ctl keys create NAME")
    return 0


def _row(key: KeyView) -> output.Row:
    state = f"revoked {output.moment(key.revoked_at)}" if key.revoked_at else "valid"
    return output.Row((key.id, key.name, ", ".join(key.models) or "all", output.moment(key.created_at), state))


def _revoke(options: argparse.Namespace) -> int:
    connect(options).json("DELETE", paths.fill(paths.KEY, key=options.key))
    output.say(f"key {options.key} is revoked; routers refuse it within seconds")
    return 0
