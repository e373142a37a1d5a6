"""nvidia-smi: the GPUs of a node. It prints its errors on stdout, and [N/A] for what it does not know."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from llmgw.domain.errors import ParseError, RebootNeeded
from llmgw.domain.node import Gpu

# name is in the middle, because it alone may hold commas: the rest is taken from both ends
FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "mig.mode.current",
          "memory.total", "memory.used")
# drivers before R510 do not know compute_cap, and refuse the whole query
FIELDS_OLD = tuple(field for field in FIELDS if field != "compute_cap")
APPS_FIELDS = ("pid", "used_gpu_memory", "gpu_uuid")

MEBIBYTE = 1 << 20
_NUMBER = re.compile(r"[0-9]{1,9}")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,60}")
_MISMATCH = ("driver/library version mismatch", "the NVIDIA driver was updated and its kernel module was not: "
             "driver and library versions differ", "reboot the node, or reload the nvidia kernel modules")
_PROBLEMS = (
    ("couldn't communicate with the nvidia driver", "the NVIDIA driver is not loaded",
     "install or load the NVIDIA driver"),
    ("driver not loaded", "the NVIDIA driver is not loaded", "install or load the NVIDIA driver"),
    ("gpu access blocked by the operating system", "the operating system blocks the access to the GPU", ""),
    ("unable to determine the device handle", "a GPU has fallen off the bus", "reboot the node"),
    ("no devices were found", "the NVIDIA driver finds no device", ""),
    ("insufficient permissions", "no permission to ask the NVIDIA driver", ""),
)


@dataclass(frozen=True)
class Reading:
    """The GPUs that were read, and the driver's version (2 or 3 parts)."""

    driver: Optional[str]
    gpus: Tuple[Gpu, ...]


def gpus(text: str, fields: Tuple[str, ...] = FIELDS) -> Reading:
    """Return the GPUs of a ``--query-gpu`` CSV, with or without header and units.

    ParseError with the reason in plain words when the text is one of nvidia-smi's errors.
    """
    found: List[Gpu] = []
    driver = None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        row = _row(line, fields)
        if row is None:
            continue
        found.append(_gpu(row))
        driver = _known(row["driver_version"]) or driver
    if not found:
        raise problem(text)
    return Reading(driver, tuple(found))


def problem(text: str) -> ParseError:
    """Return why there are no GPUs in what nvidia-smi printed; RebootNeeded when only that helps."""
    lowered = " ".join(text.lower().split())
    if _MISMATCH[0] in lowered:
        return RebootNeeded(_MISMATCH[1], hint=_MISMATCH[2])
    for words, message, hint in _PROBLEMS:
        if words in lowered:
            return ParseError(message, hint=hint or None)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return ParseError(f"nvidia-smi says: {first[:200]}" if first else "nvidia-smi says nothing")


def app_pids(text: str) -> Tuple[Tuple[int, Optional[int]], ...]:
    """Return (pid, bytes or unknown) of a ``--query-compute-apps`` CSV of APPS_FIELDS."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(APPS_FIELDS) and _NUMBER.fullmatch(parts[0]):
            rows.append((int(parts[0]), _bytes(parts[1])))
    return tuple(rows)


def apps(text: str) -> Tuple[Tuple[int, Optional[int], str], ...]:
    """Return (pid, bytes or unknown, uuid of the card) of a ``--query-compute-apps`` CSV of APPS_FIELDS."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(APPS_FIELDS) and parts[0].isdigit() and _UUID.fullmatch(parts[2]):
            rows.append((int(parts[0]), _bytes(parts[1]), parts[2]))
    return tuple(rows)


def _row(line: str, fields: Tuple[str, ...]) -> Optional[Dict[str, str]]:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < len(fields):
        return None
    middle = fields.index("name")
    after = len(fields) - middle - 1
    row = dict(zip(fields[:middle], parts))
    row["name"] = ", ".join(parts[middle:len(parts) - after])
    row.update(zip(fields[middle + 1:], parts[len(parts) - after:]))
    return row if _NUMBER.fullmatch(row["index"]) and _UUID.fullmatch(row["uuid"]) else None


def _gpu(row: Dict[str, str]) -> Gpu:
    capability = _known(row.get("compute_cap", ""))
    return Gpu(uuid=row["uuid"], index=int(row["index"]), name=row["name"],
               memory_total_bytes=_bytes(row["memory.total"]),
               memory_used_bytes=_bytes(row["memory.used"]),
               compute_capability=capability if capability and re.fullmatch(r"\d+\.\d+", capability) else None,
               mig=row["mig.mode.current"].lower() == "enabled")


def _known(text: str) -> Optional[str]:
    """Return the text, or None for [N/A], [Not Supported], ERR! and their like."""
    return None if not text or text.startswith("[") or "ERR!" in text else text


def _bytes(text: str) -> Optional[int]:
    match = re.fullmatch(r"([0-9]{1,9})(?: MiB)?", text)
    return int(match.group(1)) * MEBIBYTE if match else None
