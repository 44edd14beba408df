"""`python -m hf_ddtree` is `hf-ddtree`."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="hf-ddtree")
