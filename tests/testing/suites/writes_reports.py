"""A plugin: writes the reports of a run, as JSON, to the file REPORTS; beside it what was imported."""

import json
import os
import sys
import time


class Reports:
    def pytest_runtest_logreport(self, report):
        said = [report.nodeid.partition("::")[2], report.when, report.outcome, str(report.longrepr or "")]
        sections = "".join(f"{name}\n{text}" for name, text in report.sections)
        with open(os.environ["REPORTS"], "a") as file:
            file.write(json.dumps([*said, sections, time.monotonic()]) + "\n")

    def pytest_sessionfinish(self):
        with open(os.environ["REPORTS"] + ".modules", "w") as file:
            file.write("\n".join(sys.modules))


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports())
