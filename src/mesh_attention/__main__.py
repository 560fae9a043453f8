"""`python -m mesh_attention` is the command `mesh-attention`."""

import sys

from mesh_attention.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
