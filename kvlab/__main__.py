"""`python -m kvlab` is the command `kvlab`."""

from kvlab.cli import main

if __name__ == "__main__":
    main()
