"""`dioptase probe NAME`: one generic view of every probe, and views of their own for some probes.
A module named like a probe holds that probe's command object; helper modules must not take a probe's name.
"""
