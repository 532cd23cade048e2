"""``python -m emutpu``: the command line."""

from emutpu.cli import main

if __name__ == "__main__":
    main()
