"""How much CPU online pods are to have: regions, a policy for each, pools sized from what all of them ask for. Pure."""
