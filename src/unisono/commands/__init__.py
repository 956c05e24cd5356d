"""The command line: `unisono run`, `bench`, `draw`, `calibrate`, `demo`, `doctor`. Nothing imports it."""
