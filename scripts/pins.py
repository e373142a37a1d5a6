"""Print the development tools that pyproject.toml pins, one requirement a line, for `pip install -r`."""
from __future__ import annotations

import re
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
dev = text.split("\ndev = [", 1)[1].split("\n]", 1)[0]     # Python 3.9 has no reader for TOML
print("\n".join(re.findall(r'^\s*"([^"]+)",', dev, re.MULTILINE)))
