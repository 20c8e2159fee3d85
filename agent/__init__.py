"""One node: sense, advise, act, report. Siblings (probes, exporters) meet it only in `agent/__main__.py` and the CLI."""
