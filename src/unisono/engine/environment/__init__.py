"""The settings from the environment (`Settings`), and `env`, the one reader."""
