"""The widest command llmgw would ever give each program of an engine, and what its help says to every flag of it."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from llmgw.domain.engine import LLAMA_CPP
from llmgw.domain.model import ModelSpec, Task, Weights, WeightsFile
from llmgw.domain.replica import Gang, GpuSlot, ShardWanted
from llmgw.domain.secret import Secret
from llmgw.engines.base import Engine, Place, Program
from llmgw.parse.engine_help import Help

_KEY = "key-of-a-sample"
_WEIGHTS = Weights("sample", "0" * 64, (WeightsFile("sample.gguf", 1 << 20, "0" * 64),))
_GPUS = (GpuSlot("GPU-00000000-0000-0000-0000-000000000000", 0), GpuSlot("GPU-00000000-0000-0000-0000-000000000001", 1))


class Status(str, enum.Enum):
    """What a help says to one flag."""

    ACCEPTED = "accepted"
    MISSING = "missing"
    REFUSED = "refused"           # the flag is there, and does not take this value
    UNCLEAR = "unclear"           # it is not in the help, which looks cut


@dataclass(frozen=True)
class Use:
    """A flag, with the values it is given (empty text for none), and whether a person wrote it (``args:``)."""

    flag: str
    values: Tuple[str, ...] = ()
    args: bool = False


@dataclass(frozen=True)
class Wide:
    """A program with every flag that it may be given."""

    title: str
    help: Tuple[str, ...]
    sections: Tuple[str, ...]
    env: Mapping[str, str]
    uses: Tuple[Use, ...]


@dataclass(frozen=True)
class Verdict:
    """One flag of one program, and what its help says to it."""

    flag: str
    status: Status
    message: str = ""


def programs(engine: Engine, program: str, work_dir: str, args: Sequence[str] = (),
             library_dirs: Tuple[str, ...] = ()) -> Tuple[Wide, ...]:
    """Return each program of ``engine`` with all flags that it gets in any of the samples, and ``args``."""
    found: Dict[str, Program] = {}
    last = ""
    uses: Dict[str, Dict[str, List[str]]] = {}
    for shard in samples(engine):
        made = engine.programs(shard, _place(engine, program, work_dir, shard, library_dirs))
        for one in made:
            found.setdefault(one.title, one)
            for flag, value in _pairs(one):
                values = uses.setdefault(one.title, {}).setdefault(flag, [])
                if value not in values:
                    values.append(value)
            if one.name == "engine":
                last = one.title
    theirs = tuple(Use(flag, (value,), True) for flag, value in flags(args))
    return tuple(Wide(title, one.help, one.sections, one.command.env, tuple(
        Use(flag, tuple(values)) for flag, values in uses[title].items()) + (theirs if title == last else ()))
        for title, one in found.items())


def samples(engine: Engine) -> Tuple[ShardWanted, ...]:
    """Return shards that together need everything llmgw knows how to ask of the engine."""
    chat = _spec(engine, chat_template="{{ messages }}", context_length=4096, gpus=2,
                 trust_remote_code=engine.name != LLAMA_CPP)
    alone = [(chat, _GPUS), (_spec(engine, gpus=0), ()), (_spec(engine, task=Task.EMBED, gpus=1), _GPUS[:1]),
             (_spec(engine, task=Task.RERANK), _GPUS[:1])]
    over = [(_spec(engine, nodes=2, launch_mode=mode), _GPUS, rank) for mode in ("mp", "ray") for rank in (0, 1)
            ] if engine.over_nodes else []
    gang = Gang(2, 1, "10.0.0.2", "10.0.0.1", 7901)
    return tuple([_shard(spec, gpus, 0, None) for spec, gpus in alone]
                 + [_shard(spec, gpus, rank, gang) for spec, gpus, rank in over])


def _shard(spec: ModelSpec, gpus: Tuple[GpuSlot, ...], rank: int, gang: Optional[Gang]) -> ShardWanted:
    return ShardWanted(f"sample-1.{rank}", "sample-1", rank, spec, "0", _WEIGHTS, Secret(_KEY), gpus, gang)


def _spec(engine: Engine, **more: object) -> ModelSpec:
    return ModelSpec("sample", engine.name, "mirror:sample", **more)  # type: ignore[arg-type]


def _place(engine: Engine, program: str, work_dir: str, shard: ShardWanted, library_dirs: Tuple[str, ...]) -> Place:
    return Place(program, library_dirs, f"{work_dir}/sample", work_dir, f"{work_dir}/key",
                 f"{work_dir}/template.jinja" if shard.model.chat_template else "", 7900,
                 threads=None if shard.gpus else 2,
                 launcher="/launcher", meet_file=f"{work_dir}/meet",
                 inner_ports=tuple(range(7902, 7902 + engine.inner_ports(shard))),
                 projector_path=f"{work_dir}/mmproj.gguf" if shard.model.engine == LLAMA_CPP else "")


def _pairs(program: Program) -> List[Tuple[str, str]]:
    """Return (flag, value) of what stands after the words that lead to the program's help, too."""
    argv, start = program.command.argv, 0
    if "--" in argv:                      # before it: what is for a launcher of ours
        return flags(argv[argv.index("--") + 1:])
    while start < min(len(argv), len(program.help)) and argv[start] == program.help[start]:
        start += 1
    return flags(argv[start:])


def flags(words: Sequence[str]) -> List[Tuple[str, str]]:
    """Return (flag, value) of a command's words; the value is empty where none follows."""
    found: List[Tuple[str, str]] = []
    for at, word in enumerate(words):
        if not is_flag(word):
            continue
        flag, equals, value = word.partition("=")
        after = words[at + 1] if at + 1 < len(words) and not is_flag(words[at + 1]) else ""
        found.append((flag, value if equals else after))
    return found


def is_flag(word: str) -> bool:
    """Whether a word of a command is a flag, and not a value such as -1."""
    return word.startswith("-") and len(word) > 1 and not word[1:2].isdigit() and word != "--"


def judge(wide: Wide, said: Help, unlisted: Sequence[str] = (), *, same_dashes: bool = False) -> Tuple[Verdict, ...]:
    """Return the verdict on every flag of the program; ``same_dashes``: it takes --a_b for --a-b in ``args:``."""
    return tuple(_judge(use, wide.title, said, unlisted, same_dashes) for use in wide.uses)


def _judge(use: Use, title: str, said: Help, unlisted: Sequence[str], same_dashes: bool) -> Verdict:
    entry = said.find(use.flag)
    if entry is None and use.args and same_dashes and use.flag.startswith("--"):
        entry = said.find(use.flag.replace("_", "-"))
    if entry is None:
        if any(use.flag.startswith(flag) for flag in unlisted):
            return Verdict(use.flag, Status.ACCEPTED)
        if said.truncated:
            return Verdict(use.flag, Status.UNCLEAR, "it is not in the help, which looks cut")
        return Verdict(use.flag, Status.MISSING, f"{title} has no {use.flag}" + (" (from args:)" if use.args else ""))
    wrong = [value for value in use.values if value and entry.takes_value and entry.choices
             and value not in entry.choices]
    if wrong:
        return Verdict(use.flag, Status.REFUSED,
                       f"{title} {use.flag} does not take {wrong[0]}, only {', '.join(entry.choices)[:200]}")
    return Verdict(use.flag, Status.ACCEPTED)
