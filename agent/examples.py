EXAMPLES: dict = {}
