"""Rank r ends after r seconds."""

import os
import time

time.sleep(int(os.environ["RANK"]))
