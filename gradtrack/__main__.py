"""The command line, as `python -m gradtrack`."""

from gradtrack.cli import main

if __name__ == "__main__":
    main()
