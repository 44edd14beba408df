"""`python -m hf_ddtree.cli` is `hf-ddtree`."""

from . import app

if __name__ == "__main__":
    app(prog_name="hf-ddtree")
