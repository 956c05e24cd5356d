"""Python imports a module of this name when it starts, if it is in PYTHONPATH: then recording begins."""

import recorder

recorder.start()
