"""Let machines and people in: make, list and revoke tokens."""
from __future__ import annotations

import argparse
import re

from llmgw.api import paths, wire
from llmgw.ctl import output, watch
from llmgw.ctl.connection import add_options, connect
from llmgw.domain.errors import UsageError
from llmgw.domain.view import TokenView

TITLES = ("TOKEN", "KIND", "ROLE", "NAME", "USES", "MADE", "STATE")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    create = commands.add_parser("create", help="make a token and print it, this once")
    create.add_argument("--role", required=True, choices=("node", "router", "viewer", "admin"),
                        help="node, router: a string to join with; viewer, admin: a token for ctl and the page")
    create.add_argument("--ttl", default="24h", metavar="TIME",
                        help="how long it is good for, like 30m, 24h, 7d (default: 24h)")
    create.add_argument("--uses", type=int, default=1, metavar="N",
                        help="how many machines may join with it (default: 1)")
    create.add_argument("--name", default="", metavar="NAME", help="how the node or router is to be called")
    create.add_argument("--string", action="store_true",
                        help="print the join string alone, instead of the line that brings a machine in")
    create.add_argument("--json", action="store_true", help="print JSON for programs")
    create.set_defaults(action=_create)
    listing = commands.add_parser("list", help="show all tokens, never their secrets")
    watch.arguments(listing, watch=False)
    listing.set_defaults(action=_list)
    revoke = commands.add_parser("revoke", help="end a token at once")
    revoke.add_argument("token", metavar="ID", help="as `token list` shows it")
    revoke.set_defaults(action=_revoke)
    for each in (create, listing, revoke):
        add_options(each)


def seconds(text: str) -> int:
    """Return how many seconds ``24h`` and its like are; UsageError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None or not int(match.group(1)):
        raise UsageError(f"--ttl {text!r:.40}: not a time", hint="write a number and s, m, h or d, like 24h")
    return int(match.group(1)) * _UNITS[match.group(2)]


def _create(options: argparse.Namespace) -> int:
    wish = {"role": options.role, "ttl_seconds": seconds(options.ttl), "uses": options.uses, "name": options.name}
    client = connect(options)
    data = client.json("POST", paths.TOKENS, wish)
    if options.json:
        output.write_json(data)
        return 0
    made = wire.TOKEN_VIEW.decode(data, "token")
    until = output.moment(made.expires_at) if made.expires_at else "it is revoked"
    if made.kind == "join":
        uses = "one use" if made.uses == 1 else f"{made.uses} uses"
        output.say(f"join string {made.id} for a {made.role}, {uses}, until {until}; it is shown only this once.")
        if made.line and not options.string:
            output.say("Run this line on the new machine, as root or any user: it loads llmgw.pyz, checks it, joins.")
            output.write(output.clean(made.line))
            return 0
        output.say("Give it to the new machine in LLMGW_JOIN or with --join-file, never as an argument:")
    else:
        output.say(f"token {made.id} of the role {made.role}, until {until}; it is shown only this once.")
        output.say("Keep it in a file for --token-file (LLMGW_TOKEN_FILE), or paste it into the page:")
    output.write(output.clean(made.secret))
    return 0


def _list(options: argparse.Namespace) -> int:
    data = connect(options).json("GET", paths.TOKENS)
    if options.json:
        output.write_json(data)
        return 0
    found = [wire.TOKEN_VIEW.decode(item, "token") for item in data["items"]]
    output.write_table(TITLES, [_row(token) for token in found],
                       empty="no token yet: llmgw.pyz ctl token create --role node")
    return 0


def _row(token: TokenView) -> output.Row:
    uses = f"{token.used}/{token.uses}" if token.kind == "join" else "-"
    return output.Row((token.id, token.kind, token.role, token.name or "-", uses, output.moment(token.made_at),
                       _state(token)))


def _state(token: TokenView) -> str:
    if token.revoked_at:
        return f"revoked {output.moment(token.revoked_at)}"
    if token.kind == "join" and token.used >= token.uses:
        return "used"
    return f"until {output.moment(token.expires_at)}" if token.expires_at else "valid"


def _revoke(options: argparse.Namespace) -> int:
    connect(options).json("DELETE", paths.fill(paths.TOKEN, token=options.token))
    output.say(f"token {options.token} is revoked: it opens nothing any more")
    return 0
