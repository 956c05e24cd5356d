"""Takes a minute: what must be over before. Run by test_report.py."""

import time

time.sleep(3600)
