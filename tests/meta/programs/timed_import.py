"""Says as JSON how long `import unisono` takes, and which modules are there then. Run by test_import.py."""

import json
import sys
import time


def main() -> None:
    start = time.perf_counter()
    import unisono  # noqa: F401

    took = time.perf_counter() - start
    print(json.dumps({"took_s": took, "modules": sorted(sys.modules)}))


main()
