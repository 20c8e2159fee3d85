"""The next hour's peak of online use: foretold with a margin that calibrates itself by what came true. Pure."""
