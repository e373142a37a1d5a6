"""What a node costs that has nothing to do: the agent at most 40 MB and 0.5 % of a core, one nvidia-smi call in 30 s.

A control plane, the built llmgw.pyz as agent, its engine installed, no model. A program stands for nvidia-smi and notes
each call. The gate, a process of its own, is told too. Other work on the machine makes the figures worse, never better.
"""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]

import bring  # noqa: E402
from tests.fakes.cuda_archive import GPU  # noqa: E402
from tests.whole.cluster import Cluster, until  # noqa: E402

SETTLE_SECONDS, SECONDS = 35.0, 120.0
MOST_BYTES, MOST_SHARE, MOST_CALLS = 40e6, 0.005, SECONDS / 30 + 1      # one more: where the window begins
SMI = """#!/bin/sh
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
cat <<'X'
{text}
X
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        smi = folder / "bin" / "nvidia-smi"
        smi.parent.mkdir()
        smi.write_text(SMI.format(text=GPU))
        smi.chmod(0o755)
        pyz = folder / "llmgw.pyz"
        subprocess.run([sys.executable, str(ROOT / "build_pyz.py"), "--output", str(pyz)], check=True,
                       stdout=subprocess.DEVNULL)
        place = Cluster(pyz, folder, ROOT / "tests" / "data" / "templates" / "qa.jinja")
        place.env.update(LLMGW_REHEARSE_NVIDIA_PATH=str(smi.parent), SHIV_ROOT=str(folder / "shiv"), LLMGW_ENGINE_USER="root")
        place.config.write_text("cluster: test\nlisten: 127.0.0.1:0\nengines:\n  llama.cpp: {version: b10991, cpu: true}\n")
        try:
            return measured(place, smi.parent / "calls")
        finally:
            place.close()


def measured(place: Cluster, calls: pathlib.Path) -> int:
    archive = bring.llama_archive()
    place.start_server()
    place.ctl("mirror", "import-engine", archive.path, "--sha256", archive.sha256)
    place.start_agent()
    try:
        until("the engine is there", lambda: any(
            engine["usable"] for node in place.items("nodes") for engine in node["engines"]), 120)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{place.ctl('engines')}\n{place.logs()}") from None
    time.sleep(SETTLE_SECONDS)
    programs = {"agent": place.children["node-1"].pid, "gate": gate_of(place.dir("node-1"))}
    before, asked = {name: cpu_seconds(pid) for name, pid in programs.items()}, len(calls.read_text().splitlines())
    time.sleep(SECONDS)
    met = True
    for name, pid in programs.items():
        share, size = (cpu_seconds(pid) - before[name]) / SECONDS, resident_bytes(pid)
        print(f"{name:6} {size / 1e6:5.1f} MB, {share * 100:.2f} % of a core over {SECONDS:.0f} s")
        met = met and (name != "agent" or (size <= MOST_BYTES and share <= MOST_SHARE))
    asked = len(calls.read_text().splitlines()) - asked
    met = met and asked <= MOST_CALLS
    print(f"nvidia-smi was asked {asked} times in {SECONDS:.0f} s; the bars are {MOST_BYTES / 1e6:.0f} MB, "
          f"{MOST_SHARE * 100:.1f} %, one call in 30 s: {'met' if met else 'NOT met'}")
    return 0 if met else 1


def gate_of(data_dir: pathlib.Path) -> int:
    table = json.loads((data_dir / "gate" / "table.json").read_text())
    with urllib.request.urlopen(f"http://{table['host']}:{table['port']}/healthz", timeout=30) as answer:
        return int(json.load(answer)["pid"])


def cpu_seconds(pid: int) -> float:
    """Return what the process and the children that it waited for have used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
