"""`python -m deepmrf` is `deepmrf`."""

from deepmrf.cli import app

app(prog_name="deepmrf")
