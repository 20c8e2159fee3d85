"""The command line: composition roots where siblings meet."""
