"""Guard that speaks to a too-old Python; Python 2.7 syntax on purpose."""
import sys

if sys.version_info < (3, 9):
    sys.stderr.write("llmgw: needs Python 3.9 or newer, but %s is Python %d.%d.%d. "
                     "Set LLMGW_PYTHON or install a newer python3.\n"
                     % ((sys.executable,) + tuple(sys.version_info[:3])))
    sys.exit(69)

from llmgw.cli import main

main()
