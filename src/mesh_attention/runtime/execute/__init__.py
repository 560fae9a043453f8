"""One rank runs one program."""
