"""`leaves_sigchld.py HOW COMMAND ...`: becomes COMMAND, for which SIGCHLD is "blocked" or "ignored"."""

import os
import signal
import sys

if sys.argv[1] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
else:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp(sys.argv[2], sys.argv[2:])
