"""What a start costs: `llmgw.pyz --version` at most `python -c pass` + 50 ms CPU; `ctl` (its help) is told too.

Medians of 20 in one run, alternating, so that load on the machine hits all alike.
"""
from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = 20
BAR_SECONDS = 0.050


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        pyz = Path(folder) / "llmgw.pyz"
        subprocess.run([sys.executable, str(ROOT / "build_pyz.py"), "--output", str(pyz)], check=True,
                       stdout=subprocess.DEVNULL)
        env = {name: value for name, value in os.environ.items()
               if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
        env.update(LLMGW_PYTHON=sys.executable, SHIV_ROOT=str(Path(folder) / "root"))
        commands = {"python -c pass": [sys.executable, "-c", "pass"],
                    "llmgw.pyz --version": [str(pyz), "--version"],
                    "llmgw.pyz ctl nodes --help": [str(pyz), "ctl", "nodes", "--help"]}
        spent = {name: [] for name in commands}
        for argv in commands.values():            # unpacks, writes bytecode
            cpu_seconds(argv, env)
        for _ in range(ROUNDS):
            for name, argv in commands.items():
                spent[name].append(cpu_seconds(argv, env))
    median = {name: statistics.median(values) for name, values in spent.items()}
    for name, seconds in median.items():
        print(f"{name:30} {seconds * 1000:6.1f} ms CPU, median of {ROUNDS}")
    extra = median["llmgw.pyz --version"] - median["python -c pass"]
    met = extra <= BAR_SECONDS
    print(f"--version costs {extra * 1000:.1f} ms more than python itself; the bar is {BAR_SECONDS * 1000:.0f} ms: "
          f"{'met' if met else 'NOT met'}")
    return 0 if met else 1


def cpu_seconds(argv, env) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
