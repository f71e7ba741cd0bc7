"""`python -m kvws`."""

from kvws.cli.main import main

if __name__ == "__main__":
    main()
