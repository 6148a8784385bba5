"""`python -m kvarn` is `kvarn`: for environments whose scripts are not on the path."""

from kvarn.cli.main import main

if __name__ == "__main__":
    main()
