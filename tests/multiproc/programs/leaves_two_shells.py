"""Leaves two shells; one has the word "protected" in its command line."""

import subprocess

for name in ("protected", "other"):
    subprocess.Popen(["sh", "-c", "sleep 300; true", name])
