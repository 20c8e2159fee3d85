"""CPU provision: regions of online pods, a policy per region, and the sizes of pools."""
