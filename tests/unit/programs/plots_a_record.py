"""`plots_a_record.py RECORD PATH`: draws the JSON record of a benchmark. Run by test_bench.py."""

import json
import sys

from unisono.commands.bench.report import plot

plot(json.loads(sys.argv[1]), sys.argv[2])
