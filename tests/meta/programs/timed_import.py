"""Says as JSON how long `import unisono` takes, and which modules are there then. Run by test_import.py."""

import json
import sys
import time


def main() -> None:
    start = time.process_time()
    import unisono  # noqa: F401

    took = time.process_time() - start
    print(json.dumps({"took_s": took, "modules": sorted(sys.modules)}))


main()
