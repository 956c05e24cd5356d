"""Prints the pid of a child and leaves it behind. Run by test_leaks.py."""

import subprocess

child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(child.pid)
child.returncode = 0  # no warning about leaving it
