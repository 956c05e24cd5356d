"""`installs_the_engine.py TOOLS LOG PIP...`: install_engine.py with another pip. Run by test_tools.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
install_engine = importlib.import_module("install_engine")
install_engine.LOG = Path(sys.argv[2])
install_engine.PIP = sys.argv[3:]
sys.exit(install_engine.main([]))
